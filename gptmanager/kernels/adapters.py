"""Low-rank adapters on a step's tokens: what one thread does of `Kernels.add_adapters`.

First `shrink` makes h = A x of each token and module, then `expand` adds B h. A part of either is
a block of tokens, with a module or with a span of columns. Tokens of one adapter that follow each
other in a block share what is read of it. The sum of an element never depends on these: of A x it
is sixteen chains along x, and their sum; of B h one chain along h, that begins with the result and
takes one module after another.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from gptmanager.kernels.dtypes import (
    BFLOAT16,
    FLOAT32,
    HAS_FLOAT16,
    itemsize,
    load_as,
    load_at,
    store_as,
)
from gptmanager.kernels.lanes import (
    LANES,
    LONG,
    VECTOR,
    at,
    claim,
    get,
    get_int,
    get_long,
    load,
    load_masked,
    long,
    loop,
    multiply_add,
    nothing,
    put,
    store,
    task_at,
    word,
)
from gptmanager.kernels.products import WIDE, multiply, repeat, transpose
from gptmanager.kernels.threads import NEXT_PART, NEXT_THREAD, task_fields

BLOCK = 32  # tokens of a part
SPAN = 256  # columns of a part
STRIDE = SPAN + LANES  # of a token's sums, which are computed in whole sixteens
ROWS, RANKS = 2 * WIDE, 4  # of a tile of A x: as many sums as there are registers for
# A thread's floats: a square of lanes on its way, a span of B transposed, the sums of a block.
SQUARE, TURNED, SUMS = LANES * LANES, LANES * STRIDE, BLOCK * STRIDE
SCRATCH_BYTES = 4 * (SQUARE + TURNED + SUMS + LANES)


class AdapterTask(ctypes.Structure):
    """Addresses, and sizes in elements but for scratch.

    `modules`: int64 `[num_modules, 4]`, as `AdapterModule`. `table`: of the layer in the first
    slot. `h`: float32 `[num_modules, num_tokens, max_rank]`, and room for one token more. `x` is
    float32. `dtype`: of `result`.
    """

    _fields_ = task_fields(
        "result x h pool rows table modules num_tokens num_modules num_spans columns width"
        " slot_stride max_rank dtype pool_dtype scratch scratch_bytes"
    )


ADAPTER_TASK = np.dtype(AdapterTask)


def _dots(rows: int, dtype: str) -> Any:
    """A word that stores the sixteen chains of each product of `rows` tokens with RANKS rows of A.

    Its arguments: `(sums, x, a, width, last_row, last_rank)`; rows behind the last ones are those
    once more. `width`, of x and of A, is at least LANES.
    """

    @word(nothing, long, long, long, long, long, long)
    def dots(
        builder: Any, sums: Any, x: Any, a: Any, width: Any, last_row: Any, last_rank: Any
    ) -> None:
        def number(value: int) -> Any:
            return ir.Constant(LONG, value)

        def start(address: Any, row: int, last: Any, size: int) -> Any:
            is_there = builder.icmp_signed("<", number(row), last)
            place = builder.mul(builder.select(is_there, number(row), last), width)
            return builder.add(address, builder.mul(place, number(size)))

        def add(index: Any, count: Any, totals: Any) -> list[Any]:
            pointers = [at(builder, left, index, VECTOR) for left in lefts]
            tokens = [
                builder.load(it, align=4) if count is None else load_masked(builder, it, count)
                for it in pointers
            ]
            parts = [load_at(builder, dtype, right, index, count) for right in rights]
            pairs = [(x, y) for x in tokens for y in parts]
            return [
                multiply_add(builder, x, y, total)
                for (x, y), total in zip(pairs, totals, strict=True)
            ]

        def step(index: Any, totals: Any) -> list[Any]:
            return add(builder.mul(index, number(LANES)), None, totals)

        lefts = [start(x, row, last_row, 4) for row in range(rows)]
        rights = [start(a, rank, last_rank, itemsize(dtype)) for rank in range(RANKS)]
        zeros = [ir.Constant(VECTOR, None)] * (rows * RANKS)
        whole = builder.sdiv(width, number(LANES))
        totals = repeat(builder, whole, zeros, step)
        end = builder.mul(whole, number(LANES))
        totals = add(end, builder.sub(width, end), totals)
        for place, total in enumerate(totals):
            builder.store(total, at(builder, sums, number(LANES * place), VECTOR), align=4)

    return dots


_several, _one = {}, {}
for _name in ("float32", "bfloat16", *(("float16",) if HAS_FLOAT16 else ())):
    _several[_name], _one[_name] = _dots(ROWS, _name), _dots(1, _name)
_several_float32, _one_float32 = _several["float32"], _one["float32"]
_several_bfloat16, _one_bfloat16 = _several["bfloat16"], _one["bfloat16"]
_several_float16 = _several.get("float16", _several_bfloat16)  # no tensor of it comes
_one_float16 = _one.get("float16", _one_bfloat16)


@loop
def _multiply_tile(
    dtype: int, sums: int, x: int, a: int, width: int, rows: int, ranks: int
) -> None:
    """RANKS floats at `sums` for each of `rows` tokens, which are one or up to ROWS."""
    if rows == 1:
        if dtype == FLOAT32:
            _one_float32(sums, x, a, width, 0, ranks - 1)
        elif dtype == BFLOAT16:
            _one_bfloat16(sums, x, a, width, 0, ranks - 1)
        else:
            _one_float16(sums, x, a, width, 0, ranks - 1)
    elif dtype == FLOAT32:
        _several_float32(sums, x, a, width, rows - 1, ranks - 1)
    elif dtype == BFLOAT16:
        _several_bfloat16(sums, x, a, width, rows - 1, ranks - 1)
    else:
        _several_float16(sums, x, a, width, rows - 1, ranks - 1)
    transpose(sums, LANES, sums, LANES)
    total = load(sums, 0)
    for lane in range(1, LANES):
        total = total + load(sums, lane * LANES)
    store(sums, 0, total)


@loop
def _end_of_run(t: Any, token: int, stop: int) -> int:
    """The token behind those that have this one's adapter."""
    slot, end = get_int(t.rows, token), token + 1
    while end < stop and get_int(t.rows, end) == slot:
        end += 1
    return end


