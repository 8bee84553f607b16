"""Checks the options of a manager. The error for an invalid option names the option.

A field that has no effect in this library, or that is not supported yet, must have its default
value.
"""

from __future__ import annotations

import os
from typing import Any

from gptmanager.assembly.field_checks import (
    checked_fields,
    optional_flag,
    require_member,
    require_range,
    require_word,
)
from gptmanager.assembly.provider_options import is_foreign, settle_providers
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

_MANY = 2**31 - 1  # the highest int32
_CHOICES = {
    "dtype": (None, "float32", "bfloat16", "float16", "float64"),
    "weights_dtype": (None, "int8", "int4", "fp8", "none"),
    "head_dtype": (None, "int8", "int4"),
    "model_backend": ("auto", "native", "transformers"),
}


def checked_scheduler_config(config: Any) -> SchedulerConfig:
    """Return a private copy of `config`.

    Raise ConfigError, which names the first invalid field.
    """
    if isinstance(config, CapacitySchedulerPolicy):  # an argument of the C++ GptManager
        raise ConfigError(
            f"scheduler_config = {config!r}: pass SchedulerConfig(CapacitySchedulerPolicy."
            f"{config.name})"
        )
    checked: SchedulerConfig = checked_fields(config, SchedulerConfig, "scheduler_config")
    require_member(checked, "capacity_scheduler_policy", CapacitySchedulerPolicy)
    if checked.context_chunking_policy is not None:
        require_member(checked, "context_chunking_policy", ContextChunkingPolicy)
    if checked.create_scheduler is not None:
        ordinary("SchedulerConfig.create_scheduler", checked.create_scheduler)
    return checked


