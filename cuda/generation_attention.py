"""Attention of rows with one token each over the pages, by the items of a plan."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda.cache_write import CACHES, HEAD_DIMS, check_cache, row_bytes
from gptmanager.cuda.float_attention import PROGRAM as FLOAT_PROGRAM
from gptmanager.cuda.generation_plan import RESIDENT
from gptmanager.cuda.launch import NAMES, Argument, Launcher, Program, check_tensors, ints

_WARPS, _TILE = 4, 16  # as in the .cu
MAX_GROUP = 16
_NARROW = (torch.float16, torch.bfloat16)
PROGRAM = Program(
    "generation_attention.cu",
    tuple(
        f"generation_attention<{NAMES[dtype]}, {head_dim}, {tiles}{cache}>"
        for dtype in _NARROW
        for head_dim in HEAD_DIMS
        for tiles in (1, 2)
        for cache in CACHES
    ),
)


def generation_attention(
    launcher: Launcher,
    out: Tensor,
    partial: Tensor,
    partial_log: Tensor,
    arrived: Tensor,
    partial_starts: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    items: Tensor,
    row_starts: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    cache_scales: Tensor | None = None,
) -> None:
    """`out[t] = softmax(score(queries[t] @ keys^T * scale)) @ values` for each row's only token.

    score(x) = x, or softcap * tanh(x / softcap). A row sees the positions of its items.
    `queries`, `out` `[T, H, D]`; `keys`, `values` `[P, K, B, D]`, one layer's; one dtype of
    float32, float16, bfloat16; D one of HEAD_DIMS; H / K at most MAX_GROUP. `items` `[N, 4]` and
    `partial_starts` `[R + 1]`: a GenerationPlan's. `row_starts` `[R + 1]`, `slots` `[R]`,
    `block_tables` `[slots, blocks]`; all int32. Changed as working memory: `partial` `[n, H, D]`
    and `partial_log` `[n, H]` float32, n >= the plan's `num_partials`. `arrived` int32 `[R, K]`
    is zero, before and after. With `cache_scales` `[2, K]` float32, of keys, then of values, `keys`
    and `values` are float8_e4m3fn: element * scale. ValueError for other tensors.
    """
    num_heads, head_dim = queries.shape[1:]
    num_kv_heads, tokens_per_block = keys.shape[1:3]
    num_rows, dtype = slots.shape[0], queries.dtype
    pages = (keys.shape[0], num_kv_heads, tokens_per_block, head_dim)
    cache = check_cache(dtype, keys, cache_scales)
    check_tensors(
        out=(out, (queries.shape[0], num_heads, head_dim), dtype),
        partial=(partial, (None, num_heads, head_dim), torch.float32),
        partial_log=(partial_log, (partial.shape[0], num_heads), torch.float32),
        arrived=(arrived, (num_rows, num_kv_heads), torch.int32),
        partial_starts=(partial_starts, (num_rows + 1,), torch.int32),
        queries=(queries, (None, num_heads, head_dim), dtype),
        keys=(keys, pages, cache.dtype),
        values=(values, pages, cache.dtype),
        items=(items, (None, 4), torch.int32),
        row_starts=(row_starts, (num_rows + 1,), torch.int32),
        slots=(slots, (num_rows,), torch.int32),
        block_tables=(block_tables, (None, None), torch.int32),
        cache_scales=(cache_scales, (2, num_kv_heads), torch.float32),
    )
    group = check_heads(num_heads, num_kv_heads, head_dim)
    if items.shape[0] == 0:
        return
    arguments: tuple[Argument, ...] = (
        *(out, partial, partial_log, arrived, partial_starts),
        *(queries, keys, values, items, row_starts, slots, block_tables, cache_scales),
        *ints(num_heads, block_tables.shape[1], tokens_per_block),
        *(np.float32(scale), np.float32(softcap)),
    )
    num_items = items.shape[0]
    if dtype in _NARROW:
        tiles = 1 if group <= 8 else 2
        name = f"generation_attention<{NAMES[dtype]}, {head_dim}, {tiles}{cache.argument}>"
        stages = 2 if cache_scales is None else 3
        shared = _WARPS * stages * 2 * _TILE * row_bytes(head_dim, cache.dtype)
        at_once = -(-launcher.num_multiprocessors * RESIDENT // num_kv_heads)
        kernel = launcher.kernel(PROGRAM, name, shared)
        grid = min(num_items, at_once), num_kv_heads
        kernel(grid, (_WARPS * 32,), (*arguments, *ints(num_items)), shared)
    else:
        name = f"generation_attention_float<{head_dim}{cache.argument}>"
        kernel = launcher.kernel(FLOAT_PROGRAM, name)
        kernel((num_items, num_kv_heads), (_WARPS * 32,), arguments)


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Query heads for each KV head. ValueError where no kernel has such heads."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"a head dimension of {head_dim} is not among {HEAD_DIMS}")
    if num_heads % num_kv_heads or num_heads // num_kv_heads > MAX_GROUP:
        raise ValueError(
            f"{num_heads} query heads do not divide into groups of up to {MAX_GROUP} for "
            f"{num_kv_heads} KV heads"
        )
    return num_heads // num_kv_heads
