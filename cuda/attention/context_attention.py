"""Causal attention over KV cache pages for rows with any number of new tokens, and its plan."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptmanager.cuda.attention.float_attention import PROGRAM as FLOAT_PROGRAM
from gptmanager.cuda.attention.float_attention import float_kernel
from gptmanager.cuda.attention.paged_kernels import (
    CACHES,
    HEAD_DIMS,
    NARROW,
    check_attention,
    row_bytes,
    sinks_arguments,
)
from gptmanager.cuda.attention.warpgroup_attention import PROGRAM as WARPGROUP_PROGRAM
from gptmanager.cuda.attention.warpgroup_attention import shared_memory, takes, warpgroup_kernel
from gptmanager.cuda.device.launch import NAMES, Argument, Launcher, Program, ints
from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages, RowSpans

Ints = npt.NDArray[np.int32]

_THREADS = 128  # equal to that in the .cu


def _name(kind: str, dtype: torch.dtype, cache: str, is_small: bool, sinks: bool) -> str:
    last = f", {NAMES[dtype]}, true" if is_small else cache
    if sinks:
        last = sinks_arguments(dtype, cache, str(is_small).lower())
    return f"context_attention<{kind}{last}>"


PROGRAM = Program(
    "attention/context_attention.cu",
    (
        *(
            _name(f"{NAMES[dtype]}, {head_dim}, {softcap}, {sink}", dtype, cache, False, False)
            for dtype in NARROW
            for head_dim in HEAD_DIMS
            for softcap in ("false", "true")
            for sink in ("false", "true")
            for cache in CACHES
        ),
        *(  # variants with less shared memory
            _name(f"{NAMES[dtype]}, 128, false, false", dtype, "", True, sinks)
            for sinks in (False, True)
            for dtype in NARROW
        ),
        *(  # variants for heads with sinks
            _name(f"{NAMES[dtype]}, {head_dim}, false, {sink}", dtype, cache, False, True)
            for dtype in NARROW
            for head_dim in HEAD_DIMS
            for sink in ("false", "true")
            for cache in CACHES
        ),
    ),
    dependent=True,
    at_once=1,  # each kernel takes long to compile, and a model needs few of the kernels
)


def plan_context(num_new: Ints, kv_lengths: Ints, shape: AttentionShape) -> Ints:
    """Return the work items for `context_attention`, int32 `[N, 4]`, most keys first.

    The columns are the item's row, the item's first packed query, and the begin and end (excluded)
    of the key positions in the windows of the item's queries. All queries also see the first
    `shape.sink` positions. Row r has `kv_lengths[r]` positions, and its last `num_new[r]` positions
    are new tokens. The query heads of a KV head are packed token by token: packed query m belongs
    to new token m // group. Rows without new tokens have no items. The items serve all layers of a
    step that have the same heads, window and sink.
    """
    if not num_new.size:  # most steps have no context rows
        return np.zeros((0, 4), dtype=np.int32)
    group, tile = shape.group, _queries(shape)
    counts = -(-num_new.astype(np.int64) * group // tile)
    rows = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    first_query = number * tile
    positions = (kv_lengths - num_new)[rows]
    first = np.maximum(shape.first_seen(positions + first_query // group), 0)
    after = np.minimum(first_query + tile, num_new[rows] * group)
    last = positions + (after - 1) // group + 1
    items = np.stack([rows, first_query, first, last], axis=1).astype(np.int32)
    return np.ascontiguousarray(items[np.argsort(first - last, kind="stable")])


def max_num_context_items(num_rows: int, num_tokens: int, shape: AttentionShape) -> int:
    """Return an upper bound of the number of items from `plan_context` for `num_rows` rows.

    `num_tokens` is the total number of new tokens of these rows. A row has at most as many items
    as new tokens, and at most one item that is not full.
    """
    return min(num_tokens, num_rows + num_tokens * shape.group // _queries(shape))


def context_attention(
    launcher: Launcher,
    out: Tensor,
    queries: Tensor,
    pages: Pages,
    rows: RowSpans,
    items: Tensor,
    shape: AttentionShape,
    sinks: Tensor | None = None,
) -> None:
    """Compute `out[t] = softmax(scores of queries[t] and the keys) @ values` over visible keys.

    Pages without a visible key are not read, and may already be freed. `queries` and `out`
    `[T, H, D]` have the same dtype: float32, float16 or bfloat16. D is one of HEAD_DIMS. A KV head
    has at most MAX_GROUP query heads. Pages have the same dtype, or float8_e4m3fn. `items` int32
    `[N, 4]` is from `plan_context`, for the same `shape`. `sinks` `[H]`, of the queries' dtype, has
    a score without a value for each head; pass it iff `shape.sinks`. Raises ValueError otherwise.
    """
    cache = check_attention(
        *(out, queries, pages, rows, shape, sinks),
        items=(items, (None, 4), torch.int32),
        kv_lengths=(rows.kv_lengths, rows.slots.shape, torch.int32),
    )
    if items.shape[0] == 0:
        return
    num_heads, num_kv_heads, head_dim = shape[:3]
    window, dtype = shape.window or 0, queries.dtype
    window, sink = -window if shape.chunked else window, shape.sink if window else 0
    arguments: tuple[Argument, ...] = (
        *(out, queries, cache.keys, pages.values, items, *rows[:4], pages.cache_scales),
        *ints(num_heads, rows.block_tables.shape[1], pages.values.shape[2], window, sink),
        *(np.float32(shape.scale), np.float32(shape.softcap)),
    )
    own_sinks = () if sinks is None else (sinks,)
    grid, num_queries = (items.shape[0], num_kv_heads), _queries(shape)
    if dtype not in NARROW:
        name = float_kernel("context", head_dim, cache.argument, shape.sinks)
        kernel = launcher.kernel(FLOAT_PROGRAM, name)
        kernel(grid, (_THREADS,), (*arguments, *ints(num_queries), *own_sinks))
        return
    arguments += own_sinks
    capped, has_sink = (str(bool(it)).lower() for it in (shape.softcap > 0, sink))
    kind = f"{NAMES[dtype]}, {head_dim}, {capped}, {has_sink}"
    if takes(launcher, shape, dtype):
        shared, name = (
            shared_memory(num_queries, head_dim),
            warpgroup_kernel(kind, dtype, shape.sinks),
        )
        kernel = launcher.kernel(WARPGROUP_PROGRAM, name, shared)
        kernel(grid, (2 * num_queries,), arguments, shared)
        return
    own, other = row_bytes(head_dim, dtype), row_bytes(head_dim, cache.dtype)
    tokens = _tokens(shape)
    shared = num_queries * own + 2 * tokens * (own + other)
    is_small = shared > launcher.max_shared_mem and head_dim == 128
    if is_small:
        shared -= tokens * (own + other)  # half of each tile
    name = _name(kind, dtype, cache.argument, is_small, shape.sinks)
    kernel = launcher.kernel(PROGRAM, name, shared)
    kernel(grid, (_THREADS,), arguments, shared)


def _queries(shape: AttentionShape) -> int:
    """Return the number of packed queries of a full item."""
    less = shape.head_dim == 128 and (shape.fp8 or (shape.window and shape.sink))
    return 64 if shape.head_dim > 128 or less else 128


def _tokens(shape: AttentionShape) -> int:
    """Return the number of positions in a tile of keys and values."""
    return 32 if shape.head_dim > 128 or (shape.head_dim == 128 and shape.softcap) else 64
