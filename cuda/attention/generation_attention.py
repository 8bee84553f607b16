"""Attention over the pages of the KV cache, for rows with one token each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda.attention.float_attention import PROGRAM as FLOAT_PROGRAM
from gptmanager.cuda.attention.float_attention import float_kernel
from gptmanager.cuda.attention.generation_plan import Places
from gptmanager.cuda.attention.paged_kernels import (
    CACHES,
    FP8,
    HEAD_DIMS,
    NARROW,
    check_attention,
    row_bytes,
    sinks_arguments,
)
from gptmanager.cuda.device.launch import NAMES, Argument, Launcher, Program, ints
from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages, RowSpans

_WARPS, _TILE = 4, 16  # equal to those in the .cu
_BLOCKS = {5: 32, 4: 64, 3: 160, 2: 512}  # resident blocks -> largest D * TILES, as in the .cu
# shared memory of a block: at most the first for static arrays, and the second for CUDA itself
_STATIC_BYTES, _RESERVED_BYTES = 1024, 1024


def _name(dtype: torch.dtype, head_dim: int, tiles: int, cache: str, sinks: bool) -> str:
    last = sinks_arguments(dtype, cache) if sinks else cache
    return f"generation_attention<{NAMES[dtype]}, {head_dim}, {tiles}{last}>"


PROGRAM = Program(
    "attention/generation_attention.cu",
    tuple(
        _name(dtype, head_dim, tiles, cache, sinks)
        for sinks in (False, True)
        for dtype in NARROW
        for head_dim in HEAD_DIMS
        for tiles in (1, 2)
        for cache in CACHES
    ),
    dependent=True,
    at_once=1,  # each takes long to compile, and a model needs few of them
)


class GenerationWork(NamedTuple):
    """A `GenerationPlan` on the device, and its working memory.

    The plan consists of `items` int32 `[N, 4]`, `block_starts` int32 `[B + 1]` and `partial_starts`
    int32 `[R + 1]`. The working memory has `partial` `[n, H, D]` and `partial_log` `[n, H]`, both
    float32, and `arrived` int32 `[R, K]`. n is at least the plan's `num_partials`. All of `arrived`
    is zero before and after each launch.
    """

    items: Tensor
    block_starts: Tensor
    partial_starts: Tensor
    partial: Tensor
    partial_log: Tensor
    arrived: Tensor


def generation_attention(
    launcher: Launcher,
    out: Tensor,
    queries: Tensor,
    pages: Pages,
    rows: RowSpans,
    work: GenerationWork,
    shape: AttentionShape,
    sinks: Tensor | None = None,
) -> None:
    """Compute `out[t] = softmax(scores of queries[t] and the keys) @ values` for rows of one token.

    A row sees the positions of its items, which were planned with the window and the sink of
    `shape`. `queries` and `out` `[T, H, D]` have the same dtype: float32, float16 or bfloat16. D is
    one of HEAD_DIMS, and H / K at most MAX_GROUP. Pages have the same dtype, or float8_e4m3fn.
    `sinks` `[H]`, of the queries' dtype, adds one score to the softmax of each head; no row of the
    values belongs to this score. Pass `sinks` if and only if `shape.sinks`. Raises ValueError for
    tensors of other shapes or dtypes.
    """
    items, block_starts, partial_starts, partial, partial_log, arrived = work
    num_heads, num_kv_heads, head_dim = shape[:3]
    num_rows, num_items, dtype = rows.slots.shape[0], items.shape[0], queries.dtype
    cache = check_attention(
        *(out, queries, pages, rows, shape, sinks),
        partial=(partial, (None, num_heads, head_dim), torch.float32),
        partial_log=(partial_log, (partial.shape[0], num_heads), torch.float32),
        arrived=(arrived, (num_rows, num_kv_heads), torch.int32),
        partial_starts=(partial_starts, (num_rows + 1,), torch.int32),
        items=(items, (None, 4), torch.int32),
        block_starts=(block_starts, (None,), torch.int32),
    )
    if num_items == 0:
        return
    starts = (block_starts,) if dtype in NARROW else ()
    arguments: tuple[Argument, ...] = (
        *(out, partial, partial_log, arrived, partial_starts),
        *(queries, cache.keys, pages.values, items, *starts),
        *(rows.row_starts, rows.slots, rows.block_tables, pages.cache_scales),
        *ints(num_heads, rows.block_tables.shape[1], pages.values.shape[2]),
        *(np.float32(shape.scale), np.float32(shape.softcap)),
        *(() if sinks is None else (sinks,)),
    )
    if dtype in NARROW:
        tiles = 1 if num_heads <= 8 * num_kv_heads else 2
        name = _name(dtype, head_dim, tiles, cache.argument, shape.sinks)
        shared = _shared_bytes(head_dim, cache.dtype)
        kernel = launcher.kernel(PROGRAM, name, shared)
        grid = block_starts.shape[0] - 1, num_kv_heads
        kernel(grid, (_WARPS * 32,), arguments, shared)
    else:
        name = float_kernel("generation", head_dim, cache.argument, shape.sinks)
        kernel = launcher.kernel(FLOAT_PROGRAM, name)
        kernel((num_items, num_kv_heads), (_WARPS * 32,), arguments)


def find_places(launcher: Launcher, shape: AttentionShape) -> Places:
    """Return the places of blocks of the 16-bit kernels on this device, for `plan_generation`."""
    resident = resident_blocks(shape, launcher.max_shared_mem)
    return Places(launcher.num_multiprocessors, resident)


def resident_blocks(shape: AttentionShape, max_shared_mem: int) -> int:
    """Return how many blocks of the 16-bit kernels a multiprocessor runs at a time.

    Registers and shared memory limit this number. A multiprocessor has 1 KiB more shared memory
    than the `max_shared_mem` bytes that one block can have.
    """
    width = shape.head_dim * (1 if shape.group <= 8 else 2)
    by_registers = next(count for count, widest in _BLOCKS.items() if width <= widest)
    dtype = FP8 if shape.fp8 else torch.bfloat16
    of_block = _shared_bytes(shape.head_dim, dtype) + _STATIC_BYTES + _RESERVED_BYTES
    return max(1, min(by_registers, (max_shared_mem + _RESERVED_BYTES) // of_block))


def _shared_bytes(head_dim: int, dtype: torch.dtype) -> int:
    stages = 3 if dtype is FP8 else 2
    return _WARPS * stages * 2 * _TILE * row_bytes(head_dim, dtype)
