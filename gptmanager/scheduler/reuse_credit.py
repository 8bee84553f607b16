"""`ReuseCredit`: records how many tokens of each starting context are in the KV cache.

`MicroBatchScheduler` reads this number from `LlmRequest.estimated_reusable_tokens`. In a manager,
`ReuseCredit` sets the number. Without a manager, the caller of the scheduler sets it. This module
makes no scheduling decisions.
"""

from __future__ import annotations

from collections.abc import Mapping

from gptmanager.arguments import able
from gptmanager.kv_cache.manager import KvCacheManager
from gptmanager.request.llm_request import LlmRequestState, RequestList
from gptmanager.scheduler.capacity import CapacityScheduler
from gptmanager.scheduler.wait_reasons import Wait, reported_waits

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT


class ReuseCredit(CapacityScheduler):
    """Calls another capacity scheduler, and sets the reusable tokens of each context that starts.

    Only full blocks count. A starting context finds at least the recorded number of tokens if
    `KvCacheManager.holding_cached` keeps the blocks until the start.
    """

    def __init__(
        self, capacity_scheduler: CapacityScheduler, kv_cache_manager: KvCacheManager
    ) -> None:
        self.capacity_scheduler = able(
            "capacity_scheduler", capacity_scheduler, "schedule_request", "CapacityScheduler"
        )
        self.kv_cache_manager = able(
            "kv_cache_manager", kv_cache_manager, "get_reusable_tokens", "KvCacheManager"
        )

    def why_waiting(self, active_requests: RequestList) -> Mapping[int, Wait] | None:
        return reported_waits(self.capacity_scheduler, active_requests)

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        fitting, paused = self.capacity_scheduler.schedule_request(active_requests)
        beginning = [
            request
            for request in fitting
            if request.state is _CONTEXT_INIT and not request.context_current_position
        ]
        if beginning:
            reusable = self.kv_cache_manager.get_all_reusable_tokens(beginning)
            if not any(reusable) and not any([r.estimated_reusable_tokens for r in beginning]):
                return fitting, paused
            for request, num_tokens in zip(beginning, reusable, strict=True):
                if request.estimated_reusable_tokens != num_tokens:
                    request.estimated_reusable_tokens = num_tokens
        return fitting, paused
