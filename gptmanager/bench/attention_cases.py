"""Attention over pages as the kernel benchmark times it: generation and context."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gptmanager.bench import attention_peers
from gptmanager.bench.cases import (
    Bed,
    Case,
    Contender,
    Goal,
    Planned,
    Prepared,
    Sizes,
    largest_error,
    tolerance,
)
from gptmanager.bench.paged_rows import PagedRows, attention_flops, kv_bytes, paged_rows
from gptmanager.cuda.context_attention import context_attention, plan_context
from gptmanager.cuda.generation_attention import GenerationWork, generation_attention
from gptmanager.cuda.generation_plan import plan_generation

Rows = Sequence[tuple[int, int]]  # new tokens, length
_FP8 = torch.float8_e4m3fn
_GENERATION_PEER, _CONTEXT_PEER = "flashinfer", "flashinfer fa2"  # that ours is not slower than


def attention_cases(sizes: Sizes) -> list[Case]:
    return [*generation_cases(sizes), *context_cases(sizes)]


def generation_cases(sizes: Sizes) -> list[Case]:
    """One token a row. Skewed and uniform rows have about as many tokens in all."""
    batch, context = sizes.batch, sizes.context
    uniform = f"{batch} x {context}"
    short = max(1, context // 32)
    long = 2 * context - short
    one = [(1, context // 4)] * (batch - 1)
    one.append((1, batch * context - sum(length for _, length in one)))
    block = sizes.tokens_per_block
    case = functools.partial(_generation_case, sizes)
    return [
        case(uniform, [(1, context)] * batch, block, goals=(Goal("copy", 0.85),)),
        case(
            f"{batch // 2} x {short}, {batch - batch // 2} x {long}",
            [(1, short)] * (batch // 2) + [(1, long)] * (batch - batch // 2),
            block,
            goals=(Goal("times", 1.2, uniform),),
        ),
        case(f"{batch - 1} x {context // 4}, one {one[-1][1]}", one, block, quick=False),
        case(f"1 x {max(1, context // 4)}", [(1, max(1, context // 4))], block),
        case(f"{uniform}, fp8", [(1, context)] * batch, block, dtype=_FP8),
        *(
            case(f"{uniform}, blocks of {other}", [(1, context)] * batch, other, quick=False)
            for other in sizes.other_blocks
        ),
    ]


def _generation_case(
    sizes: Sizes,
    name: str,
    rows: Rows,
    tokens_per_block: int,
    *,
    goals: tuple[Goal, ...] = (),
    quick: bool = True,
    dtype: torch.dtype | None = None,
) -> Case:
    """`dtype`: of the pages, None: that of all."""
    return Case(
        part="generation_attention",
        name=name,
        num_bytes=_kv_bytes(sizes, rows, dtype),
        flops=attention_flops(sizes.num_heads, sizes.head_dim, rows),
        prepare=functools.partial(_prepare_generation, rows, tokens_per_block, dtype),
        goals=(*goals, Goal("peer", 1.0, _GENERATION_PEER)),
        quick=quick,
    )


def _prepare_generation(
    rows: Rows, tokens_per_block: int, dtype: torch.dtype | None, bed: Bed
) -> Prepared:
    sets = _sets(bed, rows, tokens_per_block, dtype)
    runs = [_generation(bed, own) for own in sets]
    return Prepared(
        num_sets=len(sets),
        ours=Planned(lambda number: runs[number](), lambda: _generation_plan(bed, sets[0])),
        error=largest_error(sets[0].expected()),
        tolerance=tolerance(bed.sizes.dtype),
        peers={
            _GENERATION_PEER: lambda: attention_peers.flashinfer_generation(sets),
            **_torch_peers(sets),
        },
    )


def _torch_peers(sets: Sequence[PagedRows]) -> dict[str, Callable[[], Contender]]:
    """None over pages of 8-bit floats."""
    if sets[0].pages.cache_scales is not None:
        return {}
    return {
        "torch sdpa, dense": lambda: attention_peers.torch_sdpa(sets),
        "torch varlen, dense": lambda: attention_peers.torch_varlen(sets),
    }


def _generation(bed: Bed, rows: PagedRows) -> Callable[[], Tensor]:
    num_partials, items, starts = _generation_plan(bed, rows)
    out, heads = torch.empty_like(rows.queries), rows.queries.shape[1:]
    partial = rows.queries.new_empty(num_partials, *heads, dtype=torch.float32)
    partial_log = partial.new_empty(partial.shape[:2])
    arrived = items.new_zeros(len(rows.lengths), rows.shape.num_kv_heads)
    work = GenerationWork(items, starts, partial, partial_log, arrived)
    given = (rows.queries, rows.pages, rows.spans, work, rows.shape)

    def run() -> Tensor:
        generation_attention(bed.launcher, out, *given)
        return out

    return run


def _generation_plan(bed: Bed, rows: PagedRows) -> tuple[int, Tensor, Tensor]:
    """Partial results, items and where each row's partial results begin, on the device."""
    size = rows.shape.num_kv_heads, bed.launcher.num_multiprocessors
    plan = plan_generation(rows.lengths, *size)
    return plan.num_partials, bed.ints(plan.items), bed.ints(plan.partial_starts)


