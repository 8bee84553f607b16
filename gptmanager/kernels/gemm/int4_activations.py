"""Quantizes rows of activations in groups of 32 elements, for matmuls with 4-bit matrices.

Each group has its own factor, the scale of its integers, so that a large element costs precision
only within its group. A row is stored as one block of memory for each group or, for a matrix unit
(Intel AMX), in planes; see `planes_bytes`. An element is stored in one byte (one "level"), or in
two if rows are few: the signed upper byte of an int16, and the signed rest.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from gptmanager.kernels.gemm.int4_groups import GROUP, MIDDLE
from gptmanager.kernels.gemm.quantized_activations import (
    MAX_INT8,
    MAX_INT16,
    inverse,
    measured,
    rounded,
    sum_ints,
    upper_and_lower,
)
from gptmanager.kernels.per_token_kernels import CONVERSION_TASK
from gptmanager.kernels.simd.dtypes import ZERO, load_as
from gptmanager.kernels.simd.lanes import (
    INDICES,
    LANES,
    LONG,
    VECTOR,
    claim,
    intrinsic,
    long,
    loop,
    put,
    put_int,
    splat,
    task_at,
    vector,
)
from gptmanager.kernels.simd.threads import NEXT_PART, share_of

# Byte offsets in a block: the factor, the int32 initial value of dot products, the factor times the
# sum of the integers, and the integers.
FACTOR, BEGIN, SUM, BLOCK_HEAD = 0, 4, 8, 16
_BYTES = ir.VectorType(ir.IntType(8), LANES)


def block_bytes(levels: int) -> int:
    """Return the size in bytes of a block with `levels` bytes per element."""
    return BLOCK_HEAD + GROUP * levels


def _store(builder: Any, address: Any, value: Any) -> None:
    pointer = builder.inttoptr(address, _BYTES.as_pointer())
    builder.store(builder.trunc(value, _BYTES), pointer, align=1)


@intrinsic(vector, long, vector, vector)
def _store_one_level(builder: Any, address: Any, value: Any, total: Any) -> Any:
    """Store sixteen numbers as int8; return them added to the int32 lanes of `total`."""
    whole = rounded(builder, value)
    _store(builder, address, whole)
    return builder.bitcast(builder.add(builder.bitcast(total, INDICES), whole), VECTOR)


@intrinsic(vector, long, vector, vector)
def _store_two_levels(builder: Any, address: Any, value: Any, total: Any) -> Any:
    """Do as `_store_one_level`, but store upper bytes, and the rests 32 bytes after them."""
    whole = rounded(builder, value)
    upper, rest = upper_and_lower(builder, whole)
    _store(builder, address, upper)
    _store(builder, builder.add(address, ir.Constant(LONG, GROUP)), rest)
    return builder.bitcast(builder.add(builder.bitcast(total, INDICES), whole), VECTOR)


@loop
def quantize_groups(
    dtype: int, x: int, row: int, given: int, depth: int, to: int, levels: int
) -> None:
    """Quantize a row of x to blocks at `to`, with `levels` bytes per element.

    The row has `given` elements, and is padded with zeros to `depth`. The factor of a group with a
    NaN is NaN.
    """
    size = BLOCK_HEAD + GROUP * levels
    most = MAX_INT16 if levels == 2 else MAX_INT8
    for number in range(depth // GROUP):
        first, block = GROUP * number, to + size * number
        start, count = row * given + first, given - first
        largest, _, nan = measured(dtype, x, start, GROUP, count)
        by, total = splat(inverse(most, largest)), splat(ZERO)
        for k in range(0, GROUP, LANES):
            value, place = load_as(dtype, x, start + k, count - k) * by, block + BLOCK_HEAD + k
            if levels == 2:
                total = _store_two_levels(place, value, total)
            else:
                total = _store_one_level(place, value, total)
        factor, whole = largest / most + nan, sum_ints(total)
        put(block + FACTOR, 0, factor)
        put_int(block + BEGIN, 0, -MIDDLE * whole)
        put(block + SUM, 0, factor * np.float32(whole))


def planes_bytes(depth: int) -> int:
    """Return the size in bytes of a row in planes, a multiple of a cache line.

    A row has its integers, one byte each, then the factor of each group, then each group's factor
    times the sum of its integers.
    """
    return (depth + 8 * (depth // GROUP) + 63) // 64 * 64


planes_size = loop(planes_bytes)  # for compiled callers


@loop
def _quantize_in_planes(dtype: int, x: int, row: int, given: int, depth: int, to: int) -> None:
    """Quantize a row as `quantize_groups` does with one level, but to planes at `to`."""
    count = depth // GROUP
    for number in range(count):
        first = GROUP * number
        start, behind = row * given + first, given - first
        largest, _, nan = measured(dtype, x, start, GROUP, behind)
        by, total = splat(inverse(MAX_INT8, largest)), splat(ZERO)
        for k in range(0, GROUP, LANES):
            value = load_as(dtype, x, start + k, behind - k) * by
            total = _store_one_level(to + first + k, value, total)
        factor = largest / MAX_INT8 + nan
        put(to + depth, number, factor)
        put(to + depth, count + number, factor * np.float32(sum_ints(total)))


@loop
def _quantize(t: Any, address: int, in_planes: bool) -> None:
    size = planes_size(t.width) if in_planes else t.width // GROUP * (BLOCK_HEAD + GROUP)
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in share_of(t, part, t.num_tokens):
            to = t.result + token * size
            if in_planes:
                _quantize_in_planes(t.x_dtype, t.x, token, t.given, t.width, to)
            else:
                quantize_groups(t.x_dtype, t.x, token, t.given, t.width, to, 1)
        part = claim(address, NEXT_PART)


def quantize_rows_in_groups(address: int) -> None:
    """Quantize tokens to blocks, one byte per element. The task's `dtype` is ignored."""
    _quantize(task_at(address, CONVERSION_TASK), address, False)


def quantize_rows_in_planes(address: int) -> None:
    """Quantize tokens to planes, for a matrix unit. The task's `dtype` is ignored."""
    _quantize(task_at(address, CONVERSION_TASK), address, True)
