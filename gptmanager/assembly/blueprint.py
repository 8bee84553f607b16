"""`Blueprint`: all settings of a loop, and `build_loop`, which builds the loop from them.

A recording contains the blueprint, so a replay can build the same loop again without the model and
the callbacks. The options that the loop reads are final: defaults that depend on the machine or the
model have been replaced by values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gptmanager.assembly.adapter_sizing import AdapterSizes
from gptmanager.assembly.provider_options import is_foreign
from gptmanager.assembly.sizing import Sizes, num_micro_batches, num_slots
from gptmanager.config import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.errors import ConfigError
from gptmanager.kernels.providers import name_of
from gptmanager.kv_cache import KvCacheManager
from gptmanager.lifecycle.callables import mismatch
from gptmanager.loop.adapters import Adapters
from gptmanager.loop.allocation import Allocator
from gptmanager.loop.limits import Limits
from gptmanager.loop.responses import MakeFinal, final_tensors
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.peft_cache import PeftCacheManager
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

_STATIC_BATCH = CapacitySchedulerPolicy.STATIC_BATCH

# The manager's limits for MAX_UTILIZATION, measured in docs/scheduling.md.
_MAX_PAUSES = 3  # after this number of pauses, a request is paused again only as a last resort
_RESUME_HEADROOM_BLOCKS = 1  # blocks that must stay free when a paused request resumes
# when a request starts, the free blocks must suffice for this many steps of all running requests
_START_HEADROOM_STEPS = 16


@dataclass(frozen=True, slots=True)
class Blueprint:
    """All settings that decide how a loop schedules.

    In a recording, `custom_scheduler` is the name of `SchedulerConfig.create_scheduler`, because a
    file cannot contain the function itself.
    """

    params: OptionalParams
    scheduler: SchedulerConfig
    sizes: Sizes
    vocab_size: int
    custom_scheduler: str = ""
    model_type: ModelType = ModelType.INFLIGHT_FUSED_BATCHING
    max_beam_width: int = 1
    hidden_size: int = 0  # the width of embeddings in requests; if 0, they are refused
    adapters: AdapterSizes | None = None  # if None, requests with adapters are refused

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages."""
        ranks = self.params.parallel_config
        return 1 if ranks is None else ranks.pipeline_parallel_size

    @property
    def num_micro_batches(self) -> int:
        return num_micro_batches(self.params)

    @property
    def max_num_requests(self) -> int:
        """The highest number of requests that may run at the same time."""
        return self.params.max_batch_size * self.num_micro_batches

    @property
    def max_active(self) -> int | None:
        """The highest number of active requests; None without a limit."""
        most = self.params.max_active_requests
        return self.max_num_requests if most == "auto" else most

    @property
    def num_slots(self) -> int:
        return num_slots(self.params)

    def allocator(self) -> Allocator:
        """Return an allocator with all blocks and slots free."""
        # `sink_token_length` is not passed: the window reserves whole blocks for sinks already
        window = self.sizes.window
        config = self.params.kv_cache_config
        kv_cache = KvCacheManager(
            self.sizes.num_blocks,
            self.sizes.tokens_per_block,
            enable_block_reuse=bool(config.enable_block_reuse),
            enable_partial_reuse=config.enable_partial_reuse,
            copy_on_partial_reuse=config.copy_on_partial_reuse,
            num_host_blocks=self.sizes.num_host_blocks,
            onboard_blocks=config.onboard_blocks,
            secondary_offload_min_priority=config.secondary_offload_min_priority,
            max_attention_window=None if window is None else window.num_tokens,
            num_snapshots=self.sizes.num_snapshots if config.enable_block_reuse else 0,
            cuts_contexts=self._cuts_contexts,
        )
        return Allocator(kv_cache, self.num_slots, window)

    @property
    def _cuts_contexts(self) -> bool:
        """Whether chunks of a context may end early, for snapshots of a recurrent state."""
        if self.scheduler.capacity_scheduler_policy is _STATIC_BATCH:
            return False  # the rest of the context would wait until the batch has ended
        is_custom = self.custom_scheduler or self.scheduler.create_scheduler is not None
        return self.sizes.chunked or not is_custom  # it may rely on contexts in one step


