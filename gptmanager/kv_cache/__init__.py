"""The block accounting of the paged KV cache: `KvCacheManager` and the values that it returns."""

from gptmanager.kv_cache.block import BlockCopy, KvCacheReport, LedgerError
from gptmanager.kv_cache.manager import KvCacheManager
from gptmanager.kv_cache.offloading import HostCounts
from gptmanager.kv_cache.reuse import ReuseCounts

__all__ = [
    "BlockCopy", "HostCounts", "KvCacheManager", "KvCacheReport", "LedgerError", "ReuseCounts",
]  # fmt: skip
