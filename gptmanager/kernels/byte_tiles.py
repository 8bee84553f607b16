"""Products of a packed int8 matrix with many rows, by whole numbers of 8 bits.

The rows are rounded before, each stretch of a row by its largest number, as the matrix is by rows.
Sums over a stretch are exact. The instruction wants factors of one side without a sign: the matrix
gets 128 added to each, and its sums begin with what that is too much. It decides what an element
comes to; how many rows there are is not seen in it.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types

from gptmanager.kernels.dtypes import load_as
from gptmanager.kernels.lanes import (
    FLOAT,
    INDICES,
    INT,
    LANES,
    LONG,
    VECTOR,
    at,
    call,
    claim,
    larger,
    long,
    loop,
    mark_nan,
    max_lanes,
    multiply_add,
    nothing,
    put,
    put_int,
    splat,
    spread,
    sum_lanes,
    task_at,
    vector,
    word,
)
from gptmanager.kernels.matrix_tiles import PANELS, fetch_line
from gptmanager.kernels.products import repeat
from gptmanager.kernels.threads import NEXT_PART
from gptmanager.kernels.token_loops import CONVERSION_TASK, share_of

STRETCH = 64  # positions with one factor: a sum in their midst takes an eighth of the time
SPAN = 256  # positions of four panels that stay in the first cache while rows pass
SPAN_BYTES = PANELS * LANES * SPAN
FOUR = 4  # positions of a step
MARK_BYTES = 8  # of a stretch: its factor, and what its sums begin with
MOST = 127.0
LEAST = 1e-30  # of a stretch's largest number: below it there is nothing to tell apart
ZERO = np.float32(0.0)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)


def has_bytes() -> bool:
    """Whether there is an instruction that adds products of 8 bits by fours, for 512 bits."""
    return bool(binding.get_host_cpu_features().get("avx512vnni"))


def row_bytes(depth: int) -> int:
    """Of a rounded row: its numbers, and then the marks of its stretches."""
    return depth + MARK_BYTES * ((depth - 1) // STRETCH + 1)


row_size = loop(row_bytes)  # for compiled callers


def _add_products(builder: Any, unsigned: Any, signed: Any, total: Any) -> Any:
    """The four products of each lane, to its sum."""
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", INDICES, total, unsigned, signed)


def byte_tile(rows: int) -> Any:
    """A word that adds to `rows` x 64 elements of a product, or begins with them.

    Its arguments: `(c, a, marks, a_stride, b, fours, add)`. `c` float32 of stride 64; `a` and
    `marks`: of rounded rows, from a stretch on; `b`: four panels as `lay_out` writes them, `SPAN`
    positions apart; `fours` of positions, up to as many.
    """
    per_stretch = ir.Constant(LONG, STRETCH // FOUR)

    @word(nothing, *[long] * 6, types.boolean)
    def product(
        builder: Any, c: Any, a: Any, marks: Any, a_stride: Any, b: Any, fours: Any, add: Any
    ) -> None:
        def starts(first: Any) -> list[Any]:
            strides = (builder.mul(a_stride, ir.Constant(LONG, row)) for row in range(rows))
            return [builder.add(first, stride) for stride in strides]

        lefts, marked = starts(a), starts(marks)
        panels = [builder.add(b, ir.Constant(LONG, LANES * SPAN * n)) for n in range(PANELS)]

        def stretch(number: Any, totals: Sequence[Any]) -> Sequence[Any]:
            first = builder.mul(number, per_stretch)
            left = builder.sub(fours, first)
            is_whole = builder.icmp_signed(">=", left, per_stretch)
            count = builder.select(is_whole, per_stretch, left)

            def step(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
                place = builder.add(first, index)
                offset = builder.mul(place, ir.Constant(LONG, LANES))
                right = [builder.load(at(builder, it, offset, INDICES), align=4) for it in panels]
                four = [spread(builder, builder.load(at(builder, it, place, INT))) for it in lefts]
                return [
                    _add_products(builder, right[n % PANELS], four[n // PANELS], total)
                    for n, total in enumerate(sums)
                ]

            place = builder.mul(number, ir.Constant(LONG, 2))
            behind = builder.add(place, ir.Constant(LONG, 1))
            begin = [spread(builder, builder.load(at(builder, m, behind, INT))) for m in marked]
            sums = repeat(builder, count, [begin[n // PANELS] for n in range(len(totals))], step)
            factors = [spread(builder, builder.load(at(builder, m, place, FLOAT))) for m in marked]
            return [
                multiply_add(builder, factors[n // PANELS], builder.sitofp(it, VECTOR), total)
                for n, (it, total) in enumerate(zip(sums, totals, strict=True))
            ]

        targets = [
            at(builder, c, ir.Constant(LONG, LANES * n), VECTOR) for n in range(rows * PANELS)
        ]
        none = ir.Constant(VECTOR, None)
        initial = [builder.select(add, builder.load(it, align=4), none) for it in targets]
        rest = builder.add(fours, ir.Constant(LONG, STRETCH // FOUR - 1))
        stretches = builder.sdiv(rest, per_stretch)
        for target, total in zip(
            targets, repeat(builder, stretches, initial, stretch), strict=True
        ):
            builder.store(total, target, align=4)

    return product


@word(nothing, long, long, long)
def lay_out(builder: Any, target: Any, source: Any, fours: Any) -> None:
    """A panel's positions by fours, 128 more each: `[fours, 16, 4]` of uint8. Asks for the next
    ones of that panel meanwhile.
    """
    kind = ir.VectorType(ir.IntType(8), 4 * LANES)
    order = [n // 2 + n % 2 * LANES for n in range(2 * LANES)]
    mask = ir.Constant(ir.VectorType(INT, 2 * LANES), order)
    signs = ir.Constant(_SHORTS, [0x8080] * (2 * LANES))

    def step(index: Any, _: Sequence[Any]) -> Sequence[Any]:
        offset = builder.mul(index, ir.Constant(LONG, FOUR * LANES))
        start = builder.add(source, offset)
        fetch_line(builder, builder.add(start, ir.Constant(LONG, LANES * SPAN)))
        read = builder.load(builder.inttoptr(start, _SHORTS.as_pointer()), align=1)
        value = builder.shuffle_vector(read, ir.Constant(_SHORTS, ir.Undefined), mask)
        value = builder.bitcast(builder.xor(value, signs), kind)
        to = builder.inttoptr(builder.add(target, offset), kind.as_pointer())
        builder.store(value, to, align=1)
        return []

    repeat(builder, fours, [], step)


@word(vector, long, long, vector, vector)
def _store_rounded(builder: Any, address: Any, index: Any, value: Any, total: Any) -> Any:
    """Sixteen numbers of at most 127 as int8, to the nearest, ties to even; returns the int32 that
    lie in `total`, and those added.
    """
    # adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum
    shifted = builder.fadd(value, ir.Constant(VECTOR, [12582912.0] * LANES))
    lower = builder.trunc(builder.bitcast(shifted, INDICES), _BYTES)
    start = builder.add(address, index)
    builder.store(lower, builder.inttoptr(start, _BYTES.as_pointer()), align=1)
    added = builder.add(builder.bitcast(total, INDICES), builder.sext(lower, INDICES))
    return builder.bitcast(added, VECTOR)


@word(long, vector)
def _sum_ints(builder: Any, value: Any) -> Any:
    """Of the int32 that lie in it."""
    name = "llvm.vector.reduce.add.v16i32"
    return builder.sext(call(builder, name, INT, builder.bitcast(value, INDICES)), LONG)


@loop
def _round_row(dtype: int, x: int, row: int, given: int, depth: int, to: int) -> None:
    """A row of x, `given` elements and zeros up to `depth`; NaN stays NaN."""
    marks = to + depth
    for number, first in enumerate(range(0, depth, STRETCH)):
        end = min(first + STRETCH, depth)
        most, nans, total = splat(ZERO), splat(ZERO), splat(ZERO)
        for k in range(first, end, LANES):
            value = load_as(dtype, x, row * given + k, given - k)
            most = larger(most, larger(value, splat(ZERO) - value))
            nans = mark_nan(nans, value)
        largest, by = max_lanes(most), ZERO
        if largest >= np.float32(LEAST):
            by = np.float32(MOST) / largest
        else:
            largest = ZERO
        put(marks, 2 * number, largest / np.float32(MOST) + sum_lanes(nans))
        for k in range(first, end, LANES):
            value = load_as(dtype, x, row * given + k, given - k)
            total = _store_rounded(to, k, value * splat(by), total)
        put_int(marks, 2 * number + 1, -128 * _sum_ints(total))


def round_rows(address: int) -> None:
    """Tokens as rounded rows; the task's own dtype is not looked at."""
    t = task_at(address, CONVERSION_TASK)
    size = row_size(t.width)
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in share_of(t, part):
            _round_row(t.x_dtype, t.x, token, t.given, t.width, t.result + token * size)
        part = claim(address, NEXT_PART)
