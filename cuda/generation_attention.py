"""Attention of rows with one token each over the pages, by the items of a plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda.float_attention import PROGRAM as FLOAT_PROGRAM
from gptmanager.cuda.generation_plan import RESIDENT
from gptmanager.cuda.launch import NAMES, Argument, Launcher, Program, ints
from gptmanager.cuda.paged_kernels import CACHES, HEAD_DIMS, NARROW, check_attention, row_bytes
from gptmanager.kernels.attention_arguments import AttentionShape, Pages, RowSpans

_WARPS, _TILE = 4, 16  # as in the .cu
PROGRAM = Program(
    "generation_attention.cu",
    tuple(
        f"generation_attention<{NAMES[dtype]}, {head_dim}, {tiles}{cache}>"
        for dtype in NARROW
        for head_dim in HEAD_DIMS
        for tiles in (1, 2)
        for cache in CACHES
    ),
)


class GenerationWork(NamedTuple):
    """A `GenerationPlan` on the device, and the memory that it is worked off in.

    `items` int32 `[N, 4]` and `partial_starts` int32 `[R + 1]`: the plan's. Changed as working
    memory: `partial` `[n, H, D]` and `partial_log` `[n, H]` float32, n >= the plan's
    `num_partials`. `arrived` int32 `[R, K]` is zero, before and after.
    """

    items: Tensor
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
) -> None:
    """`out[t] = softmax(scores of queries[t] and the keys) @ values` for each row's only token.

    A row sees the positions of its items, which were planned with the window and the sink of
    `shape`. `queries`, `out` `[T, H, D]` of one dtype of float32, float16, bfloat16; D one of
    HEAD_DIMS; H / K at most MAX_GROUP. Pages are of the same dtype, or float8_e4m3fn. ValueError
    for other tensors.
    """
    items, partial_starts, partial, partial_log, arrived = work
    num_heads, num_kv_heads, head_dim = shape[:3]
    num_rows, num_items, dtype = rows.slots.shape[0], items.shape[0], queries.dtype
    cache = check_attention(
        *(out, queries, pages, rows, shape),
        partial=(partial, (None, num_heads, head_dim), torch.float32),
        partial_log=(partial_log, (partial.shape[0], num_heads), torch.float32),
        arrived=(arrived, (num_rows, num_kv_heads), torch.int32),
        partial_starts=(partial_starts, (num_rows + 1,), torch.int32),
        items=(items, (None, 4), torch.int32),
    )
    if num_items == 0:
        return
    arguments: tuple[Argument, ...] = (
        *(out, partial, partial_log, arrived, partial_starts),
        *(queries, cache.keys, pages.values, items),
        *(rows.row_starts, rows.slots, rows.block_tables, pages.cache_scales),
        *ints(num_heads, rows.block_tables.shape[1], pages.values.shape[2]),
        *(np.float32(shape.scale), np.float32(shape.softcap)),
    )
    if dtype in NARROW:
        tiles = 1 if num_heads <= 8 * num_kv_heads else 2
        name = f"generation_attention<{NAMES[dtype]}, {head_dim}, {tiles}{cache.argument}>"
        stages = 3 if shape.fp8 else 2
        shared = _WARPS * stages * 2 * _TILE * row_bytes(head_dim, cache.dtype)
        at_once = -(-launcher.num_multiprocessors * RESIDENT // num_kv_heads)
        kernel = launcher.kernel(PROGRAM, name, shared)
        grid = min(num_items, at_once), num_kv_heads
        kernel(grid, (_WARPS * 32,), (*arguments, *ints(num_items)), shared)
    else:
        name = f"generation_attention_float<{head_dim}{cache.argument}>"
        kernel = launcher.kernel(FLOAT_PROGRAM, name)
        kernel((num_items, num_kv_heads), (_WARPS * 32,), arguments)
