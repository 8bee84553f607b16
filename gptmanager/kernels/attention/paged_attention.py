"""Paged attention on the CPU: the loops that each thread runs.

Context, chunks and generation use the same code. A row of a tile is a pair of a token and a query
head. All rows of a tile belong to one sequence and share a KV head: up to `TILE_ROWS` rows, or all
rows of one token if these are more. A tile reads each page of the KV head once for all its rows.
Positions are read in spans of `span_of(page_tokens)` positions, which begin at multiples of their
size. Each span updates the maximum of an online softmax once, and masked positions have a weight of
exactly zero. So the arithmetic of a query does not depend on the rest of the tile, the chunk or the
batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gptmanager.kernels.activations.activation_loops import soft_capped
from gptmanager.kernels.attention.attention_task import TASK, areas_at, padded, span_of, tile_tokens
from gptmanager.kernels.gemm.small_matmul import multiply, transpose
from gptmanager.kernels.simd.dtypes import FLOAT32, load_as, store_as
from gptmanager.kernels.simd.lanes import (
    LANES,
    claim,
    compact,
    exp2,
    fma,
    get,
    get_int,
    keep_lanes,
    larger,
    load,
    loop,
    max_lanes,
    prefetch,
    put,
    splat,
    store,
    sum_lanes,
    task_at,
)
from gptmanager.kernels.simd.threads import NEXT_PART, NEXT_THREAD

LOG2_E = 1.4426950408889634
LOWEST = np.float32(-3.0e38)
LINE_BYTES = 64
ZERO, ONE = np.float32(0.0), np.float32(1.0)


@loop
def _first_seen(t: Any, position: int) -> int:
    """Return the first position in the window of a query at `position`; it may be negative."""
    if t.chunked:
        return int(position // t.window * t.window)
    return int(position + 1 - t.window)


@loop
def _seen(t: Any, position: int, at: int, until: int) -> tuple[int, int]:
    """Return low and high: the query at `position` sees columns low to high - 1 of a span.

    Column 0 of the span is position `at`. The sink is the first `t.sink` positions. `until` is the
    end of the sink while the sink is read, and 0 otherwise.
    """
    high = min(span_of(t.page_tokens), position + 1 - at)
    if until:
        return 0, min(high, until - at)
    return (max(0, t.sink - at, _first_seen(t, position) - at) if t.window else 0), high


@loop
def _maximum(scores: int, low: int, high: int) -> Any:
    best = splat(LOWEST)
    for column in range(low // LANES * LANES, high, LANES):
        value = load(scores, column)
        if column < low or column + LANES > high:
            value = keep_lanes(value, low - column, high - column, LOWEST)
        best = larger(best, value)
    return max_lanes(best)


@loop
def _weigh(scores: int, columns: int, low: int, high: int, maximum: float) -> Any:
    """Replace a row's scores by weights, 0 where masked; return the weights' sums by lane."""
    total = splat(ZERO)
    for column in range(0, columns, LANES):
        weight = splat(ZERO)
        if low < column + LANES and column < high:
            weight = exp2(load(scores, column) - splat(maximum))
            if column < low or column + LANES > high:
                weight = keep_lanes(weight, low - column, high - column, ZERO)
        store(scores, column, weight)
        total = total + weight
    return total


@loop
def _softmax(
    t: Any, areas: tuple[int, ...], rows: int, position: int, at: int, columns: int, until: int
) -> None:
    """Replace a span's scores by weights; rescale earlier sums and outputs to the new maxima."""
    compact()
    _, mixed, sums, highest, risen, shrink, scores, _ = areas
    group, wide = t.num_heads // t.num_kv_heads, padded(t.head_dim)
    stride = padded(span_of(t.page_tokens)) + LANES
    for row in range(rows):
        low, high = _seen(t, position + row // group, at, until)
        top = get(highest, row)
        if low < high:
            top = max(top, _maximum(scores + 4 * row * stride, low, high))
        put(risen, row, top)
    for row in range(0, rows, LANES):
        store(shrink, row, exp2(load(highest, row) - load(risen, row)))
        store(highest, row, load(risen, row))
    for row in range(rows):
        low, high = _seen(t, position + row // group, at, until)
        total = _weigh(scores + 4 * row * stride, columns, low, high, get(highest, row))
        factor = splat(get(shrink, row))
        store(sums, row * LANES, fma(load(sums, row * LANES), factor, total))
        for d in range(row * wide, row * wide + wide, LANES):
            store(mixed, d, load(mixed, d) * factor)


@loop
def _cap(t: Any, scores: int, rows: int, columns: int, stride: int) -> None:
    """Limit scores by the soft cap.

    At `scores`, each score is multiplied by log2(e), before and after this call.
    """
    compact()
    to_natural, cap = splat(np.float32(1 / LOG2_E)), t.softcap
    for row in range(rows):
        for column in range(0, columns, LANES):
            capped = soft_capped(load(scores, row * stride + column) * to_natural, cap)
            store(scores, row * stride + column, capped * splat(np.float32(LOG2_E)))


@loop
def _page(t: Any, table: int, position: int, kv_head: int) -> int:
    """Return the index, in keys and in values, of the page that begins at `position`."""
    size = t.tokens_per_block
    place = get_int(table, position // size) * t.block_stride
    return int(place + (kv_head * size + position % size) * t.head_dim)


@loop
def _transpose_keys(t: Any, transposed: int, keys: int, num_tokens: int) -> None:
    """Transpose keys `[num_tokens, head_dim]` to `[padded head_dim, padded page_tokens]`."""
    compact()
    dim, stride = t.head_dim, padded(t.page_tokens)
    square = transposed + 4 * padded(dim) * stride
    for token in range(0, num_tokens, LANES):
        for d in range(0, dim, LANES):
            tokens = min(LANES, num_tokens - token)
            for n in range(LANES):
                row = splat(ZERO)
                if n < tokens:
                    row = load_as(t.page_dtype, keys, (token + n) * dim + d, dim - d)
                store(square, n * LANES, row)
            transpose(transposed + 4 * (d * stride + token), stride, square, LANES)


@loop
def _prefetch(t: Any, address: int, index: int, count: int) -> None:
    """Prefetch the cache lines of `count` elements from `index` on."""
    for byte in range(0, count * t.item_bytes, LINE_BYTES):
        prefetch(address + index * t.item_bytes + byte, 0)


@loop
def _prefetch_keys(t: Any, table: int, start: int, stop: int, kv_head: int) -> None:
    compact()
    size = t.page_tokens
    for at in range(start, stop, size):
        page, count = _page(t, table, at, kv_head), min(size, stop - at)
        if t.token_major:
            _prefetch(t, t.keys, page, count * t.head_dim)
            continue
        for d in range(t.head_dim):
            _prefetch(t, t.keys, page + d * size, count)


@loop
def _prefetch_values(t: Any, table: int, start: int, stop: int, kv_head: int) -> None:
    compact()
    size = t.page_tokens
    for at in range(start, stop, size):
        count = min(size, stop - at) * t.head_dim
        _prefetch(t, t.values, _page(t, table, at, kv_head), count)


@loop
def _begin(t: Any, areas: tuple[int, ...], rows: int, token: int, kv_head: int) -> None:
    compact()
    queries, mixed, sums, highest = areas[:4]
    group, dim, wide = t.num_heads // t.num_kv_heads, t.head_dim, padded(t.head_dim)
    factor = splat(np.float32(t.scale * LOG2_E))
    for row in range(rows):
        head = (token + row // group) * t.num_heads + kv_head * group + row % group
        for d in range(0, dim, LANES):
            value = load_as(t.dtype, t.q, head * dim + d, dim - d)
            store(queries, row * wide + d, value * factor)
            store(mixed, row * wide + d, splat(ZERO))
        store(sums, row * LANES, splat(ZERO))
        put(highest, row, LOWEST)
        if t.sinks:  # a head's sink score has no value vector: it only adds to the sum
            own = sum_lanes(load_as(t.sink_dtype, t.sinks, kv_head * group + row % group, 1))
            put(sums, row * LANES, ONE)
            put(highest, row, own * np.float32(LOG2_E))


@loop
def _finish(t: Any, areas: tuple[int, ...], rows: int, token: int, kv_head: int) -> None:
    compact()
    _, mixed, sums = areas[:3]
    group, dim, wide = t.num_heads // t.num_kv_heads, t.head_dim, padded(t.head_dim)
    for row in range(rows):
        head = (token + row // group) * t.num_heads + kv_head * group + row % group
        factor = splat(ONE / sum_lanes(load(sums, row * LANES)))
        for d in range(0, dim, LANES):
            value = load(mixed, row * wide + d) * factor
            store_as(t.dtype, t.result, head * dim + d, value, dim - d)


@loop
def _mix(
    t: Any,
    areas: tuple[int, ...],
    rows: int,
    position: int,
    seen_from: int,
    end: int,
    table: int,
    kv_head: int,
    until: int,
) -> None:
    """Add the attention over positions `seen_from` to `end` (excluded) to a tile's outputs.

    The tile's first token is at `position`. `_seen` explains `until`.
    """
    compact()
    queries, mixed, scores, transposed = areas[0], areas[1], areas[6], areas[7]
    dim, size, wide = t.head_dim, t.page_tokens, padded(t.head_dim)
    span = span_of(size)
    stride = padded(span) + LANES
    first = seen_from // size * size
    for at in range(seen_from // span * span, end, span):
        start, stop = max(at, first), min(at + span, end)
        # Pages are prefetched one matmul ahead of their use: a span's values while its scores are
        # computed, the next span's keys (or the next head's first keys) while values are added.
        _prefetch_values(t, table, start, stop, kv_head)
        for here in range(start, stop, size):
            keys = t.keys + t.item_bytes * _page(t, table, here, kv_head)
            to, columns = scores + 4 * (here - at), min(size, padded(stop - here))
            if t.token_major:
                in_block = t.tokens_per_block - here % t.tokens_per_block
                _transpose_keys(t, transposed, keys, min(columns, in_block))
                right = padded(size)
                own = FLOAT32, to, stride, queries, wide, transposed, right
            else:
                own = t.page_dtype, to, stride, queries, wide, keys, size
            multiply(*own, rows, columns, dim, False)
        if t.softcap:
            _cap(t, scores, rows, stop - at, stride)
        _softmax(t, areas, rows, position, at, stop - at, until)
        if stop < end:
            _prefetch_keys(t, table, stop, min(stop + span, end), kv_head)
        elif kv_head + 1 < t.num_kv_heads:
            next_stop = min(seen_from // span * span + span, end)
            _prefetch_keys(t, table, first, next_stop, kv_head + 1)
        for here in range(start, stop, size):
            low, high = max(here, seen_from), min(here + size, stop)
            place = _page(t, table, here, kv_head) + (low - here) * dim
            weights, values = scores + 4 * (low - at), t.values + t.item_bytes * place
            own = t.page_dtype, mixed, wide, weights, stride, values, dim
            multiply(*own, rows, dim, high - low, True)


@loop
def _attend(
    t: Any, areas: tuple[int, ...], token: int, position: int, end: int, table: int, kv_head: int
) -> None:
    """Compute a KV head's attention for the tokens at `position` to `end` (excluded).

    `token` is the index of the first of these tokens in `t.q`.
    """
    compact()
    rows = (end - position) * (t.num_heads // t.num_kv_heads)
    seen_from = max(0, _first_seen(t, position)) if t.window else 0
    _begin(t, areas, rows, token, kv_head)
    if t.sink and t.window:
        until = min(t.sink, end)
        _mix(t, areas, rows, position, 0, until, table, kv_head, until)
        seen_from = max(t.sink, seen_from)
    if seen_from < end:
        _mix(t, areas, rows, position, seen_from, end, table, kv_head, 0)
    _finish(t, areas, rows, token, kv_head)


@loop
def _tile_at(t: Any, row: int, token: int) -> tuple[int, int, int]:
    """Return the first position, the end and the cost per KV head of a tile.

    `token` is the index of the tile's first token, which belongs to the sequence `row`.
    """
    group = t.num_heads // t.num_kv_heads
    row_stop = get_int(t.row_starts, row + 1)
    count = min(tile_tokens(group), row_stop - token)
    position = get_int(t.kv_lengths, row) - row_stop + token
    end = position + count
    read = min(end, t.sink + t.window + count) if t.window else end
    # Reading a page costs about as much as four rows of arithmetic on it.
    return position, end, (read + LANES) * (count * group + 4)


@loop
def _total_cost(t: Any, tokens: int) -> int:
    total = 0
    for row in range(t.num_rows):
        for token in range(get_int(t.row_starts, row), get_int(t.row_starts, row + 1), tokens):
            total += _tile_at(t, row, token)[2]
    return int(total * t.num_kv_heads)


def attention(address: int) -> None:
    """Compute the parts of an `AttentionTask` that this thread claims.

    The pairs of a tile and a KV head are divided into `num_parts` parts of about equal cost.
    """
    t = task_at(address, TASK)
    tokens = tile_tokens(t.num_heads // t.num_kv_heads)
    total = _total_cost(t, tokens)
    areas = areas_at(t, t.scratch + claim(address, NEXT_THREAD) * t.scratch_bytes)
    done, begin, finish = 0, 0, 0
    for row in range(t.num_rows):
        table = t.block_tables + 4 * get_int(t.slots, row) * t.table_width
        for token in range(get_int(t.row_starts, row), get_int(t.row_starts, row + 1), tokens):
            position, end, cost = _tile_at(t, row, token)
            for kv_head in range(t.num_kv_heads):
                while done >= finish:
                    part = claim(address, NEXT_PART)
                    if part >= t.num_parts:
                        return
                    begin = total * part // t.num_parts
                    finish = total * (part + 1) // t.num_parts
                if done >= begin:
                    _attend(t, areas, token, position, end, table, kv_head)
                done += cost
