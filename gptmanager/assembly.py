"""From checked options and a model to a `TokenLoop`: every default is resolved here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gptmanager.admission import Limits
from gptmanager.allocation import Allocator
from gptmanager.blueprint import Blueprint
from gptmanager.checkpoint_files import shown
from gptmanager.clock import perf_counter_ns
from gptmanager.config import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.decoding.logits import PostProcessing
from gptmanager.errors import ConfigError, response_text
from gptmanager.host import CallbackHost
from gptmanager.kv_cache import KvCacheManager
from gptmanager.loop import TokenLoop
from gptmanager.placement import place
from gptmanager.recorder import Recorder, RecordingExecutor, RecordingHost
from gptmanager.roster import Host
from gptmanager.scheduler import (
    CapacityScheduler,
    GuaranteedNoEvictScheduler,
    MaxUtilizationScheduler,
    MicroBatchScheduler,
    RequestScheduler,
    ReuseCredit,
    SimpleScheduler,
    StaticBatchScheduler,
)
from gptmanager.sizing import size
from gptmanager.statistics import Laps, LockStepKeys
from gptmanager.step import Executor

# guards of the manager's MAX_UTILIZATION: a request is paused this often before others are
# preferred as victims, resumes only when this many blocks stay free, and starts only when all that
# run could go on for so many steps (measured in docs/scheduling.md)
_MAX_PAUSES = 3
_RESUME_HEADROOM_BLOCKS = 1
_START_HEADROOM_STEPS = 16
_MAX_LINES = 2**31 - 1  # int32

# what torch says where a CPU has no memory, and NumPy and torch of sizes that no address reaches
_NO_SUCH_ARRAY = ("allocate memory", "is too big", "Maximum allowed dimension", "overflow")


def check_arguments(
    model_type: Any, max_beam_width: Any, params: OptionalParams, scheduler_config: SchedulerConfig
) -> None:
    """What can be told about the constructor's arguments before a model is loaded."""
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
            f"max_beam_width = {shown(max_beam_width)} with max_batch_size = "
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
        "KvCacheConfig.enable_block_reuse = True": params.kv_cache_config.enable_block_reuse,
        "KvCacheConfig.max_attention_window": params.kv_cache_config.max_attention_window,
    }
    for name, is_set in contradictions.items():
        if is_set:
            raise ConfigError(
                f"{name} is refused with ModelType.V1, whose batches run in lock-step over a "
                "contiguous KV cache"
            )


def assemble(
    source: Any,
    params: OptionalParams,
    scheduler_config: SchedulerConfig,
    model_type: ModelType,
    max_beam_width: int,
    host: CallbackHost,
    recorder: Recorder,
) -> TokenLoop:
    """Load the model, size and allocate the KV cache, build the loop."""
    placement = place(params)
    model = placement.load(source, params)
    if model_type is ModelType.V1:
        policy = CapacitySchedulerPolicy.STATIC_BATCH
        scheduler_config = replace(scheduler_config, capacity_scheduler_policy=policy)
        host.scheme_keys = LockStepKeys()
    room = placement.room(model, params, max_beam_width)
    sizes = size(params, scheduler_config, model.spec, model_type, max_beam_width, room)
    blueprint = Blueprint(
        params,
        scheduler_config,
        sizes,
        model.spec.vocab_size,
        model_type=model_type,
        max_beam_width=max_beam_width,
        hidden_size=getattr(model.spec, "hidden_size", 0),
    )
    try:
        executor = placement.executor(
            model,
            sizes,
            num_slots=blueprint.num_slots,
            max_batch_size=params.max_batch_size,
            max_beam_width=max_beam_width,
            fused=model_type is not ModelType.INFLIGHT_BATCHING,
            processing=PostProcessing(
                batched=params.logits_post_processor_batched,
                budget_s=params.logits_post_processor_budget_s,
                watches_streams=params.check_logits_post_processor_streams,
                timer=host.processor_timer,
                num_slots=blueprint.num_slots,
                max_beam_width=max_beam_width,
                stream=placement.stream,
            ),
        )
    except (RuntimeError, MemoryError, ValueError) as error:
        is_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_of_memory and not any(text in str(error) for text in _NO_SUCH_ARRAY):
            raise
        raise ConfigError(
            f"no memory for steps of max_batch_size = {params.max_batch_size} sequences of "
            f"max_seq_len = {sizes.max_seq_len} tokens, beside a KV cache of {sizes.num_blocks} "
            f"blocks and {sizes.num_host_blocks} on the host: {response_text(error)}"
        ) from error
    if placement.stream is not None:
        host.preparation.device = placement.stream.name
    host.memory = executor.memory
    host.gil_wait_us = executor.take_gil_wait_us
    weights: Any = getattr(model, "weights", None)
    if hasattr(weights, "version"):
        host.follow_weights(lambda: int(weights.version))
    laps = Laps(perf_counter_ns)
    if not recorder.is_on:
        return build_loop(blueprint, host, executor, laps=laps)
    return build_recorded_loop(blueprint, host, executor, recorder, laps=laps)


