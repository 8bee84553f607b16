"""Kernel benchmark cases for paged attention: generation and context phase."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gptmanager.bench.kernels import attention_peers
from gptmanager.bench.kernels.cases import (
    Case,
    Contender,
    Goal,
    Planned,
    Prepared,
    Rig,
    Sizes,
    largest_error,
    tolerance,
)
from gptmanager.bench.kernels.paged_rows import PagedRows, attention_flops, paged_rows
from gptmanager.cuda.attention.context_attention import context_attention, plan_context
from gptmanager.cuda.attention.generation_attention import (
    GenerationWork,
    find_places,
    generation_attention,
)
from gptmanager.cuda.attention.generation_plan import WHOLE, plan_generation
from gptmanager.cuda.attention.warpgroup_attention import takes

Rows = Sequence[tuple[int, int]]  # (new tokens, length) of each row
_FP8 = torch.float8_e4m3fn
Run = Callable[[], Tensor]
Peers = Mapping[str, Callable[[Sequence[PagedRows]], Contender]]  # name -> maker of a contender
_TORCH: Peers = {  # not for pages of 8-bit floats
    "torch sdpa, dense": attention_peers.torch_sdpa,
    "torch varlen, dense": attention_peers.torch_varlen,
}


@dataclass(frozen=True, eq=False)
class _Phase:
    """A phase of attention. A goal of each case is to be as fast as the first of `peers`.

    `start` returns a function that runs our kernel. `plan` makes the plan of a step, on the host.
    """

    part: str
    start: Callable[[Rig, PagedRows], Run]
    plan: Callable[[Rig, PagedRows], object]
    peers: Peers


def attention_cases(sizes: Sizes) -> list[Case]:
    """Return the cases for the generation and the context phase."""
    return [*_generation_cases(sizes), *_context_cases(sizes)]


def _generation_cases(sizes: Sizes) -> list[Case]:
    """Return cases with one new token per row. Most cases have about the same total length."""
    batch, context = sizes.batch, sizes.context
    uniform, alike = f"{batch} x {context}", [(1, context)] * batch
    short = max(1, context // 32)
    long = 2 * context - short
    one = [(1, context // 4)] * (batch - 1)
    one.append((1, batch * context - sum(length for _, length in one)))
    peers = {"flashinfer": attention_peers.flashinfer_generation}
    phase = _Phase("generation_attention", _generation, _generation_plan, peers)
    case = functools.partial(_case, phase, sizes)
    return [
        case(uniform, alike, goals=(Goal("copy", 0.85),)),
        case(
            f"{batch // 2} x {short}, {batch - batch // 2} x {long}",
            [(1, short)] * (batch // 2) + [(1, long)] * (batch - batch // 2),
            goals=(Goal("times", 1.2, uniform),),
        ),
        case(f"{batch - 1} x {context // 4}, one {one[-1][1]}", one, quick=False),
        case(f"1 x {max(1, context // 4)}", [(1, max(1, context // 4))]),
        case(f"{uniform}, fp8", alike, dtype=_FP8),
        *(
            case(f"{uniform}, blocks of {other}", alike, tokens_per_block=other, quick=False)
            for other in sizes.other_blocks
        ),
    ]


def _context_cases(sizes: Sizes) -> list[Case]:
    """Return cases with several new tokens per row, with and without earlier blocks."""
    peers = {
        f"flashinfer {backend}": functools.partial(
            attention_peers.flashinfer_context, backend=backend
        )
        for backend in ("fa2", "fa3")
    }
    context, chunk, packed = sizes.context, sizes.chunk, max(1, sizes.context // 4)
    phase = _Phase("context_attention", _context, _context_plan, peers)
    case = functools.partial(_case, phase, sizes)
    chunks = f"4 chunks of {chunk} up to {context}"
    return [
        case(f"{context} causal", [(context, context)], goals=(Goal("matmul", 0.5),)),
        case(chunks, [(chunk, context)] * 4),
        case(f"{chunks}, fp8", [(chunk, context)] * 4, dtype=_FP8),
        case(f"8 x {packed} causal", [(packed, packed)] * 8, quick=False),
    ]


def _case(
    phase: _Phase,
    sizes: Sizes,
    name: str,
    rows: Rows,
    *,
    goals: tuple[Goal, ...] = (),
    quick: bool = True,
    dtype: torch.dtype | None = None,
    tokens_per_block: int | None = None,
) -> Case:
    """Return one case. `dtype` and `tokens_per_block` of the pages default to those of `sizes`."""
    own = dtype or sizes.dtype, tokens_per_block or sizes.tokens_per_block
    kv_bytes = 2 * sizes.num_kv_heads * sizes.head_dim * own[0].itemsize
    num_bytes = kv_bytes * sum(length for _, length in rows)
    num_tokens = sum(new for new, _ in rows)
    written = 2 * num_tokens * sizes.num_heads * sizes.head_dim * sizes.dtype.itemsize
    return Case(  # the bytes of queries and results are negligible in a generation step
        phase.part,
        name,
        num_bytes + (written if phase.start is _context else 0),
        functools.partial(_prepare, phase, rows, num_bytes, *own),
        attention_flops(sizes.num_heads, sizes.head_dim, rows),
        (*goals, Goal("peer", 1.0, next(iter(phase.peers)))),
        quick,
    )


def _prepare(
    phase: _Phase, rows: Rows, num_bytes: int, dtype: torch.dtype, tokens_per_block: int, rig: Rig
) -> Prepared:
    numbers = range(rig.num_sets(num_bytes))
    sets = [paged_rows(rig, rows, tokens_per_block, number, dtype) for number in numbers]
    runs = [phase.start(rig, own) for own in sets]
    makers = phase.peers if sets[0].pages.cache_scales is not None else {**phase.peers, **_TORCH}
    if phase.start is _context and takes(rig.launcher, sets[0].shape, rig.sizes.dtype):
        makers = {"without warpgroups": functools.partial(_without_warpgroups, rig), **makers}
    return Prepared(
        len(sets),
        Planned(lambda number: runs[number](), lambda: phase.plan(rig, sets[0])),
        largest_error(sets[0].expected()),
        tolerance(rig.sizes.dtype),
        {name: functools.partial(make, sets) for name, make in makers.items()},
    )


def _generation(rig: Rig, rows: PagedRows) -> Run:
    num_partials, items, block_starts, starts = _generation_plan(rig, rows)
    out, heads = torch.empty_like(rows.queries), rows.queries.shape[1:]
    partial = rows.queries.new_empty(num_partials, *heads, dtype=torch.float32)
    partial_log = partial.new_empty(partial.shape[:2])
    arrived = items.new_zeros(len(rows.lengths), rows.shape.num_kv_heads)
    work = GenerationWork(items, block_starts, starts, partial, partial_log, arrived)
    given = (rows.queries, rows.pages, rows.spans, work, rows.shape)

    def run() -> Tensor:
        generation_attention(rig.launcher, out, *given)
        return out

    return run


def _generation_plan(rig: Rig, rows: PagedRows) -> tuple[int, Tensor, Tensor, Tensor]:
    """Return the plan of the step: the number of partial results, and three tensors on the device.

    These are the work items, the first item of each thread block, and the first partial result of
    each row.
    """
    size = rows.shape.num_kv_heads, find_places(rig.launcher, rows.shape)
    stretch = None if rig.launcher.features.split else WHOLE
    plan = plan_generation(rows.lengths, *size, stretch=stretch)
    starts = rig.ints(plan.block_starts), rig.ints(plan.partial_starts)
    return plan.num_partials, rig.ints(plan.items), *starts


def _context(rig: Rig, rows: PagedRows) -> Run:
    out = torch.empty_like(rows.queries)
    given = (rows.queries, rows.pages, rows.spans, _context_plan(rig, rows), rows.shape)

    def run() -> Tensor:
        context_attention(rig.launcher, out, *given)
        return out

    return run


def _without_warpgroups(rig: Rig, sets: Sequence[PagedRows]) -> Contender:
    """Return a contender that runs our kernel without warpgroup instructions."""
    launcher = copy.copy(rig.launcher)
    launcher.has_warpgroups = False
    runs = [_context(replace(rig, launcher=launcher), rows) for rows in sets]
    return lambda number: runs[number]()


def _context_plan(rig: Rig, rows: PagedRows) -> Tensor:
    return rig.ints(plan_context(rows.num_new, rows.lengths, rows.shape))