def checked_optional_params(params: OptionalParams) -> OptionalParams:
    """Return a private copy of `params`, with the defaults that depend on the device filled in.
    Raise ConfigError, which names the first invalid field.
    """
    params = checked_fields(params, OptionalParams, "optional_params")
    params.kv_cache_config = checked_fields(
        params.kv_cache_config, KvCacheConfig, "OptionalParams.kv_cache_config"
    )
    params.peft_cache_manager_config = checked_fields(
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
    settle_providers(params)
    return params


def _check_kv_cache(kv_cache: KvCacheConfig) -> None:
    if kv_cache.host_cache_size and kv_cache.enable_block_reuse is False:
        raise ConfigError(
            f"KvCacheConfig.host_cache_size = {kv_cache.host_cache_size} needs enable_block_reuse: "
            "the host cache holds blocks for reuse"
        )
    if kv_cache.state_snapshots and kv_cache.enable_block_reuse is False:
        raise ConfigError(
            f"KvCacheConfig.state_snapshots = {kv_cache.state_snapshots} needs enable_block_reuse: "
            "a snapshot belongs to a cached block"
        )
    for name, neutral in (("onboard_blocks", True), ("secondary_offload_min_priority", None)):
        value = getattr(kv_cache, name)
        if value != neutral and not kv_cache.host_cache_size:
            raise ConfigError(
                f"KvCacheConfig.{name} = {value!r} needs host_cache_size: it is an option of the "
                "host cache"
            )
    require_word("KvCacheConfig.host_swap", kv_cache.host_swap, ("auto", "always"))
    fraction = kv_cache.free_gpu_memory_fraction
    if fraction is not None and not (isinstance(fraction, float) and 0 < fraction < 1):
        raise ConfigError(
            f"KvCacheConfig.free_gpu_memory_fraction = {fraction!r} must be a float above 0 and "
            "below 1"
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
            "rejected drafts would have overwritten tokens in the window"
        )
    lookup = checked_fields(
        params.speculative_decoding_config,
        PromptLookup,
        "OptionalParams.speculative_decoding_config",
    )
    if lookup.min_ngram > lookup.max_ngram:
        raise ConfigError(
            f"PromptLookup.min_ngram = {lookup.min_ngram} must be at most max_ngram = "
            f"{lookup.max_ngram}"
        )


def _check_objects(params: OptionalParams) -> None:
    for name in ("recording_path", "black_box_path", "journal_path"):
        path = getattr(params, name)
        if path is not None and not isinstance(path, (str, os.PathLike)):
            raise ConfigError(f"OptionalParams.{name} must be a path, got {quoted(path)}")
    for name in ("restore_cb", "restore_processor_cb"):
        if (callback := getattr(params, name)) is not None:
            if params.journal_path is None:
                raise ConfigError(f"OptionalParams.{name} needs journal_path")
            ordinary(f"OptionalParams.{name}", callback)
    if params.on_progress is not None:
        params.on_progress = checked("OptionalParams.on_progress", params.on_progress)
    batched = params.logits_post_processor_batched
    if batched is not None and (problem := problem_of(batched)):
        raise ConfigError(f"OptionalParams.logits_post_processor_batched is {problem}")


def _check_modes(params: OptionalParams) -> None:
    optional_flag("OptionalParams.enable_chunked_context", params.enable_chunked_context)
    sync = params.journal_sync
    require_range("OptionalParams.journal_sync", sync, 20, 1.0, 60e3, ("always", "never"))
    words = params.journal_on_full, ("refuse", "continue")
    require_word("OptionalParams.journal_on_full", *words)
    require_word("OptionalParams.on_hang", params.on_hang, ("log", "fail"))
    if params.on_hang == "fail" and params.step_budget_s is None:
        raise ConfigError(
            "OptionalParams.on_hang = 'fail' needs step_budget_s: with None no step counts as hung"
        )
    if params.enable_trt_overlap and params.run_ahead:
        raise ConfigError(
            f"OptionalParams.enable_trt_overlap = True is refused with run_ahead = "
            f"{params.run_ahead}: enable_trt_overlap overlaps steps of different requests, "
            "and run_ahead overlaps steps of the same requests; set only one of them"
        )


def _check_ranks(params: OptionalParams) -> None:
    if params.parallel_config is None:
        return
    ranks = params.parallel_config = checked_fields(
        params.parallel_config, ParallelConfig, "OptionalParams.parallel_config"
    )
    if ranks.pipeline_parallel_size > 1 and params.run_ahead:
        raise ConfigError(
            f"OptionalParams.run_ahead = {params.run_ahead} is refused with "
            f"ParallelConfig.pipeline_parallel_size = {ranks.pipeline_parallel_size}: stages "
            "overlap steps of different requests, and run-ahead overlaps steps of the same requests"
        )


def _settle_device(params: OptionalParams) -> None:
    """Convert `device` to a str, check it, and set the defaults that depend on it."""
    if params.device is not None:
        params.device = _text(params.device)  # the caller may pass a torch.device
        if not DEVICE.fullmatch(params.device):
            raise ConfigError(
                f"OptionalParams.device = {quoted(params.device)} must be 'cpu', 'cuda', 'cuda:N' "
                "or 'emulator'"
            )
    on_host = params.device in (None, "cpu")
    dtype = params.kv_cache_config.dtype
    require_word("KvCacheConfig.dtype", dtype, (None, "fp8"))
    if dtype is not None and on_host:
        raise ConfigError(
            f"KvCacheConfig.dtype = {dtype!r} is refused with OptionalParams.device = "
            f"{params.device!r}: CPU kernels do not support it"
        )
    if params.run_ahead is None:
        ranks = params.parallel_config
        overlaps = params.enable_trt_overlap or (ranks and ranks.pipeline_parallel_size > 1)
        params.run_ahead = 0 if on_host or overlaps else 1


def _settle_dtypes(params: OptionalParams) -> None:
    """Convert `dtype` to a str. Check `dtype` and the other fields in `_CHOICES`."""
    if params.dtype is not None:
        params.dtype = _text(params.dtype).removeprefix("torch.")
    for name, allowed in _CHOICES.items():
        require_word(f"OptionalParams.{name}", getattr(params, name), allowed)
    if params.head_dtype is not None and params.weights_dtype != "int4":
        raise ConfigError(
            f"OptionalParams.head_dtype = {params.head_dtype!r} is refused with weights_dtype = "
            f"{params.weights_dtype!r}: it belongs to 'int4'"
        )
    if params.dtype == "float64" and params.device not in (None, "cpu"):
        raise ConfigError(
            f"OptionalParams.dtype = 'float64' is refused with device = {params.device!r}: "
            "only the CPU supports it"
        )


def _text(value: Any) -> str:
    """Return `str(value)`, or how an error quotes a value that cannot be written as a text."""
    try:
        return str(value)
    except Exception:
        return quoted(value)


def check_arguments(
    model_type: Any, max_beam_width: Any, params: OptionalParams, scheduler_config: SchedulerConfig
) -> None:
    """Check the arguments of `GptManager` as far as possible before a model is loaded.

    Raise ConfigError for the first invalid argument.
    """
    if not isinstance(model_type, ModelType):
        raise ConfigError(f"model_type must be a ModelType, got {quoted(model_type)}")
    if model_type is ModelType.V1:
        _check_lock_step(params, scheduler_config)
    if isinstance(max_beam_width, bool) or not isinstance(max_beam_width, int):
        raise ConfigError(f"max_beam_width must be an integer, got {quoted(max_beam_width)}")
    if max_beam_width < 1:
        raise ConfigError(f"max_beam_width = {max_beam_width} must be at least 1")
    if max_beam_width * params.max_batch_size > _MANY:
        raise ConfigError(
            f"max_beam_width = {quoted(max_beam_width)} x max_batch_size = "
            f"{params.max_batch_size} must be at most {_MANY}"
        )
    window = params.kv_cache_config.max_attention_window
    if max_beam_width > 1 and window is not None:
        raise ConfigError(
            f"max_beam_width = {max_beam_width} is refused with KvCacheConfig.max_attention_window "
            f"= {window}: a window overwrites blocks, which beams share"
        )


def _check_lock_step(params: OptionalParams, scheduler_config: SchedulerConfig) -> None:
    """Raise ConfigError for options that do not apply to V1.

    V1 runs static batches with a contiguous KV cache.
    """
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
        "KvCacheConfig.state_snapshots": params.kv_cache_config.state_snapshots,
        "KvCacheConfig.max_attention_window": params.kv_cache_config.max_attention_window,
        "OptionalParams.attention_provider": is_foreign(params.attention_provider),
    }
    for name, is_set in contradictions.items():
        if is_set:
            raise ConfigError(
                f"{name} is refused with ModelType.V1: it runs each batch in lock-step with a "
                "contiguous KV cache"
            )
