"""Products of a packed int8 matrix with few rows, by whole numbers.

The rows are rounded to 16 bits, each stretch of a row by its largest number, and sums are exact
until they are multiplied with the stretch's factor. It decides what an element comes to; how many
rows there are is not seen in it.
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
    larger,
    long,
    loop,
    mark_nan,
    max_lanes,
    multiply_add,
    nothing,
    put,
    splat,
    spread,
    sum_lanes,
    vector,
    word,
)
from gptmanager.kernels.matrix_tiles import AHEAD, PANELS, fetch_line
from gptmanager.kernels.products import repeat

FEW_ROWS = 4  # up to here a matrix of int8 is read as fast as memory gives it
INTEGER_DEPTH = 4  # positions of a step
MOST_POSITIONS = 256  # of one sum: what 127 times 32,767 may add up to in 32 bits is twice that
MOST_INTEGER = 32767.0
LEAST = 1e-30  # of a stretch's largest number: below it there is nothing to tell apart
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_TWO_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)
_TWO_BYTES = ir.VectorType(ir.IntType(8), 2 * LANES)


def has_integers() -> bool:
    """Whether there is an instruction that adds products of 16 bits in pairs, for 512 bits."""
    return bool(binding.get_host_cpu_features().get("avx512bw"))


def _rows(builder: Any, start: Any, stride: Any, count: int) -> list[Any]:
    return [builder.add(start, builder.mul(stride, ir.Constant(LONG, row))) for row in range(count)]


def _add_products(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """Both products of each lane, to its sum."""
    pairs = (builder.bitcast(it, _TWO_SHORTS) for it in (left, right))
    return builder.add(call(builder, "llvm.x86.avx512.pmaddw.d.512", INDICES, *pairs), total)


def integer_tile(rows: int) -> Any:
    """A word that adds to `rows` x 64 elements of a product, or begins with them.

    Its arguments: `(c, a, a_stride, factors, factors_stride, b0, b1, b2, b3, steps, add)`. `c`
    float32 of stride 64; `a` int16, strides in bytes; `b0` to `b3` the addresses of four panels of
    int8. A row's sums are whole numbers, exact for up to `MOST_POSITIONS`, times its factor.
    """

    @word(nothing, *[long] * 10, types.boolean)
    def product(
        builder: Any, c: Any, a: Any, a_stride: Any, factors: Any, factors_stride: Any,
        b0: Any, b1: Any, b2: Any, b3: Any, steps: Any, add: Any,
    ) -> None:  # fmt: skip
        def step(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
            offset = builder.mul(index, ir.Constant(LONG, INTEGER_DEPTH * LANES))
            starts = [builder.add(panel, offset) for panel in (b0, b1, b2, b3)]
            for start in starts:
                fetch_line(builder, builder.add(start, ir.Constant(LONG, AHEAD)))
            for pair in range(INTEGER_DEPTH // 2):
                place = builder.add(
                    builder.mul(index, ir.Constant(LONG, INTEGER_DEPTH // 2)),
                    ir.Constant(LONG, pair),
                )
                behind = ir.Constant(LONG, 2 * LANES * pair)
                pointers = [
                    builder.inttoptr(builder.add(start, behind), _TWO_BYTES.as_pointer())
                    for start in starts
                ]
                read = [builder.sext(builder.load(it, align=1), _TWO_SHORTS) for it in pointers]
                both = [spread(builder, builder.load(at(builder, it, place, INT))) for it in lefts]
                sums = [
                    _add_products(builder, both[n // PANELS], read[n % PANELS], total)
                    for n, total in enumerate(sums)
                ]
            return sums

        lefts = _rows(builder, a, a_stride, rows)
        zero, none = ir.Constant(INDICES, None), ir.Constant(VECTOR, None)
        places = _rows(builder, factors, factors_stride, rows)
        sums = repeat(builder, steps, [zero] * (rows * PANELS), step)
        for n, total in enumerate(sums):
            start = builder.inttoptr(places[n // PANELS], FLOAT.as_pointer())
            target = at(builder, c, ir.Constant(LONG, LANES * n), VECTOR)
            before = builder.select(add, builder.load(target, align=4), none)
            factor = spread(builder, builder.load(start))
            value = multiply_add(builder, factor, builder.sitofp(total, VECTOR), before)
            builder.store(value, target, align=4)

    return product


@word(nothing, long, long, vector)
def store_rounded(builder: Any, address: Any, index: Any, value: Any) -> None:
    """Sixteen numbers of at most 2^15 as int16, to the nearest, ties to even."""
    # adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum
    shifted = builder.fadd(value, ir.Constant(VECTOR, [12582912.0] * LANES))
    lower = builder.trunc(builder.bitcast(shifted, INDICES), _SHORTS)
    start = builder.add(address, builder.mul(index, ir.Constant(LONG, 2)))
    builder.store(lower, builder.inttoptr(start, _SHORTS.as_pointer()), align=2)


def integer_bytes(depth: int) -> int:
    """Of a thread's scratch behind the sums: few rows of int16, and their factors."""
    return FEW_ROWS * (2 * depth + 4 * -(-depth // MOST_POSITIONS))


@loop
def round_row(dtype: int, x: int, row: int, depth: int, to: int, factors: int) -> None:
    """A row of x as whole numbers, and what they are to be multiplied with; NaN stays NaN."""
    for number, first in enumerate(range(0, depth, MOST_POSITIONS)):
        end = min(first + MOST_POSITIONS, depth)
        most, marks = splat(np.float32(0.0)), splat(np.float32(0.0))
        for k in range(first, end, LANES):
            value = load_as(dtype, x, row * depth + k, depth - k)
            most = larger(most, larger(value, splat(np.float32(0.0)) - value))
            marks = mark_nan(marks, value)
        largest, by = max_lanes(most), np.float32(0.0)
        if largest >= np.float32(LEAST):
            by = np.float32(MOST_INTEGER) / largest
        else:
            largest = np.float32(0.0)
        put(factors, number, largest / np.float32(MOST_INTEGER) + sum_lanes(marks))
        for k in range(first, end, LANES):
            value = load_as(dtype, x, row * depth + k, depth - k)
            store_rounded(to, k, value * splat(by))
