"""Which configurations a manager takes: everything else is refused by name, nothing is ignored.

A field that has no effect in this library, or whose support has not landed yet, is refused when it
is set off its default.
"""

from __future__ import annotations

import copy
import os
from dataclasses import fields
from enum import IntEnum
from numbers import Integral, Real
from typing import Any

from gptmanager.arguments import flag
from gptmanager.config import (
    DEVICE,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    ParallelConfig,
    PeftCacheManagerConfig,
    PromptLookup,
    SchedulerConfig,
)
from gptmanager.errors import ConfigError, quoted
from gptmanager.lifecycle.callables import checked, ordinary
from gptmanager.request.post_processor import problem_of

_MAX_LINES = 2**31 - 1  # int32
_DTYPES = (None, "float32", "bfloat16", "float16", "float64")
_CACHE_DTYPES = (None, "fp8")

_NO_EFFECT = "it has no effect in this library"
_LATER = "its support has not landed yet"

# class -> {field: why it is refused when it differs from its default}
_REFUSED: dict[type, dict[str, str]] = {
    KvCacheConfig: {
        "use_uvm": _NO_EFFECT,
        "cross_kv_cache_fraction": _NO_EFFECT,
        "event_buffer_max_size": _NO_EFFECT,
    },
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
_MOST_RANK = 1 << 16  # of an adapter
_MOST_THREADS = 256
_MOST_RANKS = 1024

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
        "logits_post_processor_budget_s": (0.0, 1e6),
        "black_box_iterations": (0, _MANY),
        "black_box_bytes": (1 << 20, _HUGE),
        "seed": (0, 2**64 - 1),
    },
}

_UNBOUNDED = (
    "max_active_requests", "idle_poll_s", "callback_budget_s", "logits_post_processor_budget_s",
)  # fmt: skip


def checked_scheduler_config(config: SchedulerConfig) -> SchedulerConfig:
    """A private copy of `config`; raises ConfigError naming the first field that cannot be."""
    config = _checked_fields(config, SchedulerConfig, "scheduler_config")
    _require_member(config, "capacity_scheduler_policy", CapacitySchedulerPolicy)
    if config.context_chunking_policy is not None:
        _require_member(config, "context_chunking_policy", ContextChunkingPolicy)
    if config.create_scheduler is not None:
        ordinary("SchedulerConfig.create_scheduler", config.create_scheduler)
    return config


def checked_optional_params(params: OptionalParams) -> OptionalParams:
    """A private copy of `params`; raises ConfigError naming the first field that cannot be."""
    params = _checked_fields(params, OptionalParams, "optional_params")
    params.kv_cache_config = _checked_fields(
        params.kv_cache_config, KvCacheConfig, "OptionalParams.kv_cache_config"
    )
    params.peft_cache_manager_config = _checked_fields(
        params.peft_cache_manager_config,
        PeftCacheManagerConfig,
        "OptionalParams.peft_cache_manager_config",
    )
    _check_kv_cache(params.kv_cache_config)
    _check_lookup(params)
    _check_objects(params)
    _check_modes(params)
    _check_ranks(params)
    _settle_device(params)
    _settle_dtypes(params)
    return params


def _check_kv_cache(kv_cache: KvCacheConfig) -> None:
    if kv_cache.host_cache_size and not kv_cache.enable_block_reuse:
        raise ConfigError(
            f"KvCacheConfig.host_cache_size = {kv_cache.host_cache_size} needs enable_block_reuse: "
            "it holds blocks that are to be found again"
        )
    for name, neutral in (("onboard_blocks", True), ("secondary_offload_min_priority", None)):
        value = getattr(kv_cache, name)
        if value != neutral and not kv_cache.host_cache_size:
            raise ConfigError(
                f"KvCacheConfig.{name} = {value!r} is about the host tier: it needs host_cache_size"
            )
    if kv_cache.host_swap not in ("auto", "always"):
        raise ConfigError(
            f"KvCacheConfig.host_swap = {kv_cache.host_swap!r} is neither 'auto' nor 'always'"
        )
    fraction = kv_cache.free_gpu_memory_fraction
    if fraction is not None and not (isinstance(fraction, float) and 0 < fraction < 1):
        raise ConfigError(
            f"KvCacheConfig.free_gpu_memory_fraction = {fraction!r} must lie between 0 and 1, "
            "both excluded"
        )
    sink, window = kv_cache.sink_token_length, kv_cache.max_attention_window
    if sink and (window is None or sink >= window):
        raise ConfigError(
            f"KvCacheConfig.sink_token_length = {sink} must be less than max_attention_window = "
            f"{window}"
        )


