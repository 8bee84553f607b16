"""The block accounting of the paged KV cache: `KvCacheManager` and the values that it returns."""

from gptmanager.kv_cache.block import BlockCopy, KvCacheReport, LedgerError
from gptmanager.kv_cache.block_reuse import ReuseCounts
from gptmanager.kv_cache.manager import KvCacheManager
from gptmanager.kv_cache.offloading import HostCounts

__all__ = [
    "BlockCopy", "HostCounts", "KvCacheManager", "KvCacheReport", "LedgerError", "ReuseCounts",
]  # fmt: skip