def build_loop(
    blueprint: Blueprint,
    host: Host,
    executor: Executor,
    *,
    phase_times: PhaseTimes,
    final: MakeFinal = final_tensors,
) -> TokenLoop:
    """Build a loop with all blocks and slots free.

    `final` creates the tensors of final responses.
    """
    params = blueprint.params
    allocator = blueprint.allocator()
    return TokenLoop(
        host,
        executor,
        _scheduler(blueprint, allocator.kv_cache),
        allocator,
        _limits(blueprint),
        adapters=_adapters(blueprint, host),
        max_active=blueprint.max_active,
        max_batch_size=params.max_batch_size,
        max_num_tokens=params.max_num_tokens,
        run_ahead=params.run_ahead or 0,
        num_micro_batches=blueprint.num_micro_batches,
        phase_times=phase_times,
        providers=_provider_names(params),
        final=final,
    )


def _provider_names(params: OptionalParams) -> tuple[str, ...]:
    """Return the names of the providers of attention and matmuls that are not our kernels."""
    attention, linear = params.attention_provider, params.linear_provider
    given = attention if is_foreign(attention) else None, linear
    return tuple(it if isinstance(it, str) else name_of(it) for it in given if it is not None)


def _adapters(blueprint: Blueprint, host: Host) -> Adapters | None:
    if blueprint.adapters is None:
        return None
    cache = PeftCacheManager(blueprint.adapters.cache)
    return Adapters(cache, host.load, patience=blueprint.max_num_requests)


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
        drafts_refused=_why_no_drafts(sizes),
        max_run_len=sizes.max_context_length if evicts and not sizes.chunked else None,
        exclude_input_in_output=params.exclude_input_in_output,
        gather_context_logits=params.gather_context_logits,
        gather_generation_logits=params.gather_generation_logits,
        normalize_log_probs=params.normalize_log_probs,
        hidden_size=blueprint.hidden_size,
        seed=params.seed,
        max_num_requests=blueprint.max_num_requests,
        max_waiting=params.max_waiting_requests,
        adapters=None if blueprint.adapters is None else blueprint.adapters.limits,
    )


def _why_no_drafts(sizes: Sizes) -> str:
    if sizes.has_states:
        return "the model keeps a state, which cannot go back to the token before a rejected draft"
    return "" if sizes.attention_window is None else "the attention has a window"


def _scheduler(blueprint: Blueprint, kv_cache: KvCacheManager) -> RequestScheduler:
    params, config, sizes = blueprint.params, blueprint.scheduler, blueprint.sizes
    chunking = config.context_chunking_policy or ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
    micro_batch = MicroBatchScheduler(
        params.max_batch_size,
        params.max_num_tokens,
        max_context_length=sizes.max_context_length,
        context_chunking_policy=chunking if sizes.chunked else None,
        # a unit above `max_context_length` is allowed if every context fits in one step
        chunk_unit=min(sizes.chunk_unit, sizes.max_context_length) if sizes.chunked else None,
        # Cached tokens move the start of a prompt's first chunk, but do not shorten this chunk. So
        # only a first chunk that reaches the end of the prompt costs fewer tokens in its step.
        reuse_credit_rule="shift",
        mixed_beam_widths=True,
        num_shares=blueprint.num_stages,
    )
    if config.create_scheduler is None:
        capacity = _capacity(blueprint, kv_cache)
        if kv_cache.enable_block_reuse:
            capacity = ReuseCredit(capacity, kv_cache)
        return SimpleScheduler(capacity, micro_batch)
    return custom_scheduler(
        config.create_scheduler,
        max_num_requests=blueprint.max_num_requests,
        kv_cache_manager=kv_cache,
        max_batch_size=params.max_batch_size,
        max_num_tokens=params.max_num_tokens,
        micro_batch_scheduler=micro_batch,
    )


def custom_scheduler(create_scheduler: Callable[..., Any], **keywords: Any) -> RequestScheduler:
    """Return what `SchedulerConfig.create_scheduler` returns for `keywords`.

    Raise ConfigError if it does not accept them, or returns something other than a scheduler.
    """
    if problem := mismatch(create_scheduler, keywords=keywords):
        raise ConfigError(
            f"SchedulerConfig.create_scheduler = {create_scheduler!r} must accept the keywords "
            f"{', '.join(keywords)}, those that it does not use as **others: {problem}"
        )
    scheduler = create_scheduler(**keywords)
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
    is_static = policy is _STATIC_BATCH
    no_evict = StaticBatchScheduler if is_static else GuaranteedNoEvictScheduler
    return no_evict(most, kv_cache, two_step_lookahead=looks_ahead, started_contexts_first=True)
