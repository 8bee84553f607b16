"""What tests write again and again: a request, a small manager and its options."""

from __future__ import annotations

from typing import Any

from loop_driver import next_token

from gptmanager import GptManager, InferenceRequest, KvCacheConfig, ModelType, OptionalParams
from gptmanager.testing import RecordingCallbacks, ScriptedModel

request = InferenceRequest.from_tokens


def params(**options: Any) -> OptionalParams:
    """64 blocks of 4 tokens, 4 requests at a time."""
    options.setdefault("kv_cache_config", KvCacheConfig(max_tokens=256, tokens_per_block=4))
    options.setdefault("max_batch_size", 4)
    return OptionalParams(**options)


def start(
    host: RecordingCallbacks, script: Any = next_token, config: Any = None, **options: Any
) -> GptManager:
    """A manager of a scripted model, which wakes when `host` is given something."""
    host.manager = GptManager(
        ScriptedModel(script, vocab_size=100, max_position_embeddings=128),
        ModelType.INFLIGHT_FUSED_BATCHING,
        1,
        config,
        optional_params=params(**options),
        **host.keywords(),
    )
    return host.manager
