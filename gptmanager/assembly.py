"""From checked options and a model to a `TokenLoop`: every default is resolved here."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from gptmanager.admission import Limits
from gptmanager.allocation import Allocator
from gptmanager.config import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.errors import ConfigError
from gptmanager.executor import TorchExecutor
from gptmanager.host import CallbackHost
from gptmanager.kernels import CpuKernels
from gptmanager.kv_cache import KvCacheManager
from gptmanager.loop import TokenLoop
from gptmanager.memory.kv_pool import KvPool
from gptmanager.models.model import Model, load_model
from gptmanager.scheduler import (
    CapacityScheduler,
    GuaranteedNoEvictScheduler,
    MaxUtilizationScheduler,
    MicroBatchScheduler,
    RequestScheduler,
    SimpleScheduler,
    StaticBatchScheduler,
)
from gptmanager.sizing import Sizes, size
from gptmanager.statistics import Laps, Memory

# guards of the manager's MAX_UTILIZATION: a request is paused this often before others are
# preferred as victims, and resumes only when this many blocks stay free
_MAX_PAUSES = 3
_RESUME_HEADROOM_BLOCKS = 1


def check_arguments(model_type: Any, max_beam_width: Any, params: OptionalParams) -> None:
    """What can be told about the constructor's arguments before a model is loaded."""
    if not isinstance(model_type, ModelType):
        raise ConfigError(f"model_type = {model_type!r} is not a ModelType")
    if model_type is not ModelType.INFLIGHT_FUSED_BATCHING:
        raise ConfigError(
            f"model_type = {model_type.name} is refused: its support has not landed yet"
        )
    if isinstance(max_beam_width, bool) or not isinstance(max_beam_width, int):
        raise ConfigError(f"max_beam_width = {max_beam_width!r} is not an integer")
    if max_beam_width < 1:
        raise ConfigError(f"max_beam_width = {max_beam_width} must be at least 1")
    if max_beam_width > 1:
        raise ConfigError(
            f"max_beam_width = {max_beam_width} is refused: beam search has not landed yet"
        )
    if params.device not in (None, "cpu"):
        raise ConfigError(
            f"OptionalParams.device = {params.device!r} is refused: only the CPU has landed yet"
        )


def assemble(
    source: Any, params: OptionalParams, scheduler_config: SchedulerConfig, host: CallbackHost
) -> TokenLoop:
    """Load the model, size and allocate the KV cache, build the loop."""
    model = _model(source, params)
    sizes = size(params, scheduler_config, model.spec)
    # under run-ahead a request whose last token is launched keeps its slot for one more step
    num_slots = params.max_batch_size * (1 + params.run_ahead)
    kv_cache = KvCacheManager(sizes.num_blocks, sizes.tokens_per_block)
    executor = TorchExecutor(
        model,
        KvPool(
            model.spec.num_layers,
            sizes.num_blocks,
            sizes.tokens_per_block,
            model.spec.num_kv_heads,
            model.spec.head_dim,
        ),
        num_slots=num_slots,
        max_seq_len=sizes.max_seq_len,
    )
    host.memory = Memory(cpu=model.nbytes + executor.nbytes)
    host.gil_wait_us = executor.take_gil_wait_us
    max_active = params.max_active_requests
    return TokenLoop(
        host,
        executor,
        _scheduler(params, scheduler_config, sizes, kv_cache),
        Allocator(kv_cache, num_slots),
        _limits(params, scheduler_config, sizes, model.spec.vocab_size),
        max_active=params.max_batch_size if max_active == "auto" else max_active,
        max_batch_size=params.max_batch_size,
        max_num_tokens=params.max_num_tokens,
        run_ahead=params.run_ahead,
        laps=Laps(time.perf_counter_ns),
    )


def _model(source: Any, params: OptionalParams) -> Model:
    if isinstance(source, (str, os.PathLike, tuple)):
        kernels = CpuKernels(deterministic=params.deterministic)
        kernels.warm_up()
        path = source if isinstance(source, tuple) else Path(source)
        return load_model(path, kernels=kernels, dtype=params.dtype, max_seq_len=params.max_seq_len)
    if hasattr(source, "spec") and callable(getattr(source, "forward", None)):
        model: Model = source
        return model
    raise ConfigError(
        f"model_path = {source!r} is neither a checkpoint folder, nor a Model, nor a pair "
        "(config dict, state dict)"
    )


def _limits(
    params: OptionalParams, scheduler_config: SchedulerConfig, sizes: Sizes, vocab_size: int
) -> Limits:
    policy = scheduler_config.capacity_scheduler_policy
    evicts = policy is CapacitySchedulerPolicy.MAX_UTILIZATION
    return Limits(
        vocab_size=vocab_size,
        max_seq_len=sizes.max_seq_len,
        max_input_len=sizes.max_input_len,
        pool_limited=sizes.pool_limited,
        num_blocks=sizes.num_blocks,
        tokens_per_block=sizes.tokens_per_block,
        max_run_len=sizes.max_context_length if evicts and not sizes.chunked else None,
        exclude_input_in_output=params.exclude_input_in_output,
        seed=params.seed,
    )


def _scheduler(
    params: OptionalParams, config: SchedulerConfig, sizes: Sizes, kv_cache: KvCacheManager
) -> RequestScheduler:
    chunking = config.context_chunking_policy or ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
    micro_batch = MicroBatchScheduler(
        params.max_batch_size,
        params.max_num_tokens,
        max_context_length=sizes.max_context_length,
        context_chunking_policy=chunking if sizes.chunked else None,
        chunk_unit=sizes.tokens_per_block if sizes.chunked else None,
        mixed_beam_widths=True,
    )
    if config.create_scheduler is None:
        return SimpleScheduler(_capacity(params, config, kv_cache), micro_batch)
    scheduler = config.create_scheduler(
        max_num_requests=params.max_batch_size,
        kv_cache_manager=kv_cache,
        max_batch_size=params.max_batch_size,
        max_num_tokens=params.max_num_tokens,
        micro_batch_scheduler=micro_batch,
    )
    if not isinstance(scheduler, RequestScheduler):
        raise ConfigError(
            f"SchedulerConfig.create_scheduler returned {scheduler!r}, expected a RequestScheduler"
        )
    return scheduler


def _capacity(
    params: OptionalParams, config: SchedulerConfig, kv_cache: KvCacheManager
) -> CapacityScheduler:
    policy = config.capacity_scheduler_policy
    if policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT:
        return GuaranteedNoEvictScheduler(params.max_batch_size, kv_cache)
    if policy is CapacitySchedulerPolicy.STATIC_BATCH:
        return StaticBatchScheduler(params.max_batch_size, kv_cache)
    return MaxUtilizationScheduler(
        params.max_batch_size,
        kv_cache,
        max_pauses=_MAX_PAUSES,
        resume_headroom_blocks=_RESUME_HEADROOM_BLOCKS,
    )
