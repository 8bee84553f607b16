"""What tests write again and again: a request, and the options of a small manager."""

from __future__ import annotations

from typing import Any

from gptmanager import InferenceRequest, KvCacheConfig, OptionalParams

request = InferenceRequest.from_tokens


def params(**options: Any) -> OptionalParams:
    """64 blocks of 4 tokens, 4 requests at a time."""
    options.setdefault("kv_cache_config", KvCacheConfig(max_tokens=256, tokens_per_block=4))
    options.setdefault("max_batch_size", 4)
    return OptionalParams(**options)
