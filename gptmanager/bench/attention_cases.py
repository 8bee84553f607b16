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
    Prepared,
    Sizes,
    largest_error,
    tolerance,
)
from gptmanager.bench.paged_rows import PagedRows, attention_flops, kv_bytes, paged_rows
from gptmanager.cuda.context_attention import context_attention, plan_context
from gptmanager.cuda.generation_attention import generation_attention
from gptmanager.cuda.generation_plan import plan_generation

Rows = Sequence[tuple[int, int]]  # new tokens, length


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
        case(uniform, [(1, context)] * batch, block, goal=Goal("copy", 0.85)),
        case(
            f"{batch // 2} x {short}, {batch - batch // 2} x {long}",
            [(1, short)] * (batch // 2) + [(1, long)] * (batch - batch // 2),
            block,
            goal=Goal("times", 1.2, uniform),
        ),
        case(f"{batch - 1} x {context // 4}, one {one[-1][1]}", one, block, quick=False),
        case(f"1 x {max(1, context // 4)}", [(1, max(1, context // 4))], block),
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
    goal: Goal | None = None,
    quick: bool = True,
) -> Case:
    own = (sizes.num_kv_heads, sizes.head_dim, sizes.dtype.itemsize)
    return Case(
        part="generation_attention",
        name=name,
        num_bytes=kv_bytes(own, rows),
        flops=attention_flops(sizes.num_heads, sizes.head_dim, rows),
        prepare=functools.partial(_prepare_generation, rows, tokens_per_block),
        goal=goal,
        quick=quick,
    )


def _prepare_generation(rows: Rows, tokens_per_block: int, bed: Bed) -> Prepared:
    sets = _sets(bed, rows, tokens_per_block)
    runs = [_generation(bed, own) for own in sets]
    return Prepared(
        num_sets=len(sets),
        ours=lambda number: runs[number](),
        error=largest_error(sets[0].expected()),
        tolerance=tolerance(bed.sizes.dtype),
        peers={
            "flashinfer": lambda: attention_peers.flashinfer_generation(sets),
            "torch sdpa, dense": lambda: attention_peers.torch_sdpa(sets),
            "torch varlen, dense": lambda: attention_peers.torch_varlen(sets),
        },
    )


def _generation(bed: Bed, rows: PagedRows) -> Callable[[], Tensor]:
    num_kv_heads = rows.keys.shape[1]
    plan = plan_generation(rows.lengths, num_kv_heads, bed.launcher.num_multiprocessors)
    out, heads = torch.empty_like(rows.queries), rows.queries.shape[1:]
    partial = rows.queries.new_empty(plan.num_partials, *heads, dtype=torch.float32)
    partial_log = partial.new_empty(partial.shape[:2])
    items, starts = bed.ints(plan.items), bed.ints(plan.partial_starts)

    def run() -> Tensor:
        generation_attention(
            bed.launcher,
            *(out, partial, partial_log, rows.queries, rows.keys, rows.values),
            *(items, starts, rows.row_starts, rows.slots, rows.block_tables),
            scale=rows.scale,
        )
        return out

    return run


def context_cases(sizes: Sizes) -> list[Case]:
    """Several tokens a row, over earlier blocks too."""
    context, chunk = sizes.context, sizes.chunk
    case = functools.partial(_context_case, sizes)
    packed = max(1, context // 4)
    return [
        case(f"{context} causal", [(context, context)], goal=Goal("tflops", 300)),
        case(f"4 chunks of {chunk} up to {context}", [(chunk, context)] * 4),
        case(f"8 x {packed} causal", [(packed, packed)] * 8, quick=False),
    ]


def _context_case(sizes: Sizes, name: str, rows: Rows, *, goal: Goal | None = None,
                  quick: bool = True) -> Case:  # fmt: skip
    own = (sizes.num_kv_heads, sizes.head_dim, sizes.dtype.itemsize)
    num_tokens = sum(new for new, _ in rows)
    return Case(
        part="context_attention",
        name=name,
        num_bytes=kv_bytes(own, rows)
        + 2 * num_tokens * sizes.num_heads * sizes.head_dim * sizes.dtype.itemsize,
        flops=attention_flops(sizes.num_heads, sizes.head_dim, rows),
        prepare=functools.partial(_prepare_context, rows, sizes.tokens_per_block),
        goal=goal,
        quick=quick,
    )


def _prepare_context(rows: Rows, tokens_per_block: int, bed: Bed) -> Prepared:
    sets = _sets(bed, rows, tokens_per_block)
    runs = [_context(bed, own) for own in sets]

    def flashinfer(backend: str) -> Callable[[], Contender]:
        return lambda: attention_peers.flashinfer_context(sets, backend)

    return Prepared(
        num_sets=len(sets),
        ours=lambda number: runs[number](),
        error=largest_error(sets[0].expected()),
        tolerance=tolerance(bed.sizes.dtype),
        peers={
            "flashinfer fa2": flashinfer("fa2"),
            "flashinfer fa3": flashinfer("fa3"),
            "torch sdpa, dense": lambda: attention_peers.torch_sdpa(sets),
            "torch varlen, dense": lambda: attention_peers.torch_varlen(sets),
        },
    )


def _context(bed: Bed, rows: PagedRows) -> Callable[[], Tensor]:
    num_heads, head_dim = rows.queries.shape[1:]
    group = num_heads // rows.keys.shape[1]
    items = bed.ints(plan_context(rows.num_new, rows.lengths, group, head_dim))
    out = torch.empty_like(rows.queries)

    def run() -> Tensor:
        context_attention(
            bed.launcher,
            *(out, rows.queries, rows.keys, rows.values, items),
            *(rows.row_starts, rows.kv_lengths, rows.slots, rows.block_tables),
            scale=rows.scale,
        )
        return out

    return run


def _sets(bed: Bed, rows: Rows, tokens_per_block: int) -> list[PagedRows]:
    sizes = bed.sizes
    own = (sizes.num_kv_heads, sizes.head_dim, sizes.dtype.itemsize)
    number = bed.num_sets(kv_bytes(own, rows))
    return [paged_rows(bed, rows, tokens_per_block, index) for index in range(number)]
