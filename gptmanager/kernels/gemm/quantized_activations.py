"""Quantizes rows of activations, for matmuls with int8 matrices.

A row is divided into stretches. Each stretch has a factor, derived from its largest magnitude. If
there are few rows, they become int16. If there are many rows, they become int16 in split form,
upper bytes and lower bytes, for a matrix unit (Intel AMX), and int8 on CPUs without a matrix unit.
In an int8 stretch with an outlier, most other elements would be rounded to 0. So for such a
stretch, the remainders of the rounding are also stored. Activations of language models have
outliers in the same few channels of all tokens (Dettmers et al., "LLM.int8()", 2022).
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from gptmanager.kernels.per_token_kernels import CONVERSION_TASK
from gptmanager.kernels.simd.dtypes import ZERO, load_as
from gptmanager.kernels.simd.lanes import (
    INDICES,
    INT,
    LANES,
    LONG,
    ROUND,
    VECTOR,
    call,
    claim,
    intrinsic,
    larger,
    long,
    loop,
    mark_nan,
    max_lanes,
    nothing,
    put,
    put_int,
    splat,
    sum_lanes,
    task_at,
    vector,
)
from gptmanager.kernels.simd.threads import NEXT_PART, share_of

MAX_POSITIONS = 512  # positions of an int16 stretch: 512 * MAX_INT8 * MAX_INT16 fits in int32
STRETCH = 64  # positions of an int8 stretch
# The mark of an int8 stretch has two numbers for the values: their factor, and the initial value of
# each sum of values times weights. The mark has the same two numbers for the remainders.
MARK_BYTES = 16
# A stretch's remainders are stored if its largest magnitude exceeds this multiple of its mean
# magnitude.
OUTLIER = 16.0
# The upper byte of an int16 is rounded. For values up to MAX_INT16, it is at most 127.
MAX_INT16, MAX_INT8 = np.float32(127.0 * 256.0), np.float32(127.0)
FINER = np.float32(254.0)  # half a quantization step is 127 steps of the remainder
LEAST = 1e-30  # a stretch is quantized to zeros if its largest magnitude is smaller


def row_bytes(depth: int) -> int:
    """Return the size in bytes of an int8 row: values, remainders, and the marks of stretches."""
    return 2 * depth + MARK_BYTES * ((depth - 1) // STRETCH + 1)


def split_row_bytes(depth: int) -> int:
    """Return the size in bytes of a split int16 row: upper bytes, lower bytes, and factors.

    The size is a multiple of 64, a cache line: an AMX tile loads five times as slowly if its rows
    cross cache lines.
    """
    return (2 * depth + 4 * ((depth - 1) // MAX_POSITIONS + 1) + 63) // 64 * 64


row_size, split_row_size = loop(row_bytes), loop(split_row_bytes)  # for compiled callers


def rounded(builder: Any, value: Any) -> Any:
    """Round to the nearest integer, ties to even, as int32; magnitudes are below 2^22."""
    bits = builder.bitcast(builder.fadd(value, ir.Constant(VECTOR, [ROUND] * LANES)), INDICES)
    return builder.sub(bits, ir.Constant(INDICES, [0x4B400000] * LANES))


def upper_and_lower(builder: Any, whole: Any) -> tuple[Any, Any]:
    """Return signed bytes with `256 * upper + lower == whole`, for magnitudes up to `MAX_INT16`."""
    eight, half = (ir.Constant(INDICES, [n] * LANES) for n in (8, 128))
    upper = builder.ashr(builder.add(whole, half), eight)
    return upper, builder.sub(whole, builder.shl(upper, eight))


def _narrowed(builder: Any, value: Any, bits: int) -> Any:
    return builder.trunc(value, ir.VectorType(ir.IntType(bits), LANES))


def _store(builder: Any, address: Any, index: Any, value: Any) -> None:
    size = value.type.element.width // 8
    start = builder.add(address, builder.mul(index, ir.Constant(LONG, size)))
    builder.store(value, builder.inttoptr(start, value.type.as_pointer()), align=size)


@intrinsic(nothing, long, long, vector)
def _store_int16(builder: Any, address: Any, index: Any, value: Any) -> None:
    """Store sixteen numbers as int16; exchange the second and the third of each four numbers."""
    order = ir.Constant(INDICES, [n // 4 * 4 + (0, 2, 1, 3)[n % 4] for n in range(LANES)])
    whole = rounded(builder, value)
    _store(
        builder, address, index, _narrowed(builder, builder.shuffle_vector(whole, whole, order), 16)
    )


@intrinsic(nothing, long, long, long, vector)
def _store_bytes(builder: Any, upper: Any, lower: Any, index: Any, value: Any) -> None:
    """Store sixteen numbers of magnitudes up to `MAX_INT16` as upper and lower bytes."""
    parts = upper_and_lower(builder, rounded(builder, value))
    for address, part in zip((upper, lower), parts, strict=True):
        _store(builder, address, index, _narrowed(builder, part, 8))


@intrinsic(vector, long, long, vector, vector)
def _store_int8(builder: Any, address: Any, index: Any, value: Any, total: Any) -> Any:
    """Store sixteen numbers of magnitudes up to 127 as int8; return `total` plus these numbers.

    The lanes of `total` hold int32.
    """
    whole = rounded(builder, value)
    _store(builder, address, index, _narrowed(builder, whole, 8))
    return builder.bitcast(builder.add(builder.bitcast(total, INDICES), whole), VECTOR)


@intrinsic(long, vector)
def sum_ints(builder: Any, value: Any) -> Any:
    """Return the sum of the int32 lanes of `value`, as int64."""
    name = "llvm.vector.reduce.add.v16i32"
    return builder.sext(call(builder, name, INT, builder.bitcast(value, INDICES)), LONG)


@loop
def measured(dtype: int, x: int, start: int, positions: int, count: int) -> Any:
    """Return the largest magnitude and the sum of magnitudes of some values, and a mark of NaNs.

    The values are the `positions` elements of `x` from `start` on; only the first `count` elements
    are read, and the others are taken as 0. A largest magnitude below `LEAST` is returned as 0. The
    mark is NaN if a value is NaN, else 0.
    """
    most, size, nans = splat(ZERO), splat(ZERO), splat(ZERO)
    for k in range(0, positions, LANES):
        value = load_as(dtype, x, start + k, count - k)
        magnitude = larger(value, splat(ZERO) - value)
        most, size, nans = larger(most, magnitude), size + magnitude, mark_nan(nans, value)
    largest = max_lanes(most)
    if largest < np.float32(LEAST):
        largest = ZERO
    return largest, sum_lanes(size), sum_lanes(nans)


@loop
def inverse(most: Any, largest: Any) -> Any:
    return most / largest if largest > ZERO else ZERO


@loop
def quantize_to_int16(
    dtype: int, x: int, row: int, given: int, depth: int, to: int, factors: int, splits: bool
) -> None:
    """Quantize a row of x, which has `given` elements and is padded with zeros to `depth`.

    If `splits`, all upper bytes and then all lower bytes are written to `to`, in order. If not,
    int16 `[depth]` is written, with the second and third of each four elements exchanged. The
    factors of stretches are written to `factors` as float32. A stretch with a NaN has factor NaN.
    """
    for number, first in enumerate(range(0, depth, MAX_POSITIONS)):
        positions, start = min(MAX_POSITIONS, depth - first), row * given + first
        largest, _, nan = measured(dtype, x, start, positions, given - first)
        put(factors, number, largest / MAX_INT16 + nan)
        by = splat(inverse(MAX_INT16, largest))
        for k in range(0, positions, LANES):
            value = load_as(dtype, x, start + k, given - first - k) * by
            if splits:
                _store_bytes(to, to + depth, first + k, value)
            else:
                _store_int16(to, first + k, value)


@loop
def _quantize_to_int8(dtype: int, x: int, row: int, given: int, depth: int, to: int) -> None:
    """Quantize a row of x, which has `given` elements and is padded with zeros to `depth`.

    The result at `to` has `row_bytes(depth)` bytes. A stretch with a NaN has the factor NaN.
    """
    for number, first in enumerate(range(0, depth, STRETCH)):
        positions, start = min(STRETCH, depth - first), row * given + first
        count, marks = given - first, to + 2 * depth + MARK_BYTES * number
        largest, size, nan = measured(dtype, x, start, positions, count)
        factor, by = largest / MAX_INT8, splat(inverse(MAX_INT8, largest))
        total = splat(ZERO)
        for k in range(0, positions, LANES):
            value = load_as(dtype, x, start + k, count - k) * by
            total = _store_int8(to, first + k, value, total)
        put(marks, 0, factor + nan)
        put_int(marks, 1, -128 * sum_ints(total))
        if largest * np.float32(min(positions, count)) <= np.float32(OUTLIER) * size:
            put(marks, 2, ZERO)
            continue
        total = splat(ZERO)
        for k in range(0, positions, LANES):
            value = load_as(dtype, x, start + k, count - k) * by
            left = value - ((value + splat(np.float32(ROUND))) - splat(np.float32(ROUND)))
            total = _store_int8(to + depth, first + k, left * splat(FINER), total)
        put(marks, 2, factor / FINER)
        put_int(marks, 3, -128 * sum_ints(total))


@loop
def _quantize(t: Any, address: int, splits: bool) -> None:
    size = split_row_size(t.width) if splits else row_size(t.width)
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in share_of(t, part, t.num_tokens):
            to = t.result + token * size
            if splits:
                factors = to + 2 * t.width
                quantize_to_int16(t.x_dtype, t.x, token, t.given, t.width, to, factors, True)
            else:
                _quantize_to_int8(t.x_dtype, t.x, token, t.given, t.width, to)
        part = claim(address, NEXT_PART)


def quantize_rows(address: int) -> None:
    """Quantize tokens to int8 rows (`row_bytes`). The task's `dtype` is ignored."""
    _quantize(task_at(address, CONVERSION_TASK), address, False)


def quantize_rows_to_bytes(address: int) -> None:
    """Quantize tokens to split int16 rows (`split_row_bytes`). The task's `dtype` is ignored."""
    _quantize(task_at(address, CONVERSION_TASK), address, True)
