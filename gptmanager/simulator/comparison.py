"""Simulated policies side by side: from options to a table.

Knows how the figures are shown, and what machine a load runs on when no recording says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from gptmanager.assembly.blueprint import Blueprint
from gptmanager.assembly.options import checked_optional_params
from gptmanager.assembly.sizing import size
from gptmanager.config import (
    CapacitySchedulerPolicy,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.simulator.figures import Figures
from gptmanager.simulator.load import VOCAB_SIZE
from gptmanager.terminal import tables
from gptmanager.testing import ScriptedSpec

_DEFAULT_KV_TOKENS = 1 << 18


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Options of a simulated manager; None: as recorded, or the default. Lengths in tokens."""

    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    kv_cache_tokens: int | None = None
    tokens_per_block: int | None = None
    chunked_context: bool | None = None
    run_ahead: int | None = None


def hypothetical(machine: Machine, max_seq_len: int) -> Blueprint:
    """A manager of a model that need not exist, with room for sequences of `max_seq_len`."""
    params = OptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=_DEFAULT_KV_TOKENS), max_seq_len=max_seq_len
    )
    fused = ModelType.INFLIGHT_FUSED_BATCHING
    return _sized(params, SchedulerConfig(), VOCAB_SIZE, max_seq_len, machine, fused)


def variant(
    blueprint: Blueprint,
    policy: CapacitySchedulerPolicy,
    machine: Machine = Machine(),  # noqa: B008 - frozen
    create_scheduler: Callable[..., Any] | None = None,
) -> Blueprint:
    """The same manager under another policy and other options, set up as a manager would be."""
    scheduler = dataclasses.replace(
        blueprint.scheduler, capacity_scheduler_policy=policy, create_scheduler=create_scheduler
    )
    same = blueprint.scheduler.capacity_scheduler_policy is policy
    if same and machine == Machine():
        return dataclasses.replace(blueprint, scheduler=scheduler)
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
    # the bytes of a block are the recorded model's, so that the host tier is taken over in tokens
    host_tokens = sizes.num_host_blocks * sizes.tokens_per_block
    num_host_blocks = host_tokens // resized.sizes.tokens_per_block
    return dataclasses.replace(
        resized,
        sizes=dataclasses.replace(resized.sizes, num_host_blocks=num_host_blocks),
        hidden_size=blueprint.hidden_size,
    )


def _sized(
    params: OptionalParams,
    scheduler: SchedulerConfig,
    vocab_size: int,
    max_seq_len: int,
    machine: Machine,
    model_type: ModelType,
    max_beam_width: int = 1,
) -> Blueprint:
    def given(value: int | None, default: int) -> int:
        return default if value is None else value

    kv_cache = params.kv_cache_config
    max_seq_len = given(machine.max_seq_len, max_seq_len)
    chunked = machine.chunked_context
    params = dataclasses.replace(
        params,
        kv_cache_config=dataclasses.replace(
            kv_cache,
            max_tokens=machine.kv_cache_tokens or kv_cache.max_tokens,
            tokens_per_block=given(machine.tokens_per_block, kv_cache.tokens_per_block),
        ),
        enable_chunked_context=params.enable_chunked_context if chunked is None else chunked,
        max_batch_size=given(machine.max_batch_size, params.max_batch_size),
        max_num_tokens=given(machine.max_num_tokens, params.max_num_tokens),
        run_ahead=params.run_ahead if machine.run_ahead is None else machine.run_ahead,
        max_seq_len=max_seq_len,
    )
    params = checked_optional_params(params)
    spec = ScriptedSpec(vocab_size, max_seq_len)
    sizes = size(params, scheduler, spec, model_type, max_beam_width)
    return Blueprint(
        *(params, scheduler, sizes, vocab_size),
        model_type=model_type,
        max_beam_width=max_beam_width,
    )


def table(columns: Mapping[str, Figures]) -> str:
    """A line a figure, a column a policy."""
    return "\n".join(tables.lines([figures_table(columns)]))


def figures_table(columns: Mapping[str, Figures]) -> Table:
    """The same for `terminal.tables`."""
    shown = [_shown(figures) for figures in columns.values()]
    rows = [(label, *(column[label] for column in shown)) for label in shown[0]]
    return tables.table(("", *columns), rows, left=(0,))


def _shown(figures: Figures) -> dict[str, str]:
    return {
        "requests": f"{figures.requests:,}",
        "failed": f"{figures.failed:,}",
        "iterations": f"{figures.iterations:,}",
        "makespan s": f"{figures.makespan_s:,.3f}",
        "output tokens": f"{figures.output_tokens:,}",
        "output tokens/s": f"{figures.output_tokens_per_s:,.1f}",
        "first token p50 ms": _milliseconds(figures.ttft_s[0]),
        "first token p99 ms": _milliseconds(figures.ttft_s[1]),
        "per token p50 ms": _milliseconds(figures.per_token_s[0]),
        "per token p99 ms": _milliseconds(figures.per_token_s[1]),
        "mean batch": f"{figures.mean_batch:,.1f}",
        "largest batch": f"{figures.max_batch:,}",
        "KV blocks used, mean": f"{figures.kv_use[0]:.1%}",
        "KV blocks used, peak": f"{figures.kv_use[1]:.1%}",
        "pauses": f"{figures.pauses:,}",
        "recomputed tokens": f"{figures.recomputed_tokens:,}",
    }


def _milliseconds(seconds: float) -> str:
    return "-" if seconds != seconds else f"{seconds * 1000:,.2f}"


def plain(figures: Figures) -> dict[str, Any]:
    """As JSON values."""
    values = dataclasses.asdict(figures)
    values["output_tokens_per_s"] = figures.output_tokens_per_s
    return values
