"""Low-rank adapters for a step's tokens: the compiled loops of `Kernels.add_adapters`.

Threads claim parts of the work. A part is a run: tokens of one adapter, adjacent or not. First
h = A x is computed for all modules. Then B h is added to one span of columns after another, and B
is transposed once for all tokens of the run. The order in which the terms of an element are added
does not depend on parts and spans. An element of A x is the sum of sixteen partial sums along x. An
element of the result is one sum, which begins with the element's old value and adds the terms of
B h along h, one module after another.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gptmanager.kernels.gemm.small_matmul import multiply, transpose
from gptmanager.kernels.lora.adapter_intrinsics import (
    DEPTH,
    NAMES,
    RANKS,
    RANKS_OF_ONE,
    ROWS,
    dots,
    expanded,
)
from gptmanager.kernels.simd.dtypes import BFLOAT16, FLOAT32, load_as, store_as
from gptmanager.kernels.simd.lanes import LANES, claim, get_long, load, loop, store, task_at
from gptmanager.kernels.simd.pairs import has_pairs
from gptmanager.kernels.simd.threads import NEXT_PART, NEXT_THREAD, task_fields

BLOCK = 32  # maximum number of tokens in a run
AHEAD = 8192  # bytes between the row of B that is read and the bytes that are prefetched
SPAN = 256  # columns of the result that are computed together
# Floats between the sums of adjacent tokens: a block of LANES may extend beyond a span.
STRIDE = SPAN + LANES
# Numbers of floats in a thread's scratch: a square of lanes to transpose, a transposed span of B,
# and the sums of a run. After these areas are the rows of x that are multiplied at a time, then h.
SQUARE, TRANSPOSED, SUMS = LANES * LANES, LANES * STRIDE, BLOCK * STRIDE
FIXED = SQUARE + TRANSPOSED + SUMS


class AdapterTask(ctypes.Structure):
    """Addresses, and sizes in elements (`scratch_bytes` in bytes).

    `order` int64 has the indices of the tokens that have an adapter, sorted by adapter. `runs`
    int64 `[num_parts, 3]` has, for each run, the index in `order` of its first token, the index
    after its last token, and the adapter's slot in `table`. A run has at most BLOCK tokens.
    `modules` int64 `[num_modules, 4]` has the fields of `AdapterModule`. `h_stride` is the number
    of floats between the h of two adjacent tokens. It is at least the largest rank, and a multiple
    of RANKS_OF_ONE. `dtype` is the dtype of `result`. If `pairs` is set, the pool is bfloat16, and
    A is multiplied in pairs of elements if x is bfloat16 too.
    """

    _fields_ = task_fields(
        "result x scratch layer dtype x_dtype columns order runs pool table modules num_modules"
        " width slot_stride layer_stride h_stride pool_dtype scratch_bytes pairs"
    )


ADAPTER_TASK = np.dtype(AdapterTask)

_several = {name: dots(ROWS, RANKS, name) for name in NAMES}
_one = {name: dots(1, RANKS_OF_ONE, name) for name in NAMES}
_several_float32, _one_float32 = _several["float32"], _one["float32"]
_several_bfloat16, _one_bfloat16 = _several["bfloat16"], _one["bfloat16"]
_several_float16 = _several.get("float16", _several_bfloat16)  # the default is never called
_one_float16 = _one.get("float16", _one_bfloat16)
_several_pairs, _one_pairs = _several_bfloat16, _one_bfloat16
if has_pairs():  # without pairs, no task has `pairs` set, and these two are never called
    _several_pairs = dots(ROWS, RANKS, "bfloat16 pairs")
    _one_pairs = dots(1, RANKS_OF_ONE, "bfloat16 pairs")
_thirty_two_float32, _sixteen_float32 = expanded(2, "float32"), expanded(1, "float32")
_thirty_two_bfloat16, _sixteen_bfloat16 = expanded(2, "bfloat16"), expanded(1, "bfloat16")


def scratch_floats(width: int, num_modules: int, h_stride: int) -> int:
    """Return how many float32 of scratch a thread needs, with space for one h after the last."""
    return FIXED + ROWS * (width + LANES) + (num_modules * BLOCK + 1) * h_stride


@loop
def _module(t: Any, slot: int, module: int) -> Any:
    """Return the index in the pool at which A of a module begins, and the module's rank."""
    number = get_long(t.modules, 4 * module)
    entry = slot * t.slot_stride + t.layer * t.layer_stride + 2 * number
    return get_long(t.table, entry), get_long(t.table, entry + 1)