@loop
def _shrink_run(t: Any, square: int, module: int, first: int, stop: int) -> None:
    entry = get_int(t.rows, first) * t.slot_stride + 2 * get_long(t.modules, 4 * module)
    offset, rank = get_long(t.table, entry), get_long(t.table, entry + 1)
    size, width, stride = 4 if t.pool_dtype == FLOAT32 else 2, t.width, t.max_rank
    token = first
    while token < stop:
        rows = min(ROWS, stop - token)
        if rows == 2 and ROWS > 2:
            rows = 1  # so few would be computed with copies of themselves
        h = t.h + 4 * (module * t.num_tokens + token) * stride
        for d in range(0, rank, RANKS):
            ranks = min(RANKS, rank - d)
            a = t.pool + size * (offset + d * width)
            _multiply_tile(t.pool_dtype, square, t.x + 4 * token * width, a, width, rows, ranks)
            for row in range(rows):
                for i in range(ranks):
                    put(h, row * stride + d + i, get(square, row * RANKS + i))
        token += rows


def shrink(address: int) -> None:
    """`h = A x` for each token's adapter, by module."""
    t = task_at(address, ADAPTER_TASK)
    square = t.scratch + claim(address, NEXT_THREAD) * t.scratch_bytes
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        token, module = part // t.num_modules * BLOCK, part % t.num_modules
        stop = min(token + BLOCK, t.num_tokens)
        while token < stop:
            end = _end_of_run(t, token, stop)
            if get_int(t.rows, token) >= 0:
                _shrink_run(t, square, module, token, end)
            token = end
        part = claim(address, NEXT_PART)


@loop
def _turn(dtype: int, scratch: int, b: int, first: int, count: int, d: int, rank: int) -> None:
    """The columns from `first` on, at most SPAN, of LANES ranks from d on, side by side."""
    turned = scratch + 4 * SQUARE
    for column in range(0, count, LANES):
        for lane in range(LANES):
            own = first + min(column + lane, count - 1)
            store(scratch, lane * LANES, load_as(dtype, b, own * rank + d, rank - d))
        transpose(turned + 4 * column, STRIDE, scratch, LANES)


@loop
def _expand_run(t: Any, scratch: int, first: int, stop: int, low: int, high: int) -> None:
    """Adds all that the adapter adds to these columns of these tokens."""
    turned, sums = scratch + 4 * SQUARE, scratch + 4 * (SQUARE + TURNED)
    slot, size = get_int(t.rows, first), 4 if t.pool_dtype == FLOAT32 else 2
    rows, is_read = stop - first, False
    for module in range(t.num_modules):
        entry = slot * t.slot_stride + 2 * get_long(t.modules, 4 * module)
        offset, rank = get_long(t.table, entry), get_long(t.table, entry + 1)
        column = get_long(t.modules, 4 * module + 1)
        begin, end = max(low, column), min(high, column + get_long(t.modules, 4 * module + 2))
        if rank == 0 or begin >= end:
            continue
        if not is_read:
            is_read = True
            for row in range(rows):
                for i in range(0, high - low, LANES):
                    place = (first + row) * t.columns + low + i
                    value = load_as(t.dtype, t.result, place, high - low - i)
                    store(sums, row * STRIDE + i, value)
        b = t.pool + size * (offset + rank * t.width)
        h = t.h + 4 * (module * t.num_tokens + first) * t.max_rank
        to = sums + 4 * (begin - low)
        for d in range(0, rank, LANES):
            _turn(t.pool_dtype, scratch, b, begin - column, end - begin, d, rank)
            depth = min(LANES, rank - d)
            multiply(
                *(FLOAT32, to, STRIDE, h + 4 * d, t.max_rank, turned, STRIDE),
                *(rows, end - begin, depth, True),
            )
    if is_read:
        for row in range(rows):
            for i in range(0, high - low, LANES):
                place = (first + row) * t.columns + low + i
                value = load(sums, row * STRIDE + i)
                store_as(t.dtype, t.result, place, value, high - low - i)


def expand(address: int) -> None:
    """`result += B h` for each token's adapter, after `shrink`."""
    t = task_at(address, ADAPTER_TASK)
    scratch = t.scratch + claim(address, NEXT_THREAD) * t.scratch_bytes
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        token, low = part // t.num_spans * BLOCK, part % t.num_spans * SPAN
        stop, high = min(token + BLOCK, t.num_tokens), min(low + SPAN, t.columns)
        while token < stop:
            end = _end_of_run(t, token, stop)
            if get_int(t.rows, token) >= 0:
                _expand_run(t, scratch, token, end, low, high)
            token = end
        part = claim(address, NEXT_PART)
