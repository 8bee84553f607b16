"""The simulated manager: a recorded manager with other options, or a hypothetical manager."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from gptmanager.assembly.blueprint import Blueprint
from gptmanager.assembly.options import checked_optional_params
from gptmanager.assembly.sizing import size
from gptmanager.config import (
    CapacitySchedulerPolicy,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    ParallelConfig,
    SchedulerConfig,
)
from gptmanager.recorder.limits import checked_blueprint
from gptmanager.recorder.recording_file import located
from gptmanager.simulator.load import VOCAB_SIZE
from gptmanager.testing import ScriptedSpec

_DEFAULT_KV_TOKENS = 1 << 18
# field of `Machine` -> field of `OptionalParams` or `KvCacheConfig`, if the names differ
_PARAMS = {"kv_cache_tokens": "max_tokens", "chunked_context": "enable_chunked_context"}
_OF_CACHE = ("max_tokens", "tokens_per_block")  # fields of `KvCacheConfig`


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Options of a simulated manager, with lengths in tokens.

    None means the recorded value or, without a recording, the default.
    """

    max_batch_size: int | None = None
    max_active_requests: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    kv_cache_tokens: int | None = None
    tokens_per_block: int | None = None
    chunked_context: bool | None = None
    run_ahead: int | None = None
    pipeline_parallel_size: int | None = None


def hypothetical(machine: Machine, max_seq_len: int) -> Blueprint:
    """Return a hypothetical manager's blueprint for sequences of up to `max_seq_len` tokens.

    If `machine.max_seq_len` is given, it replaces `max_seq_len`.
    """
    params = OptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=_DEFAULT_KV_TOKENS), max_seq_len=max_seq_len
    )
    fused = ModelType.INFLIGHT_FUSED_BATCHING
    return _checked(_sized(params, SchedulerConfig(), VOCAB_SIZE, max_seq_len, machine, fused))


def variant(
    blueprint: Blueprint,
    policy: CapacitySchedulerPolicy,
    machine: Machine = Machine(),  # noqa: B008 - frozen
    create_scheduler: Callable[..., Any] | None = None,
) -> Blueprint:
    """Return the blueprint with `policy`, the options of `machine` and the resulting sizes.

    Raise RecordingError if the options lead to sizes that exceed the limits of recordings.
    """
    scheduler = dataclasses.replace(
        blueprint.scheduler, capacity_scheduler_policy=policy, create_scheduler=create_scheduler
    )
    same = blueprint.scheduler.capacity_scheduler_policy is policy
    if same and machine == Machine():
        return dataclasses.replace(blueprint, scheduler=scheduler, custom_scheduler="")
    sizes = blueprint.sizes
    kv_cache = dataclasses.replace(
        blueprint.params.kv_cache_config, max_tokens=sizes.num_blocks * sizes.tokens_per_block
    )
    params = dataclasses.replace(blueprint.params, kv_cache_config=kv_cache)
    if not params.enable_chunked_context and not sizes.chunked:
        scheduler = dataclasses.replace(scheduler, context_chunking_policy=None)
    model_type = blueprint.model_type
    if model_type is ModelType.V1 and policy is not CapacitySchedulerPolicy.STATIC_BATCH:
        model_type = ModelType.INFLIGHT_FUSED_BATCHING
    resized = _sized(
        *(params, scheduler, blueprint.vocab_size, sizes.max_seq_len, machine, model_type),
        blueprint.max_beam_width,
    )
    # bytes per token do not change, so the host tier holds the same number of tokens
    host_tokens = sizes.num_host_blocks * sizes.tokens_per_block
    num_host_blocks = host_tokens // resized.sizes.tokens_per_block
    return _checked(
        dataclasses.replace(
            resized,
            sizes=dataclasses.replace(
                resized.sizes,
                num_host_blocks=num_host_blocks,
                has_states=sizes.has_states,
                num_snapshots=sizes.num_snapshots,
            ),
            hidden_size=blueprint.hidden_size,
            adapters=blueprint.adapters,
        )
    )


def _checked(blueprint: Blueprint) -> Blueprint:
    """Check the blueprint as if it were read from a recording, and return it."""
    with located("the simulated manager"):
        return checked_blueprint(blueprint)


def _sized(
    params: OptionalParams,
    scheduler: SchedulerConfig,
    vocab_size: int,
    max_seq_len: int,
    machine: Machine,
    model_type: ModelType,
    max_beam_width: int = 1,
) -> Blueprint:
    given = {name: n for name, n in dataclasses.asdict(machine).items() if n is not None}
    given = {"max_seq_len": max_seq_len} | {_PARAMS.get(name, name): given[name] for name in given}
    stages = given.pop("pipeline_parallel_size", None)
    if stages is not None:
        given["parallel_config"] = ParallelConfig(pipeline_parallel_size=stages)
    of_cache = {name: given.pop(name) for name in _OF_CACHE if name in given}
    kv_cache = dataclasses.replace(params.kv_cache_config, **of_cache)
    params = dataclasses.replace(params, kv_cache_config=kv_cache, **given)
    params = checked_optional_params(params)
    spec = ScriptedSpec(vocab_size, given["max_seq_len"])
    sizes = size(params, scheduler, spec, model_type, max_beam_width)
    return Blueprint(
        *(params, scheduler, sizes, vocab_size),
        model_type=model_type,
        max_beam_width=max_beam_width,
    )