@loop
def _following(t: Any, slot: int, module: int) -> int:
    """Return the address to prefetch after A of a module: the next A, or the first B."""
    size = 4 if t.pool_dtype == FLOAT32 else 2
    if module + 1 < t.num_modules:
        return int(t.pool + size * _module(t, slot, module + 1)[0])
    offset, rank = _module(t, slot, 0)
    return int(t.pool + size * (offset + rank * t.width))


@loop
def _rows_of(t: Any, to: int, place: int, rows: int, dtype: int) -> int:
    """Return the address of the rows of x of `rows` tokens, contiguous and in `dtype`.

    The rows are copied to `to` unless the tokens are adjacent and x has this dtype.
    """
    first, width, size = get_long(t.order, place), t.width, 4 if dtype == FLOAT32 else 2
    if t.x_dtype == dtype and get_long(t.order, place + rows - 1) - first == rows - 1:
        return int(t.x + size * first * width)
    for row in range(rows):
        start = get_long(t.order, place + row) * width
        for i in range(0, width, LANES):
            value = load_as(t.x_dtype, t.x, start + i, width - i)
            store_as(dtype, to, row * width + i, value, width - i)
    return to


@loop
def _shrink(t: Any, scratch: int, first: int, stop: int, slot: int) -> None:
    """Compute `h = A x` for each module and all tokens of a run."""
    xs = scratch + 4 * FIXED
    hs, width, stride = xs + 4 * ROWS * (t.width + LANES), t.width, t.h_stride
    dtype, size, token = t.pool_dtype, 4 if t.pool_dtype == FLOAT32 else 2, first
    pairs = t.pairs and t.x_dtype == BFLOAT16
    while token < stop:
        rows = min(ROWS, stop - token)
        if rows == 2 and ROWS > 2:
            rows = 1  # half of a tile of ROWS rows would be wasted on repeated rows
        x = _rows_of(t, xs, token, rows, BFLOAT16 if pairs else FLOAT32)
        for module in range(t.num_modules):
            offset, rank = _module(t, slot, module)
            h = hs + 4 * (module * BLOCK + token - first) * stride
            behind, ranks = _following(t, slot, module), RANKS_OF_ONE if rows == 1 else RANKS
            for d in range(0, rank, ranks):
                a, to, last = t.pool + size * (offset + d * width), h + 4 * d, rank - d - 1
                ahead = a + size * ranks * width if last >= ranks else behind
                if rows == 1:
                    if pairs:
                        _one_pairs(to, stride, x, a, width, 0, last, ahead)
                    elif dtype == FLOAT32:
                        _one_float32(to, stride, x, a, width, 0, last, ahead)
                    elif dtype == BFLOAT16:
                        _one_bfloat16(to, stride, x, a, width, 0, last, ahead)
                    else:
                        _one_float16(to, stride, x, a, width, 0, last, ahead)
                elif pairs:
                    _several_pairs(to, stride, x, a, width, rows - 1, last, ahead)
                elif dtype == FLOAT32:
                    _several_float32(to, stride, x, a, width, rows - 1, last, ahead)
                elif dtype == BFLOAT16:
                    _several_bfloat16(to, stride, x, a, width, rows - 1, last, ahead)
                else:
                    _several_float16(to, stride, x, a, width, rows - 1, last, ahead)
        token += rows


@loop
def _transpose(dtype: int, scratch: int, b: int, count: int, rank: int, depth: int) -> None:
    """Transpose `depth` (<= LANES) elements of each of `count` (<= SPAN) rows of B to scratch.

    `b` is the address of the first of these elements.
    """
    to, size = scratch + 4 * SQUARE, 4 if dtype == FLOAT32 else 2
    for row in range(0, count, LANES):
        for lane in range(LANES):
            own = b + size * min(row + lane, count - 1) * rank
            store(scratch, lane * LANES, load_as(dtype, own, 0, depth))
        transpose(to + 4 * row, STRIDE, scratch, LANES)


