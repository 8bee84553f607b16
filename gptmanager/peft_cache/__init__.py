"""The page accounting of the LoRA cache: `PeftCacheManager` and the values that it returns."""

from gptmanager.peft_cache.layout import AdapterRow, CacheSizes, cache_sizes
from gptmanager.peft_cache.manager import (
    PageCopy,
    PeftCacheCounts,
    PeftCacheManager,
    PeftCacheReport,
    Put,
)
from gptmanager.peft_cache.page_eviction import CachedAdapter

__all__ = [
    "AdapterRow", "CacheSizes", "CachedAdapter", "PageCopy", "PeftCacheCounts", "PeftCacheManager",
    "PeftCacheReport", "Put", "cache_sizes",
]  # fmt: skip
