"""Compiled functions that scale numbers of 8 bits or fewer, to floats or to int8 panels."""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from gptmanager.kernels.gemm.panels.panel_writing import move_int8, panels_of, round_row, rows_of
from gptmanager.kernels.simd.dtypes import FLOAT32, ZERO
from gptmanager.kernels.simd.lanes import (
    FLOAT,
    INDICES,
    INT,
    LANES,
    LONG,
    VECTOR,
    call,
    claim,
    get,
    intrinsic,
    lanes_from,
    load_either,
    load_part,
    long,
    loop,
    put,
    splat,
    spread,
    store_part,
    task_at,
    vector,
)
from gptmanager.kernels.simd.threads import NEXT_PART, NEXT_THREAD, share_of, task_fields

_BYTE = ir.IntType(8)
_BYTES = ir.VectorType(_BYTE, LANES)


class ScaleTask(ctypes.Structure):
    """The arguments of `scale_rows` and `scale_to_int8`.

    `codes`: `num_tokens` rows of bytes, `stride` bytes apart. Each row has `width` codes of the
    same `kind`. `high_first`: of two codes in a byte, the first is in the upper four bits. `table`:
    the sixteen values of codes of the kind `NAMED`. `result`: float32 `[num_tokens, width]`.
    `scales` and `zeros`: float32 `[num_tokens, num_blocks]`. If the address `zeros` is 0, every
    block has the zero point `zero`. Column c is in block `index[c]` (float32). If the address
    `index` is 0, column c is in block `c // block`, where `block` is a multiple of 16. All values
    are also multiplied by `factor`. If `adds_zeros`, `zeros` are instead added to these values. The
    other fields are those of `PanelTask`, except that the int8 scales of rows are in `row_scales`,
    and that `scratch` also has a row of floats.
    """

    _fields_ = task_fields(
        "codes table scales zeros index result num_tokens width stride num_blocks block kind"
        " high_first adds_zeros values row_scales first_column num_columns first_row depth"
        " scratch scratch_bytes row_bytes",
        "zero factor",
    )


# Kinds of codes. One code per byte: integers, or float8 (E4M3). Two codes per byte: integers,
# float4 (E2M1), or indices into a table of sixteen values.
UNSIGNED, SIGNED, E4M3, FOUR_BITS, E2M1, NAMED = range(6)
SCALE_TASK = np.dtype(ScaleTask)


def _load_bytes(builder: Any, address: Any, count: Any, widen: Any) -> Any:
    pointer = builder.inttoptr(address, _BYTES.as_pointer())

    def load_lanes(masked_to: Any) -> Any:
        if masked_to is None:
            return widen(builder.load(pointer, align=1))
        mask, align = lanes_from(builder, "<", count), ir.Constant(INT, 1)
        rest = ir.Constant(_BYTES, None)
        return widen(call(builder, "llvm.masked.load.v16i8.p0", _BYTES, pointer, align, mask, rest))

    return load_either(builder, count, load_lanes)


def _all(value: int) -> Any:
    return ir.Constant(INDICES, [value] * LANES)


def _small_float(builder: Any, codes: Any, mantissa: int, bias: int) -> Any:
    """Return the values of floats with 4 bits (`mantissa` 1) or 8 bits (`mantissa` 3).

    The second result is the codes without their sign bits.
    """
    sign = 4 if mantissa == 1 else 8
    size = builder.and_(codes, _all((1 << sign - 1) - 1))
    bits = builder.shl(size, _all(23 - mantissa))
    normal = builder.bitcast(builder.add(bits, _all(127 - bias << 23)), VECTOR)
    step = ir.Constant(VECTOR, [2.0 ** (1 - bias - mantissa)] * LANES)
    subnormal = builder.fmul(builder.sitofp(size, VECTOR), step)
    is_normal = builder.icmp_unsigned(">=", size, _all(1 << mantissa))
    value = builder.bitcast(builder.select(is_normal, normal, subnormal), INDICES)
    is_negative = builder.shl(builder.lshr(codes, _all(sign - 1)), _all(31))
    return builder.bitcast(builder.or_(value, is_negative), VECTOR), size


@intrinsic(vector, long, long)
def _signed(builder: Any, address: Any, count: Any) -> Any:
    return _load_bytes(builder, address, count, lambda own: builder.sitofp(own, VECTOR))


@intrinsic(vector, long, long)
def _unsigned(builder: Any, address: Any, count: Any) -> Any:
    return _load_bytes(builder, address, count, lambda own: builder.uitofp(own, VECTOR))


@intrinsic(vector, long, long)
def _e4m3(builder: Any, address: Any, count: Any) -> Any:
    def widen(own: Any) -> Any:
        value, size = _small_float(builder, builder.zext(own, INDICES), 3, 7)
        is_nan = builder.icmp_unsigned("==", size, _all(127))
        return builder.select(is_nan, ir.Constant(VECTOR, [float("nan")] * LANES), value)

    return _load_bytes(builder, address, count, widen)