def context_cases(sizes: Sizes) -> list[Case]:
    """Several tokens a row, over earlier blocks too."""
    context, chunk = sizes.context, sizes.chunk
    case = functools.partial(_context_case, sizes)
    packed = max(1, context // 4)
    return [
        case(f"{context} causal", [(context, context)], goals=(Goal("tflops", 300),)),
        case(f"4 chunks of {chunk} up to {context}", [(chunk, context)] * 4),
        case(f"4 chunks of {chunk} up to {context}, fp8", [(chunk, context)] * 4, dtype=_FP8),
        case(f"8 x {packed} causal", [(packed, packed)] * 8, quick=False),
    ]


def _context_case(
    sizes: Sizes,
    name: str,
    rows: Rows,
    *,
    goals: tuple[Goal, ...] = (),
    quick: bool = True,
    dtype: torch.dtype | None = None,
) -> Case:
    num_tokens = sum(new for new, _ in rows)
    return Case(
        part="context_attention",
        name=name,
        num_bytes=_kv_bytes(sizes, rows, dtype)
        + 2 * num_tokens * sizes.num_heads * sizes.head_dim * sizes.dtype.itemsize,
        flops=attention_flops(sizes.num_heads, sizes.head_dim, rows),
        prepare=functools.partial(_prepare_context, rows, sizes.tokens_per_block, dtype),
        goals=(*goals, Goal("peer", 1.0, _CONTEXT_PEER)),
        quick=quick,
    )


def _prepare_context(
    rows: Rows, tokens_per_block: int, dtype: torch.dtype | None, bed: Bed
) -> Prepared:
    sets = _sets(bed, rows, tokens_per_block, dtype)
    runs = [_context(bed, own) for own in sets]

    def flashinfer(backend: str) -> Callable[[], Contender]:
        return lambda: attention_peers.flashinfer_context(sets, backend)

    return Prepared(
        num_sets=len(sets),
        ours=Planned(lambda number: runs[number](), lambda: _context_plan(bed, sets[0])),
        error=largest_error(sets[0].expected()),
        tolerance=tolerance(bed.sizes.dtype),
        peers={
            _CONTEXT_PEER: flashinfer("fa2"),
            "flashinfer fa3": flashinfer("fa3"),
            **_torch_peers(sets),
        },
    )


def _context(bed: Bed, rows: PagedRows) -> Callable[[], Tensor]:
    out = torch.empty_like(rows.queries)
    given = (rows.queries, rows.pages, rows.spans, _context_plan(bed, rows), rows.shape)

    def run() -> Tensor:
        context_attention(bed.launcher, out, *given)
        return out

    return run


def _context_plan(bed: Bed, rows: PagedRows) -> Tensor:
    return bed.ints(plan_context(rows.num_new, rows.lengths, rows.shape))


def _sets(
    bed: Bed, rows: Rows, tokens_per_block: int, dtype: torch.dtype | None
) -> list[PagedRows]:
    number = bed.num_sets(_kv_bytes(bed.sizes, rows, dtype))
    return [paged_rows(bed, rows, tokens_per_block, index, dtype) for index in range(number)]


def _kv_bytes(sizes: Sizes, rows: Rows, dtype: torch.dtype | None) -> int:
    own = (sizes.num_kv_heads, sizes.head_dim, (dtype or sizes.dtype).itemsize)
    return kv_bytes(own, rows)
