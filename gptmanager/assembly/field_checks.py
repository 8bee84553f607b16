"""Checks of single fields of options: their ranges, and the fields that must keep their default."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields
from enum import IntEnum
from numbers import Integral, Real
from typing import Any

from gptmanager.arguments import flag
from gptmanager.config import (
    KvCacheConfig,
    OptionalParams,
    ParallelConfig,
    PeftCacheManagerConfig,
    PromptLookup,
)
from gptmanager.errors import ConfigError, quoted

_NO_EFFECT = "it has no effect in this library"

# class -> {field: why it must have its default value}
_REFUSED: dict[type, dict[str, str]] = {
    KvCacheConfig: {
        "use_uvm": _NO_EFFECT,
        "cross_kv_cache_fraction": _NO_EFFECT,
        "event_buffer_max_size": _NO_EFFECT,
    },
    OptionalParams: {
        "device_ids": _NO_EFFECT + ": a manager has one device",
        "decoding_mode": _NO_EFFECT + ": a request's beam_width and sampling tensors decide",
        "decoding_config": _NO_EFFECT + ": the tensors of a request decide",
        "guided_decoding_config": _NO_EFFECT + ": a request has a grammar of its own",
        "gpu_weights_percent": _NO_EFFECT,
        "max_beam_width": _NO_EFFECT + ": it is an argument of GptManager",
        "scheduler_config": _NO_EFFECT + ": it is an argument of GptManager",
        "extended_runtime_perf_knob_config": _NO_EFFECT,
        "debug_config": _NO_EFFECT,
        "max_seq_idle_microseconds": _NO_EFFECT,
        "max_num_sequences": _NO_EFFECT + ": set max_active_requests",
    },
}

_MANY = 2**31 - 1  # limit for numbers of tokens, requests and blocks, which must fit in int32
_HUGE = 2**63 - 1  # limit for sizes in bytes
_MOST_RANK = 1 << 16  # limit of the rank of an adapter
_MOST_THREADS = 256
_MOST_RANKS = 1024

# class -> {field: (lowest, highest) allowed value}
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
        "state_snapshots": (0, 1 << 21),
    },
    PeftCacheManagerConfig: {
        "num_host_module_layer": (0, _MANY),
        "num_device_module_layer": (0, _MANY),
        "optimal_adapter_size": (1, _MOST_RANK),
        "max_adapter_size": (1, _MOST_RANK),
        "num_put_workers": (1, _MOST_THREADS),
        "num_ensure_workers": (1, _MOST_THREADS),
        "num_copy_streams": (1, _MOST_THREADS),
        "max_pages_per_block_host": (1, _MANY),
        "max_pages_per_block_device": (1, _MANY),
        "device_cache_percent": (0.0, 1.0),
        "host_cache_size": (0, _HUGE),
    },
    ParallelConfig: {
        "tensor_parallel_size": (1, _MOST_RANKS),
        "pipeline_parallel_size": (1, _MOST_RANKS),
        "timeout_s": (0.1, 1e6),
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
        "journal_max_resumes": (1, _MANY),
        "logits_post_processor_budget_s": (0.0, 1e6),
        "black_box_iterations": (0, _MANY),
        "black_box_bytes": (1 << 20, _HUGE),
        "seed": (0, 2**64 - 1),
    },
}

_OPEN = ("enable_block_reuse",)  # flags that may be None
_OTHERS: dict[str, tuple[str | None, ...]] = {  # values of these fields that are not numbers
    "max_active_requests": ("auto", None),
    "idle_poll_s": (None,),
    "callback_budget_s": (None,),
    "logits_post_processor_budget_s": (None,),
}


def checked_fields(config: Any, cls: type, where: str) -> Any:
    """Return a private copy of `config`, which must be an instance of `cls`.

    Raise ConfigError, which names `where` for an object of another class, otherwise the first
    invalid field.
    """
    if not isinstance(config, cls):
        raise ConfigError(f"{where} = {quoted(config)}, expected {cls.__name__}")
    default = cls()
    for name, reason in _REFUSED.get(cls, {}).items():
        value = getattr(config, name)
        if not _equal(value, getattr(default, name)):
            raise ConfigError(f"{cls.__name__}.{name} = {quoted(value)} is refused: {reason}")
    for name in (field.name for field in fields(cls)):
        value = getattr(config, name)
        if isinstance(getattr(default, name), bool):
            (optional_flag if name in _OPEN else flag)(f"{cls.__name__}.{name}", value)
    for name, bounds in _RANGES.get(cls, {}).items():
        value, neutral = getattr(config, name), getattr(default, name)
        require_range(f"{cls.__name__}.{name}", value, neutral, *bounds, _OTHERS.get(name, ()))
    return copy.copy(config)


def require_member(config: Any, name: str, enum: type[IntEnum]) -> None:
    """Raise ConfigError unless the field `name` of `config` is a member of `enum`."""
    value = getattr(config, name)
    if not isinstance(value, enum):
        raise ConfigError(
            f"{type(config).__name__}.{name} must be a {enum.__name__}, got {quoted(value)}"
        )


def require_word(where: str, value: Any, allowed: Sequence[str | None]) -> None:
    """Raise ConfigError unless `value` is a string, or None, and one of `allowed`."""
    if not _is_word(value, allowed):
        is_pair = len(allowed) == 2 and None not in allowed
        words = " or ".join(map(repr, allowed)) if is_pair else f"one of {allowed}"
        raise ConfigError(f"{where} = {quoted(value)} must be {words}")


def require_range(
    where: str,
    value: Any,
    default: Any,
    low: float,
    high: float,
    others: Sequence[str | None] = (),
) -> None:
    """Raise ConfigError unless `value` is a number from `low` to `high`, or one of `others`.

    If `low` is an int, the number must be an integer. None is also permitted if it is the
    `default`.
    """
    if (value is None and default is None) or _is_word(value, others):
        return
    kind, noun = (Real, "a number") if isinstance(low, float) else (Integral, "an integer")
    number = isinstance(value, kind) and not isinstance(value, bool)
    if not number or not low <= value <= high:  # also true for NaN
        words = f", or {' or '.join(map(repr, others))}" if others else ""
        raise ConfigError(f"{where} = {quoted(value)} must be {noun} from {low} to {high}{words}")


def optional_flag(where: str, value: Any) -> None:
    """Raise ConfigError unless `value` is None, True or False."""
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{where} = {quoted(value)} must be None, True or False")


def _is_word(value: Any, allowed: Sequence[str | None]) -> bool:
    """Whether `value` is in `allowed`. An array of one string would be equal to the string."""
    return (value is None or isinstance(value, str)) and value in allowed


def _equal(value: Any, default: Any) -> bool:
    try:
        return bool(value == default)
    except (TypeError, ValueError):  # for example an array, which is not a default
        return False
