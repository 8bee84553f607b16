"""The loop of a manager, of a replay, or of a simulation, by its blueprint."""

from __future__ import annotations

from gptmanager.assembly.blueprint import Blueprint
from gptmanager.config import CapacitySchedulerPolicy, ContextChunkingPolicy
from gptmanager.errors import ConfigError
from gptmanager.kv_cache import KvCacheManager
from gptmanager.loop.allocation import Allocator
from gptmanager.loop.limits import Limits
from gptmanager.loop.responses import MakeFinal, final_tensors
from gptmanager.loop.token_loop import TokenLoop
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
from gptmanager.statistics import PhaseTimes
from gptmanager.step import Executor, Host

# guards of the manager's MAX_UTILIZATION: a request is paused this often before others are
# preferred as victims, resumes only when this many blocks stay free, and starts only when all that
# run could go on for this many steps (measured in docs/scheduling.md)
_MAX_PAUSES = 3
_RESUME_HEADROOM_BLOCKS = 1
_START_HEADROOM_STEPS = 16


def build_loop(
    blueprint: Blueprint,
    host: Host,
    executor: Executor,
    *,
    phase_times: PhaseTimes,
    allocator: Allocator | None = None,
    final: MakeFinal = final_tensors,
) -> TokenLoop:
    """`allocator`: not an empty one. `final` makes the tensors of final responses."""
    params = blueprint.params
    allocator = allocator or blueprint.allocator()
    return TokenLoop(
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
        phase_times=phase_times,
        final=final,
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
        max_num_requests=blueprint.max_num_requests,
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
    policy, most = blueprint.scheduler.capacity_scheduler_policy, blueprint.max_num_requests
    looks_ahead = blueprint.num_micro_batches > 1
    if policy is CapacitySchedulerPolicy.MAX_UTILIZATION:
        return MaxUtilizationScheduler(
            most,
            kv_cache,
            two_step_lookahead=looks_ahead,
            max_pauses=_MAX_PAUSES,
            resume_headroom_blocks=_RESUME_HEADROOM_BLOCKS,
            start_headroom_steps=_START_HEADROOM_STEPS,
        )
    is_static = policy is CapacitySchedulerPolicy.STATIC_BATCH
    no_evict = StaticBatchScheduler if is_static else GuaranteedNoEvictScheduler
    return no_evict(most, kv_cache, two_step_lookahead=looks_ahead, started_contexts_first=True)