@loop
def _add_columns(
    t: Any, scratch: int, to: int, b: int, h: int, rows: int, count: int, rank: int
) -> None:
    """Add B h to `count` columns of the sums. The rows of B for these columns begin at `b`.

    Tiles of B that fill the registers are transposed there. The rest is transposed in scratch.
    """
    dtype, stride = t.pool_dtype, t.h_stride
    size = 4 if dtype == FLOAT32 else 2
    depth, columns = rank // DEPTH * DEPTH, count // LANES * LANES
    if depth == 0 or (dtype != FLOAT32 and dtype != BFLOAT16):
        depth = columns = 0
    column = 0
    while column < columns:
        sums, start, wide = to + 4 * column, b + size * rank * column, columns - column > LANES
        for d in range(0, depth, DEPTH):
            own, hd = start + size * d, h + 4 * d
            if wide:
                behind = start + AHEAD + 2 * LANES * size * d
                if dtype == FLOAT32:
                    _thirty_two_float32(sums, STRIDE, own, rank, hd, stride, rows, behind)
                else:
                    _thirty_two_bfloat16(sums, STRIDE, own, rank, hd, stride, rows, behind)
            elif dtype == FLOAT32:
                _sixteen_float32(sums, STRIDE, own, rank, hd, stride, rows, own)
            else:
                _sixteen_bfloat16(sums, STRIDE, own, rank, hd, stride, rows, own)
        column += 2 * LANES if wide else LANES
    for start, end, first in ((0, columns, depth), (columns, count, 0)):
        for d in range(first, rank if start < end else 0, LANES):
            part, own = min(LANES, rank - d), b + size * (rank * start + d)
            _transpose(dtype, scratch, own, end - start, rank, part)
            left, right = h + 4 * d, scratch + 4 * SQUARE
            multiply(
                *(FLOAT32, to + 4 * start, STRIDE, left, stride, right, STRIDE),
                *(rows, end - start, part, True),
            )


@loop
def _expand(t: Any, scratch: int, first: int, stop: int, slot: int, low: int, high: int) -> None:
    """Add B h of all modules to the columns `low` to `high` (excluded) of a run's result."""
    sums = scratch + 4 * (SQUARE + TRANSPOSED)
    hs = scratch + 4 * (FIXED + ROWS * (t.width + LANES))
    size, rows, is_read = 4 if t.pool_dtype == FLOAT32 else 2, stop - first, False
    for module in range(t.num_modules):
        offset, rank = _module(t, slot, module)
        column = get_long(t.modules, 4 * module + 1)
        begin, end = max(low, column), min(high, column + get_long(t.modules, 4 * module + 2))
        if rank == 0 or begin >= end:
            continue
        if not is_read:
            is_read = True
            for row in range(rows):
                start = get_long(t.order, first + row) * t.columns + low
                for i in range(0, high - low, LANES):
                    value = load_as(t.dtype, t.result, start + i, high - low - i)
                    store(sums, row * STRIDE + i, value)
        b = t.pool + size * (offset + rank * (t.width + begin - column))
        h, to = hs + 4 * module * BLOCK * t.h_stride, sums + 4 * (begin - low)
        _add_columns(t, scratch, to, b, h, rows, end - begin, rank)
    if is_read:
        for row in range(rows):
            start = get_long(t.order, first + row) * t.columns + low
            for i in range(0, high - low, LANES):
                value = load(sums, row * STRIDE + i)
                store_as(t.dtype, t.result, start + i, value, high - low - i)


def add(address: int) -> None:
    """Compute `result += B A x` for the runs of tokens that this thread claims."""
    t = task_at(address, ADAPTER_TASK)
    scratch = t.scratch + claim(address, NEXT_THREAD) * t.scratch_bytes
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        first, stop = get_long(t.runs, 3 * part), get_long(t.runs, 3 * part + 1)
        slot = get_long(t.runs, 3 * part + 2)
        _shrink(t, scratch, first, stop, slot)
        for low in range(0, t.columns, SPAN):
            _expand(t, scratch, first, stop, slot, low, min(low + SPAN, t.columns))
        part = claim(address, NEXT_PART)
