"""What each field of a configuration may be by itself: its type, its range, or its default only.

A field that has no effect in this library, or whose support has not landed yet, is refused when it
is set off its default.
"""

from __future__ import annotations

import copy
from dataclasses import fields
from enum import IntEnum
from numbers import Integral, Real
from typing import Any

from gptmanager.config import (
    KvCacheConfig,
    OptionalParams,
    PeftCacheManagerConfig,
    PromptLookup,
)
from gptmanager.errors import ConfigError

_NO_EFFECT = "it has no effect in this library"
_LATER = "its support has not landed yet"

# class -> {field: why it is refused when it differs from its default}
_REFUSED: dict[type, dict[str, str]] = {
    KvCacheConfig: {
        "use_uvm": _NO_EFFECT,
        "cross_kv_cache_fraction": _NO_EFFECT,
        "event_buffer_max_size": _NO_EFFECT,
    },
    PeftCacheManagerConfig: {f.name: _LATER for f in fields(PeftCacheManagerConfig)},
    OptionalParams: {
        "device_ids": _LATER,
        "decoding_mode": _NO_EFFECT + ": a request's beam_width and sampling tensors decide",
        "decoding_config": _NO_EFFECT,
        "guided_decoding_config": _LATER,
        "gpu_weights_percent": _NO_EFFECT,
        "max_beam_width": _NO_EFFECT + ": it is an argument of GptManager",
        "scheduler_config": _NO_EFFECT + ": it is an argument of GptManager",
        "extended_runtime_perf_knob_config": _NO_EFFECT,
        "debug_config": _NO_EFFECT,
        "max_seq_idle_microseconds": _NO_EFFECT,
        "max_num_sequences": _NO_EFFECT + ": set max_active_requests",
    },
}

_MANY = 2**31 - 1  # tokens, requests, blocks: int32 holds them everywhere
_HUGE = 2**63 - 1  # bytes

# field -> (smallest, largest) permitted value
_RANGES: dict[type, dict[str, tuple[float, float]]] = {
    PromptLookup: {
        "max_draft_tokens": (1, _MANY),
        "max_ngram": (1, _MANY),
        "min_ngram": (1, _MANY),
    },
    KvCacheConfig: {
        "max_tokens": (1, _MANY),
        "tokens_per_block": (1, _MANY),
        "host_cache_size": (0, _HUGE),
        "secondary_offload_min_priority": (0, 100),
        "max_attention_window": (1, _MANY),
        "sink_token_length": (0, _MANY),
        "host_bytes_per_s": (1.0, 1e18),
        "recompute_tokens_per_s": (1.0, 1e18),
    },
    OptionalParams: {
        "run_ahead": (0, 1),
        "max_batch_size": (1, _MANY),
        "max_num_tokens": (1, _MANY),
        "max_seq_len": (2, _MANY),
        "max_active_requests": (1, _MANY),
        "idle_poll_s": (0.0, 1e6),
        "callback_budget_s": (0.0, 1e6),
        "step_budget_s": (1e-3, 1e6),
        "max_waiting_requests": (0, _MANY),
        "max_get_failures": (1, _MANY),
        "max_step_failures": (1, _MANY),
        "logits_post_processor_budget_s": (0.0, 1e6),
        "black_box_iterations": (0, _MANY),
        "black_box_bytes": (1 << 20, _HUGE),
        "seed": (0, 2**64 - 1),
    },
}

_UNBOUNDED = (
    "max_active_requests", "idle_poll_s", "callback_budget_s", "logits_post_processor_budget_s",
)  # fmt: skip


def checked_fields(config: Any, cls: type, where: str) -> Any:
    """A private copy of `config`, which stands at `where` and must be a `cls`.

    Raises ConfigError naming the first field that cannot be.
    """
    if not isinstance(config, cls):
        raise ConfigError(f"{where} = {config!r}, expected {cls.__name__}")
    default = cls()
    for name, reason in _REFUSED.get(cls, {}).items():
        value = getattr(config, name)
        if not _equal(value, getattr(default, name)):
            raise ConfigError(f"{cls.__name__}.{name} = {value!r} is refused: {reason}")
    for name in (field.name for field in fields(cls)):
        value = getattr(config, name)
        if isinstance(getattr(default, name), bool) and not isinstance(value, bool):
            raise ConfigError(f"{cls.__name__}.{name} = {value!r} is neither True nor False")
    for name, bounds in _RANGES.get(cls, {}).items():
        value, neutral = getattr(config, name), getattr(default, name)
        _require_range(f"{cls.__name__}.{name}", value, neutral, *bounds, name in _UNBOUNDED)
    return copy.copy(config)


def require_member(config: Any, name: str, enum: type[IntEnum]) -> None:
    value = getattr(config, name)
    if not isinstance(value, enum):
        raise ConfigError(f"{type(config).__name__}.{name} = {value!r} is not a {enum.__name__}")


def _require_range(
    where: str, value: Any, default: Any, low: float, high: float, may_lack: bool
) -> None:
    # a default may be None or "auto"
    if (not isinstance(default, Real) and _equal(value, default)) or (value is None and may_lack):
        return
    kind, noun = (Real, "a number") if isinstance(low, float) else (Integral, "an integer")
    number = isinstance(value, kind) and not isinstance(value, bool)
    if not number or not low <= value <= high:  # NaN is not
        raise ConfigError(f"{where} = {value!r} must be {noun} from {low} to {high}")


def _equal(value: Any, default: Any) -> bool:
    try:
        return bool(value == default)
    except (TypeError, ValueError):  # an array, say: no default is one
        return False