def _check_lookup(params: OptionalParams) -> None:
    if params.speculative_decoding_config is None:
        return
    if params.kv_cache_config.max_attention_window:
        raise ConfigError(
            "OptionalParams.speculative_decoding_config is refused with "
            f"KvCacheConfig.max_attention_window = {params.kv_cache_config.max_attention_window}: "
            "what a wrong guess has overwritten would be lost"
        )
    lookup = _checked_fields(
        params.speculative_decoding_config,
        PromptLookup,
        "OptionalParams.speculative_decoding_config",
    )
    if lookup.min_ngram > lookup.max_ngram:
        raise ConfigError(
            f"PromptLookup.min_ngram = {lookup.min_ngram} exceeds max_ngram = {lookup.max_ngram}"
        )


def _check_objects(params: OptionalParams) -> None:
    for name in ("recording_path", "black_box_path"):
        path = getattr(params, name)
        if path is not None and not isinstance(path, (str, os.PathLike)):
            raise ConfigError(f"OptionalParams.{name} = {path!r} is no path")
    if params.on_progress is not None:
        params.on_progress = checked("OptionalParams.on_progress", params.on_progress)
    batched = params.logits_post_processor_batched
    if batched is not None and (problem := problem_of(batched)):
        raise ConfigError(f"OptionalParams.logits_post_processor_batched is {problem}")


def _check_modes(params: OptionalParams) -> None:
    chunked = params.enable_chunked_context
    if chunked is not None and not isinstance(chunked, bool):
        raise ConfigError(
            f"OptionalParams.enable_chunked_context = {chunked!r} is none of None, True, False"
        )
    if not isinstance(params.on_hang, str) or params.on_hang not in ("log", "fail"):
        raise ConfigError(
            f"OptionalParams.on_hang = {params.on_hang!r} is neither 'log' nor 'fail'"
        )
    if params.on_hang == "fail" and params.step_budget_s is None:
        raise ConfigError("OptionalParams.on_hang = 'fail' needs step_budget_s: None hangs never")
    if params.enable_trt_overlap and params.run_ahead:
        raise ConfigError(
            f"OptionalParams.enable_trt_overlap = True with run_ahead = {params.run_ahead}: the "
            "one overlaps steps of different requests, the other of the same; choose one"
        )


def _check_ranks(params: OptionalParams) -> None:
    if params.parallel_config is None:
        return
    ranks = params.parallel_config = _checked_fields(
        params.parallel_config, ParallelConfig, "OptionalParams.parallel_config"
    )
    if ranks.pipeline_parallel_size > 1 and params.run_ahead:
        raise ConfigError(
            f"OptionalParams.run_ahead = {params.run_ahead} with "
            f"ParallelConfig.pipeline_parallel_size = {ranks.pipeline_parallel_size}: stages run "
            "steps of different requests at the same time, the other is for steps of the same"
        )


def _settle_device(params: OptionalParams) -> None:
    """`device` as a str, and the defaults that depend on it."""
    if params.device is not None:
        params.device = str(params.device)  # a torch.device says the same
        if not DEVICE.fullmatch(params.device):
            raise ConfigError(
                f"OptionalParams.device = {params.device!r} is none of 'cpu', 'cuda', 'cuda:0' and "
                "so on, 'emulator'"
            )
    on_host = params.device in (None, "cpu")
    dtype = params.kv_cache_config.dtype
    if dtype not in _CACHE_DTYPES:
        raise ConfigError(f"KvCacheConfig.dtype = {dtype!r} is not one of {_CACHE_DTYPES}")
    if dtype is not None and on_host:
        raise ConfigError(
            f"KvCacheConfig.dtype = {dtype!r} is refused with OptionalParams.device = "
            f"{params.device!r}: the kernels of the CPU read no such pages"
        )
    if params.run_ahead is None:
        ranks = params.parallel_config
        overlaps = params.enable_trt_overlap or (ranks and ranks.pipeline_parallel_size > 1)
        params.run_ahead = 0 if on_host or overlaps else 1