def build_recorded_loop(
    blueprint: Blueprint,
    host: Host,
    executor: Executor,
    recorder: Recorder,
    *,
    laps: Laps,
    loop_class: type[TokenLoop] = TokenLoop,
) -> TokenLoop:
    """As `build_loop`, with `recorder` between the loop and its world."""
    loop = build_loop(
        blueprint,
        RecordingHost(host, recorder),
        RecordingExecutor(executor, recorder),
        laps=laps,
        loop_class=loop_class,
    )
    recorder.start(loop, blueprint)
    return loop


def build_loop(
    blueprint: Blueprint,
    host: Host,
    executor: Executor,
    *,
    laps: Laps,
    allocator: Allocator | None = None,
    loop_class: type[TokenLoop] = TokenLoop,
) -> TokenLoop:
    """The loop of a manager, of a replay, or of a simulation. `allocator`: not an empty one."""
    params = blueprint.params
    allocator = allocator or blueprint.allocator()
    return loop_class(
        host,
        executor,
        _scheduler(blueprint, allocator.kv_cache),
        allocator,
        _limits(blueprint),
        max_active=blueprint.max_active,
        max_batch_size=params.max_batch_size,
        max_num_tokens=params.max_num_tokens,
        run_ahead=params.run_ahead or 0,
        num_micro_batches=blueprint.num_micro_batches,
        laps=laps,
    )


def _limits(blueprint: Blueprint) -> Limits:
    params, sizes = blueprint.params, blueprint.sizes
    policy = blueprint.scheduler.capacity_scheduler_policy
    evicts = policy is CapacitySchedulerPolicy.MAX_UTILIZATION
    return Limits(
        vocab_size=blueprint.vocab_size,
        max_seq_len=sizes.max_seq_len,
        max_input_len=sizes.max_input_len,
        pool_limited=sizes.pool_limited,
        num_blocks=sizes.num_blocks,
        tokens_per_block=sizes.tokens_per_block,
        max_beam_width=blueprint.max_beam_width,
        lookup=params.speculative_decoding_config,
        takes_drafts=sizes.attention_window is None,
        max_run_len=sizes.max_context_length if evicts and not sizes.chunked else None,
        exclude_input_in_output=params.exclude_input_in_output,
        gather_context_logits=params.gather_context_logits,
        gather_generation_logits=params.gather_generation_logits,
        normalize_log_probs=params.normalize_log_probs,
        hidden_size=blueprint.hidden_size,
        seed=params.seed,
        num_places=blueprint.max_num_requests,
        max_waiting=params.max_waiting_requests,
    )


def _scheduler(blueprint: Blueprint, kv_cache: KvCacheManager) -> RequestScheduler:
    params, config, sizes = blueprint.params, blueprint.scheduler, blueprint.sizes
    chunking = config.context_chunking_policy or ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
    micro_batch = MicroBatchScheduler(
        params.max_batch_size,
        params.max_num_tokens,
        max_context_length=sizes.max_context_length,
        context_chunking_policy=chunking if sizes.chunked else None,
        chunk_unit=sizes.chunk_unit if sizes.chunked else None,
        # a chunk that starts behind what is cached is as long as it was: the rule that counts so
        reuse_credit_rule="shift",
        mixed_beam_widths=True,
    )
    if config.create_scheduler is None:
        capacity = _capacity(blueprint, kv_cache)
        if kv_cache.enable_block_reuse:
            capacity = ReuseCredit(capacity, kv_cache)
        return SimpleScheduler(capacity, micro_batch)
    scheduler = config.create_scheduler(
        max_num_requests=blueprint.max_num_requests,
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


def _capacity(blueprint: Blueprint, kv_cache: KvCacheManager) -> CapacityScheduler:
    policy = blueprint.scheduler.capacity_scheduler_policy
    max_num_requests = blueprint.max_num_requests
    two_step_lookahead = blueprint.num_micro_batches > 1
    if policy is CapacitySchedulerPolicy.MAX_UTILIZATION:
        return MaxUtilizationScheduler(
            max_num_requests,
            kv_cache,
            two_step_lookahead=two_step_lookahead,
            max_pauses=_MAX_PAUSES,
            resume_headroom_blocks=_RESUME_HEADROOM_BLOCKS,
            start_headroom_steps=_START_HEADROOM_STEPS,
        )
    no_evict = GuaranteedNoEvictScheduler
    if policy is CapacitySchedulerPolicy.STATIC_BATCH:
        no_evict = StaticBatchScheduler
    return no_evict(
        max_num_requests,
        kv_cache,
        two_step_lookahead=two_step_lookahead,
        started_contexts_first=True,
    )
