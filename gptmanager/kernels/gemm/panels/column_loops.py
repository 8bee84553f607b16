"""A compiled function that makes int8 panels of packed integers, sixteen rows at a time.

Each lane of a vector is a row. Each column loads a vector of its own with the scales of the sixteen
rows, so neighboring columns may belong to different groups.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from gptmanager.kernels.gemm.panels.panel_writing import panels_of, quotient
from gptmanager.kernels.simd.dtypes import ONE, ZERO
from gptmanager.kernels.simd.lanes import (
    INDICES,
    INT,
    LANES,
    ROUND,
    VECTOR,
    at,
    claim,
    float_lanes,
    get_int,
    int_lanes,
    intrinsic,
    larger,
    load,
    long,
    loop,
    nothing,
    splat,
    spread,
    store,
    task_at,
    vector,
)
from gptmanager.kernels.simd.threads import NEXT_PART, NEXT_THREAD, task_fields
from gptmanager.kernels.simd.tiles import LINE_BYTES, move_panel

FOUR = 4  # columns of a line in a panel
GROUP_BYTES = 2 * LINE_BYTES  # the scales and the zeros of a group, for all rows of a panel
_WORD = 4  # bytes
_MOST_INT8 = np.float32(127.0)
_TINY = np.finfo(np.float32).tiny


class ColumnTask(ctypes.Structure):
    """The arguments of `columns_to_int8`.

    `words`: int32 `[num_tokens, num_words]`. The strides in elements are `row_stride` and
    `word_stride`, and at least one of the two strides is 1. Each word contains integers of `bits`
    bits, and each row has `width` integers. `scales` and `zeros`: float32
    `[num_groups, num_tokens]`. If the address `zeros` is 0, every group has the zero point `zero`.
    `index`: the group of each column, int32. The other fields are those of `PanelTask`, but its
    `scales` are called `row_scales` here. Rows fill whole panels. `width`, `first_column` and
    `num_columns` are multiples of four. For each thread, `scratch` has space for the scales and the
    zeros of a panel's rows, then for the words of these rows.
    """

    _fields_ = task_fields(
        "words scales zeros index values row_scales num_tokens num_words width num_groups bits"
        " row_stride word_stride first_column num_columns first_row depth scratch scratch_bytes",
        "zero",
    )


COLUMN_TASK = np.dtype(ColumnTask)


@intrinsic(vector, long, long, long)
def _integers(builder: Any, words: Any, shift: Any, mask: Any) -> Any:
    """Return one integer from each of sixteen words, as floats."""
    found = builder.load(builder.inttoptr(words, INDICES.as_pointer()), align=4)
    found = builder.lshr(found, spread(builder, builder.trunc(shift, INT)))
    found = builder.and_(found, spread(builder, builder.trunc(mask, INT)))
    return builder.sitofp(found, VECTOR)


@intrinsic(vector, vector, vector)
def _larger_magnitude(builder: Any, magnitudes: Any, value: Any) -> Any:
    """Return the larger of `magnitudes` and the magnitude of `value`, for each lane.

    NaN is larger than infinity, and infinity is larger than all finite numbers.
    """
    one = builder.bitcast(magnitudes, INDICES)
    other = builder.and_(builder.bitcast(value, INDICES), int_lanes(0x7FFFFFFF))
    is_larger = builder.icmp_unsigned(">", other, one)
    return builder.bitcast(builder.select(is_larger, other, one), VECTOR)


@intrinsic(vector, vector)
def _finite_or_nan(builder: Any, magnitudes: Any) -> Any:
    is_finite = builder.fcmp_ordered("<", magnitudes, float_lanes(float("inf")))
    return builder.select(is_finite, magnitudes, float_lanes(float("nan")))


@intrinsic(nothing, long, long, *[vector] * FOUR)
def _store_four(builder: Any, address: Any, line: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    """Round four columns to int8, and store them as a line of a panel."""
    word = int_lanes(0)
    for number, value in enumerate((a, b, c, d)):
        shifted = builder.bitcast(builder.fadd(value, float_lanes(ROUND)), INDICES)
        own = builder.and_(shifted, int_lanes(255))
        word = builder.or_(word, builder.shl(own, int_lanes(8 * number)))
    place = builder.mul(line, ir.Constant(line.type, LANES))
    builder.store(word, at(builder, address, place, INDICES), align=4)


@loop
def _gather_panel(t: Any, row: int, groups: int, words: int) -> None:
    """Copy the scales, the zeros and the words of sixteen rows to scratch, without gaps."""
    zero = splat(np.float32(t.zero))
    for group in range(t.num_groups):
        place = group * t.num_tokens + row
        store(groups, 2 * LANES * group, load(t.scales, place))
        store(groups, 2 * LANES * group + LANES, load(t.zeros, place) if t.zeros else zero)
    if t.row_stride == 1:
        for number in range(t.num_words):
            store(words, LANES * number, load(t.words, number * t.word_stride + row))
    else:
        source = t.words + _WORD * t.row_stride * row
        move_panel(source, _WORD * t.row_stride, t.num_words, words)


@loop
def _value(t: Any, groups: int, words: int, column: int, shift: int) -> Any:
    """Return a column's values in sixteen rows. Each integer begins at bit `shift` of its word."""
    own = groups + GROUP_BYTES * get_int(t.index, column)
    return (_integers(words, shift, (1 << t.bits) - 1) - load(own, LANES)) * load(own, 0)


@loop
def _row_scales(t: Any, groups: int, words: int) -> Any:
    most, per_word = splat(ZERO), 32 // t.bits
    for column in range(0, t.width, FOUR):
        line, shift = words + LINE_BYTES * (column // per_word), column % per_word * t.bits
        for number in range(FOUR):
            own = _value(t, groups, line, column + number, shift + number * t.bits)
            most = _larger_magnitude(most, own)
    return _finite_or_nan(most) / splat(_MOST_INT8)


@loop
def _write_panel(t: Any, groups: int, words: int, scale: Any, to: int) -> None:
    step, per_word = larger(scale, splat(_TINY)), 32 // t.bits
    by = splat(ONE) / step
    lines = t.num_columns // FOUR
    for line in range(lines):
        column = t.first_column + FOUR * line
        own, shift = words + LINE_BYTES * (column // per_word), column % per_word * t.bits
        _store_four(
            to,
            line,
            quotient(_value(t, groups, own, column, shift), step, by),
            quotient(_value(t, groups, own, column + 1, shift + t.bits), step, by),
            quotient(_value(t, groups, own, column + 2, shift + 2 * t.bits), step, by),
            quotient(_value(t, groups, own, column + 3, shift + 3 * t.bits), step, by),
        )
    for line in range(lines, (lines + LANES - 1) // LANES * LANES):
        store(to, LANES * line, splat(ZERO))


def columns_to_int8(address: int) -> None:
    """Round (integer - zero) * scale to int8 with a scale for each row, and write whole panels."""
    t = task_at(address, COLUMN_TASK)
    groups = t.scratch + claim(address, NEXT_THREAD) * t.scratch_bytes
    words = groups + GROUP_BYTES * t.num_groups
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for panel in panels_of(t, part):
            _gather_panel(t, panel * LANES - t.first_row, groups, words)
            scale = _row_scales(t, groups, words)
            store(t.row_scales, panel * LANES, scale)
            _write_panel(t, groups, words, scale, t.values + panel * LANES * t.depth)
        part = claim(address, NEXT_PART)