def _settle_dtypes(params: OptionalParams) -> None:
    """`dtype` as a str; which dtypes go together, and with the device."""
    if params.dtype is not None:
        params.dtype = str(params.dtype).removeprefix("torch.")
    if params.dtype not in _DTYPES:
        raise ConfigError(f"OptionalParams.dtype = {params.dtype!r} is not one of {_DTYPES}")
    if params.weights_dtype not in (None, "int8"):
        raise ConfigError(
            f"OptionalParams.weights_dtype = {params.weights_dtype!r} is neither 'int8' nor None"
        )
    for name, value, reason in (
        ("dtype", "float64", "only the CPU computes with it"),
        ("weights_dtype", "int8", "its products are the CPU's"),
    ):
        if getattr(params, name) == value and params.device not in (None, "cpu"):
            raise ConfigError(
                f"OptionalParams.{name} = {value!r} is refused with device = {params.device!r}: "
                f"{reason}"
            )


def check_arguments(
    model_type: Any, max_beam_width: Any, params: OptionalParams, scheduler_config: SchedulerConfig
) -> None:
    """Check the constructor's arguments as far as possible before a model is loaded."""
    if not isinstance(model_type, ModelType):
        raise ConfigError(f"model_type = {model_type!r} is not a ModelType")
    if model_type is ModelType.V1:
        _check_lock_step(params, scheduler_config)
    if isinstance(max_beam_width, bool) or not isinstance(max_beam_width, int):
        raise ConfigError(f"max_beam_width = {max_beam_width!r} is not an integer")
    if max_beam_width < 1:
        raise ConfigError(f"max_beam_width = {max_beam_width} must be at least 1")
    if max_beam_width * params.max_batch_size > _MAX_LINES:
        raise ConfigError(
            f"max_beam_width = {quoted(max_beam_width)} with max_batch_size = "
            f"{params.max_batch_size}: both together may come to {_MAX_LINES}"
        )
    window = params.kv_cache_config.max_attention_window
    if max_beam_width > 1 and window is not None:
        raise ConfigError(
            f"max_beam_width = {max_beam_width} is refused with KvCacheConfig.max_attention_window "
            f"= {window}: beams that share blocks cannot write over them"
        )


def _check_lock_step(params: OptionalParams, scheduler_config: SchedulerConfig) -> None:
    """V1 is STATIC_BATCH over a contiguous KV cache: what contradicts that is refused."""
    contradictions = {
        "SchedulerConfig.capacity_scheduler_policy = MAX_UTILIZATION": (
            scheduler_config.capacity_scheduler_policy is CapacitySchedulerPolicy.MAX_UTILIZATION
        ),
        "SchedulerConfig.create_scheduler": scheduler_config.create_scheduler is not None,
        "OptionalParams.enable_chunked_context = True": params.enable_chunked_context,
        "OptionalParams.enable_trt_overlap = True": params.enable_trt_overlap,
        "ParallelConfig.pipeline_parallel_size above 1": (
            params.parallel_config is not None and params.parallel_config.pipeline_parallel_size > 1
        ),
        "KvCacheConfig.enable_block_reuse = True": params.kv_cache_config.enable_block_reuse,
        "KvCacheConfig.max_attention_window": params.kv_cache_config.max_attention_window,
    }
    for name, is_set in contradictions.items():
        if is_set:
            raise ConfigError(
                f"{name} is refused with ModelType.V1, whose batches run in lock-step over a "
                "contiguous KV cache"
            )


# What a field may be by itself -----------------------------------------------------------------


def _checked_fields(config: Any, cls: type, where: str) -> Any:
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
        if isinstance(getattr(default, name), bool):
            flag(f"{cls.__name__}.{name}", getattr(config, name))
    for name, bounds in _RANGES.get(cls, {}).items():
        value, neutral = getattr(config, name), getattr(default, name)
        _require_range(f"{cls.__name__}.{name}", value, neutral, *bounds, name in _UNBOUNDED)
    return copy.copy(config)


def _require_member(config: Any, name: str, enum: type[IntEnum]) -> None:
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
