"""The paged KV cache's accounts: `KvCacheManager` and the values that it hands out."""

from gptmanager.kv_cache.block import BlockCopy, KvCacheReport, LedgerError
from gptmanager.kv_cache.manager import KvCacheManager
from gptmanager.kv_cache.reuse import ReuseCounts
from gptmanager.kv_cache.tiers import HostCounts

__all__ = [
    "BlockCopy", "HostCounts", "KvCacheManager", "KvCacheReport", "LedgerError", "ReuseCounts",
]  # fmt: skip
