"""Causal attention of rows with several tokens each over the pages, and its plan."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptmanager.cuda.cache_write import CACHES, FP8, HEAD_DIMS, check_cache, row_bytes
from gptmanager.cuda.float_attention import PROGRAM as FLOAT_PROGRAM
from gptmanager.cuda.generation_attention import check_heads
from gptmanager.cuda.launch import NAMES, Argument, Launcher, Program, check_tensors, ints

Ints = npt.NDArray[np.int32]

_THREADS = 128  # as in the .cu
_NARROW = (torch.float16, torch.bfloat16)
PROGRAM = Program(
    "context_attention.cu",
    (
        *(
            f"context_attention<{NAMES[dtype]}, {head_dim}, {softcap}, {sink}{cache}>"
            for dtype in _NARROW
            for head_dim in HEAD_DIMS
            for softcap in ("false", "true")
            for sink in ("false", "true")
            for cache in CACHES
        ),
        *(  # for less shared memory
            f"context_attention<{NAMES[dtype]}, 128, false, false, {NAMES[dtype]}, true>"
            for dtype in _NARROW
        ),
    ),
)


def plan_context(
    num_new: Ints,
    kv_lengths: Ints,
    group: int,
    head_dim: int,
    *,
    window: int | None = None,
    sink: int = 0,
    fp8: bool = False,
) -> Ints:
    """Items int32 `[N, 4]`, longest first: row, first packed query, first and last (excluded) key.

    `num_new` `[R]`: tokens of each row, the last of its `kv_lengths[r]` positions; `group`: query
    heads for each KV head; packed query m is token m / group. `window` and `sink` as in
    `context_attention`; `fp8`: its pages are of 8-bit floats. Rows without tokens have no items.
    Once a step, for all layers.
    """
    if not num_new.size:  # most steps, which have no context
        return np.zeros((0, 4), dtype=np.int32)
    tile = _queries(head_dim, window, sink, fp8)
    counts = -(-num_new.astype(np.int64) * group // tile)
    rows = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    first_query = number * tile
    positions = (kv_lengths - num_new)[rows]
    first = np.zeros_like(positions)
    if window is not None:
        first = np.maximum(positions + first_query // group + 1 - window, 0)
    after = np.minimum(first_query + tile, num_new[rows] * group)
    last = positions + (after - 1) // group + 1
    items = np.stack([rows, first_query, first, last], axis=1).astype(np.int32)
    return np.ascontiguousarray(items[np.argsort(first - last, kind="stable")])


def context_attention(
    launcher: Launcher,
    out: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    items: Tensor,
    row_starts: Tensor,
    kv_lengths: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sink: int = 0,
    softcap: float = 0.0,
    cache_scales: Tensor | None = None,
) -> None:
    """`out[t] = softmax(score(queries[t] @ keys^T * scale)) @ values` over what a token sees.

    Token i of a row with n tokens and KV length m stands at position m - n + i and sees the
    positions up to there; with `window`, the last `window` of them and the first `sink`; pages that
    hold neither may be gone. score(x) = x, or softcap * tanh(x / softcap). `queries`, `out`
    `[T, H, D]`; `keys`, `values` `[P, K, B, D]`, one layer's; one dtype of float32, float16,
    bfloat16; D one of HEAD_DIMS; H / K at most MAX_GROUP. With `cache_scales` `[2, K]` float32, of
    keys, then of values, `keys` and `values` are float8_e4m3fn: element * scale. `items` `[N, 4]`:
    of `plan_context`, for the same. `row_starts` `[R + 1]`, `kv_lengths` and `slots` `[R]`,
    `block_tables` `[slots, blocks]`; all int32. ValueError for other tensors.
    """
    num_heads, head_dim = queries.shape[1:]
    num_kv_heads, tokens_per_block = keys.shape[1:3]
    num_rows, dtype = slots.shape[0], queries.dtype
    pages = (keys.shape[0], num_kv_heads, tokens_per_block, head_dim)
    cache = check_cache(dtype, keys, cache_scales)
    check_tensors(
        out=(out, (queries.shape[0], num_heads, head_dim), dtype),
        queries=(queries, (None, num_heads, head_dim), dtype),
        keys=(keys, pages, cache.dtype),
        values=(values, pages, cache.dtype),
        items=(items, (None, 4), torch.int32),
        row_starts=(row_starts, (num_rows + 1,), torch.int32),
        kv_lengths=(kv_lengths, (num_rows,), torch.int32),
        slots=(slots, (num_rows,), torch.int32),
        block_tables=(block_tables, (None, None), torch.int32),
        cache_scales=(cache_scales, (2, num_kv_heads), torch.float32),
    )
    check_heads(num_heads, num_kv_heads, head_dim)
    if items.shape[0] == 0:
        return
    arguments: tuple[Argument, ...] = (
        *(out, queries, keys, values, items, row_starts, kv_lengths, slots, block_tables),
        cache_scales,
        *ints(
            num_heads, block_tables.shape[1], tokens_per_block, window or 0, sink if window else 0
        ),
        *(np.float32(scale), np.float32(softcap)),
    )
    grid, fp8 = (items.shape[0], num_kv_heads), cache.dtype is FP8
    num_queries = _queries(head_dim, window, sink, fp8)
    if dtype not in _NARROW:
        name = f"context_attention_float<{head_dim}{cache.argument}>"
        kernel = launcher.kernel(FLOAT_PROGRAM, name)
        kernel(grid, (_THREADS,), (*arguments, *ints(num_queries)))
        return
    capped, sinks = str(softcap > 0).lower(), str(bool(window and sink)).lower()
    kind = f"{NAMES[dtype]}, {head_dim}, {capped}, {sinks}{cache.argument}"
    own, other = row_bytes(head_dim, dtype), row_bytes(head_dim, cache.dtype)
    tokens = _tokens(head_dim, softcap)
    shared = num_queries * own + 2 * tokens * (own + other)
    if shared > launcher.max_shared_mem and head_dim == 128:
        kind += f", {NAMES[dtype]}, true"
        shared -= tokens * (own + other)  # half of either tile
    launcher.kernel(PROGRAM, f"context_attention<{kind}>", shared)(
        grid, (_THREADS,), arguments, shared
    )


def _queries(head_dim: int, window: int | None, sink: int, fp8: bool) -> int:
    """Packed queries of an item."""
    return 64 if head_dim > 128 or (head_dim == 128 and (window and sink or fp8)) else 128


def _tokens(head_dim: int, softcap: float) -> int:
    """Of a tile of keys and values."""
    return 32 if head_dim > 128 or (head_dim == 128 and softcap) else 64
