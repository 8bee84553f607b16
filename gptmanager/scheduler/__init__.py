"""Schedulers: policies in pure Python. Each can be constructed and called without `GptManager`."""

from gptmanager.kv_cache.manager import KvCacheManager
from gptmanager.request.llm_request import (
    LlmRequest,
    LlmRequestState,
    RequestList,
    insert_by_priority,
)
from gptmanager.scheduler.bulk_counts import BulkCounts
from gptmanager.scheduler.capacity import (
    CapacityScheduler,
    GuaranteedNoEvictScheduler,
    MaxRequestsScheduler,
    StaticBatchScheduler,
)
from gptmanager.scheduler.max_utilization import MaxUtilizationScheduler
from gptmanager.scheduler.micro_batch import MicroBatchScheduler
from gptmanager.scheduler.reuse_credit import ReuseCredit
from gptmanager.scheduler.simple import RequestScheduler, SchedulerOutput, SimpleScheduler

__all__ = [
    "BulkCounts",
    "CapacityScheduler",
    "GuaranteedNoEvictScheduler",
    "KvCacheManager",
    "LlmRequest",
    "LlmRequestState",
    "MaxRequestsScheduler",
    "MaxUtilizationScheduler",
    "MicroBatchScheduler",
    "RequestList",
    "RequestScheduler",
    "ReuseCredit",
    "SchedulerOutput",
    "SimpleScheduler",
    "StaticBatchScheduler",
    "insert_by_priority",
]
