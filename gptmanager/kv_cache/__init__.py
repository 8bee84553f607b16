"""The block accounting of the paged KV cache: `KvCacheManager` and the values that it returns."""

from gptmanager.kv_cache.block import BlockCopy, KvCacheReport, LedgerError
from gptmanager.kv_cache.block_reuse import ReuseCounts
from gptmanager.kv_cache.manager import KvCacheManager
from gptmanager.kv_cache.offloading import HostCounts
from gptmanager.kv_cache.state_snapshots import NO_SNAPSHOT, StateCopy

__all__ = [
    "NO_SNAPSHOT", "BlockCopy", "HostCounts", "KvCacheManager", "KvCacheReport", "LedgerError",
    "ReuseCounts", "StateCopy",
]  # fmt: skip
