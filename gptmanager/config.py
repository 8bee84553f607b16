"""What a host configures: plain mutable dataclasses, checked by name before anything starts.

The camelCase names of TensorRT-LLM's optional parameters exist here as snake_case fields with
their documented defaults. A field that has no effect in this library, or whose support has not
landed yet, is refused when it is set off its default: nothing is ever silently ignored.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Literal

from gptmanager.errors import ConfigError


class ModelType(IntEnum):
    """The batching scheme."""

    V1 = 0
    INFLIGHT_BATCHING = 1
    INFLIGHT_FUSED_BATCHING = 2


class CapacitySchedulerPolicy(IntEnum):
    """Which active requests get memory in an iteration."""

    MAX_UTILIZATION = 0
    GUARANTEED_NO_EVICT = 1
    STATIC_BATCH = 2


class ContextChunkingPolicy(IntEnum):
    """How long contexts are cut into chunks when they do not all fit."""

    FIRST_COME_FIRST_SERVED = 0
    EQUAL_PROGRESS = 1
    FORCE_CHUNK = 2


class FinishReason(IntEnum):
    """Why a sequence ended, as sent in `finish_reasons`."""

    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


@dataclass
class SchedulerConfig:
    """Which scheduler runs.

    `create_scheduler`, when given, is called with the keyword arguments `max_num_requests,
    kv_cache_manager, max_batch_size, max_num_tokens, micro_batch_scheduler` and returns a
    `gptmanager.scheduler.RequestScheduler`.
    """

    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy | None = None
    create_scheduler: Callable[..., Any] | None = None


@dataclass
class KvCacheConfig:
    """The paged KV cache: how large, and what it may do. Lengths in tokens, sizes in bytes."""

    max_tokens: int | None = None
    max_attention_window: int | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = None
    enable_block_reuse: bool = False
    use_uvm: bool = False
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    tokens_per_block: int = 64


@dataclass
class PeftCacheManagerConfig:
    """The LoRA cache. Sizes in bytes, `device_cache_percent` a fraction."""

    num_host_module_layer: int = 0
    num_device_module_layer: int = 0
    optimal_adapter_size: int = 8
    max_adapter_size: int = 64
    num_put_workers: int = 1
    num_ensure_workers: int = 1
    num_copy_streams: int = 1
    max_pages_per_block_host: int = 24
    max_pages_per_block_device: int = 24
    device_cache_percent: float = 0.05
    host_cache_size: int = 1 << 30


@dataclass
class OptionalParams:
    """Everything about a manager that has a default.

    Lengths are tokens, times seconds, sizes bytes. `max_seq_len` None: the checkpoint's
    `max_position_embeddings`. `max_active_requests` "auto": `max_batch_size` times the number of
    micro batches; None: unbounded, Get is then called with -1. `idle_poll_s` None: an idle manager
    asks Get only on `notify()`. `callback_budget_s`: a callback that overstays it is named in the
    log. `max_get_failures`: calls of Get in a row that may fail; one more ends the manager.
    """

    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_trt_overlap: bool = False
    run_ahead: int = 0
    enable_chunked_context: bool | None = None
    peft_cache_manager_config: PeftCacheManagerConfig = field(
        default_factory=PeftCacheManagerConfig
    )
    max_batch_size: int = 256
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    max_active_requests: int | Literal["auto"] | None = "auto"
    idle_poll_s: float | None = 0.01
    exclude_input_in_output: bool = False
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    normalize_log_probs: bool = True
    device: str | None = None
    dtype: str | None = None
    deterministic: bool = False
    seed: int = 0
    callback_budget_s: float | None = 1.0
    max_get_failures: int = 10
    device_ids: list[int] | None = None
    decoding_mode: str | None = None
    decoding_config: Any = None
    speculative_decoding_config: Any = None
    guided_decoding_config: Any = None
    logits_post_processor_batched: Any = None
    gpu_weights_percent: float = 1.0
    max_beam_width: int | None = None
    scheduler_config: SchedulerConfig | None = None
    extended_runtime_perf_knob_config: Any = None
    debug_config: Any = None
    max_seq_idle_microseconds: int | None = None
    max_num_sequences: int | None = None


_NO_EFFECT = "it has no effect in this library"
_LATER = "its support has not landed yet"

# class -> {field: why it is refused when it differs from its default}
_REFUSED: dict[type, dict[str, str]] = {
    SchedulerConfig: {},
    KvCacheConfig: {
        "max_attention_window": _LATER,
        "sink_token_length": _LATER,
        "enable_block_reuse": _LATER,
        "use_uvm": _NO_EFFECT,
        "host_cache_size": _LATER,
        "onboard_blocks": _LATER,
        "cross_kv_cache_fraction": _NO_EFFECT,
        "secondary_offload_min_priority": _LATER,
        "event_buffer_max_size": _NO_EFFECT,
        "enable_partial_reuse": _LATER,
        "copy_on_partial_reuse": _LATER,
    },
    PeftCacheManagerConfig: {f.name: _LATER for f in fields(PeftCacheManagerConfig)},
    OptionalParams: {
        "enable_trt_overlap": _LATER,
        "gather_context_logits": _LATER,
        "gather_generation_logits": _LATER,
        "normalize_log_probs": _LATER,
        "device_ids": _LATER,
        "decoding_mode": _NO_EFFECT + ": a request's beam_width and sampling tensors decide",
        "decoding_config": _NO_EFFECT,
        "speculative_decoding_config": _LATER,
        "guided_decoding_config": _LATER,
        "logits_post_processor_batched": _LATER,
        "gpu_weights_percent": _NO_EFFECT,
        "max_beam_width": _NO_EFFECT + ": it is an argument of GptManager",
        "scheduler_config": _NO_EFFECT + ": it is an argument of GptManager",
        "extended_runtime_perf_knob_config": _NO_EFFECT,
        "debug_config": _NO_EFFECT,
        "max_seq_idle_microseconds": _NO_EFFECT,
        "max_num_sequences": _NO_EFFECT + ": set max_active_requests",
    },
}

# field -> (smallest, largest) permitted value; None stands for "no bound"
_RANGES: dict[type, dict[str, tuple[float | None, float | None]]] = {
    SchedulerConfig: {},
    KvCacheConfig: {"max_tokens": (1, None), "tokens_per_block": (1, None)},
    PeftCacheManagerConfig: {},
    OptionalParams: {
        "run_ahead": (0, 1),
        "max_batch_size": (1, None),
        "max_num_tokens": (1, None),
        "max_seq_len": (2, None),
        "max_active_requests": (1, None),
        "idle_poll_s": (0.0, None),
        "callback_budget_s": (0.0, None),
        "max_get_failures": (1, None),
        "seed": (0, 2**64 - 1),
    },
}

_DTYPES = (None, "float32", "bfloat16", "float16")


def checked_scheduler_config(config: SchedulerConfig) -> SchedulerConfig:
    """A private copy of `config`; raises ConfigError naming the first field that cannot be."""
    config = _checked(config, SchedulerConfig)
    _require_member(config, "capacity_scheduler_policy", CapacitySchedulerPolicy)
    if config.context_chunking_policy is not None:
        _require_member(config, "context_chunking_policy", ContextChunkingPolicy)
    if config.create_scheduler is not None and not callable(config.create_scheduler):
        raise ConfigError("SchedulerConfig.create_scheduler must be callable")
    return config


def checked_optional_params(params: OptionalParams) -> OptionalParams:
    """A private copy of `params`; raises ConfigError naming the first field that cannot be."""
    params = _checked(params, OptionalParams)
    kv_cache = params.kv_cache_config = _checked(params.kv_cache_config, KvCacheConfig)
    params.peft_cache_manager_config = _checked(
        params.peft_cache_manager_config, PeftCacheManagerConfig
    )
    fraction = kv_cache.free_gpu_memory_fraction
    if fraction is not None and not 0 < fraction < 1:
        raise ConfigError(
            f"KvCacheConfig.free_gpu_memory_fraction = {fraction!r} must lie between 0 and 1, "
            "both excluded"
        )
    if params.dtype not in _DTYPES:
        raise ConfigError(f"OptionalParams.dtype = {params.dtype!r} is not one of {_DTYPES}")
    return params


def _checked(config: Any, cls: type) -> Any:
    if not isinstance(config, cls):
        raise ConfigError(f"expected a {cls.__name__}, got {config!r}")
    default = cls()
    for name, reason in _REFUSED[cls].items():
        value = getattr(config, name)
        if value != getattr(default, name):
            raise ConfigError(f"{cls.__name__}.{name} = {value!r} is refused: {reason}")
    for name, (low, high) in _RANGES[cls].items():
        _require_range(cls.__name__, name, getattr(config, name), getattr(default, name), low, high)
    return copy.copy(config)


def _require_range(
    owner: str, name: str, value: Any, default: Any, low: float | None, high: float | None
) -> None:
    if value is None and default is None or value == default:
        return
    if value is None and name in ("max_active_requests", "idle_poll_s", "callback_budget_s"):
        return
    kinds = (int, float) if isinstance(default, float) else (int,)
    number = isinstance(value, kinds) and not isinstance(value, bool)
    if (
        not number
        or not math.isfinite(value)
        or (low is not None and value < low)
        or (high is not None and value > high)
    ):
        bounds = f"from {low}" + ("" if high is None else f" to {high}")
        kind = "a number" if isinstance(default, float) else "an integer"
        raise ConfigError(f"{owner}.{name} = {value!r} must be {kind} {bounds}")


def _require_member(config: Any, name: str, enum: type[IntEnum]) -> None:
    value = getattr(config, name)
    if not isinstance(value, enum):
        raise ConfigError(f"{type(config).__name__}.{name} = {value!r} is not a {enum.__name__}")