def _load_fours(builder: Any, address: Any, high_first: Any) -> Any:
    """Return the sixteen numbers of 4 bits in eight bytes."""
    pointer = builder.inttoptr(address, ir.VectorType(_BYTE, LANES // 2).as_pointer())
    packed = builder.load(pointer, align=1)
    order = ir.Constant(INDICES, [lane // 2 for lane in range(LANES)])
    twice = builder.zext(builder.shuffle_vector(packed, packed, order), INDICES)
    shifts = ir.Constant(INDICES, [4 * (lane % 2) for lane in range(LANES)])
    swapped = builder.shl(spread(builder, builder.trunc(high_first, INT)), _all(2))
    return builder.and_(builder.lshr(twice, builder.xor(shifts, swapped)), _all(15))


@intrinsic(vector, long, long)
def _four_bits(builder: Any, address: Any, high_first: Any) -> Any:
    return builder.sitofp(_load_fours(builder, address, high_first), VECTOR)


@intrinsic(vector, long, long)
def _e2m1(builder: Any, address: Any, high_first: Any) -> Any:
    return _small_float(builder, _load_fours(builder, address, high_first), 1, 1)[0]


def _gathered(builder: Any, places: Any, table: Any) -> Any:
    """Return the elements of a table at sixteen places."""
    longs = ir.VectorType(LONG, LANES)
    offsets = builder.shl(builder.zext(places, longs), ir.Constant(longs, [2] * LANES))
    addresses = builder.add(offsets, spread(builder, table))
    pointers = builder.inttoptr(addresses, ir.VectorType(FLOAT.as_pointer(), LANES))
    all_lanes = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [1] * LANES)
    rest = ir.Constant(VECTOR, None)
    name, align = "llvm.masked.gather.v16f32.v16p0", ir.Constant(INT, 4)
    return call(builder, name, VECTOR, pointers, align, all_lanes, rest)


@intrinsic(vector, long, long, long)
def _named(builder: Any, address: Any, high_first: Any, table: Any) -> Any:
    return _gathered(builder, _load_fours(builder, address, high_first), table)


@intrinsic(vector, vector, long)
def _looked_up(builder: Any, numbers: Any, table: Any) -> Any:
    """Return the elements of a float32 table at sixteen indices."""
    return _gathered(builder, builder.fptoui(numbers, INDICES), table)


@loop
def _value(t: Any, row: int, column: int) -> Any:
    """Return the values of sixteen codes of a row, from `column` on."""
    source, left = t.codes + row * t.stride, t.width - column
    if t.kind == SIGNED:
        return _signed(source + column, left)
    if t.kind == E4M3:
        return _e4m3(source + column, left)
    if t.kind == UNSIGNED:
        return _unsigned(source + column, left)
    source += column // 2
    if t.kind == E2M1:
        return _e2m1(source, t.high_first)
    if t.kind == NAMED:
        return _named(source, t.high_first, t.table)
    return _four_bits(source, t.high_first)


@loop
def _scale_row(t: Any, row: int, to: int) -> None:
    factor, zero, scale = (splat(np.float32(t.factor)), splat(np.float32(t.zero)), splat(ZERO))
    number, stop = row * t.num_blocks, 0
    for i in range(0, t.width, LANES):
        if t.index:
            places = load_part(t.index, i, t.width - i)
            scale = _looked_up(places, t.scales + 4 * row * t.num_blocks)
            if t.zeros:
                zero = _looked_up(places, t.zeros + 4 * row * t.num_blocks)
        elif i == stop:
            scale = splat(get(t.scales, number))
            if t.zeros:
                zero = splat(get(t.zeros, number))
            number, stop = number + 1, stop + t.block
        value = _value(t, row, i)
        if t.adds_zeros:
            value = value * scale * factor + zero
        else:
            value = (value - zero) * scale * factor
        store_part(to, i, value, t.width - i)


def scale_rows(address: int) -> None:
    """Write the scaled value of each code to `result`."""
    t = task_at(address, SCALE_TASK)
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for row in share_of(t, part, t.num_tokens):
            _scale_row(t, row, t.result + 4 * row * t.width)
        part = claim(address, NEXT_PART)


def scale_to_int8(address: int) -> None:
    """Round the scaled values to int8 panels, with a new scale for each row."""
    t = task_at(address, SCALE_TASK)
    scratch = t.scratch + claim(address, NEXT_THREAD) * t.scratch_bytes
    floats = scratch + LANES * t.row_bytes
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for panel in panels_of(t, part):
            for row in rows_of(t, panel):
                own = t.first_row + row
                _scale_row(t, row, floats)
                to = scratch + own % LANES * t.row_bytes
                put(t.row_scales, own, round_row(t, FLOAT32, floats, 0, to))
            move_int8(t, panel, scratch)
        part = claim(address, NEXT_PART)
