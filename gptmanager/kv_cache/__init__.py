"""The paged KV cache's accounts: `KvCacheManager` and the values that it hands out."""

from gptmanager.kv_cache.block import BlockCopy, KvCacheReport, LedgerError
from gptmanager.kv_cache.manager import KvCacheManager

__all__ = ["BlockCopy", "KvCacheManager", "KvCacheReport", "LedgerError"]
