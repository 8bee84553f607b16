"""Compiled functions that unpack integers from words, and scale numbers of 8 bits or fewer."""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from gptmanager.kernels.per_token_kernels import ZERO, share_of
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
    get_int,
    intrinsic,
    lanes_from,
    load_either,
    load_part,
    long,
    loop,
    nothing,
    put_int,
    put_long,
    splat,
    spread,
    store_part,
    task_at,
    vector,
)
from gptmanager.kernels.simd.threads import NEXT_PART, task_fields

_BYTE = ir.IntType(8)
_BYTES = ir.VectorType(_BYTE, LANES)


class UnpackTask(ctypes.Structure):
    """The arguments of `unpack_rows` and `unpack_columns`.

    `words`: int32 `[num_tokens, width]`. `row_stride` and `word_stride`: its strides in elements,
    for `unpack_rows`. `result`: uint8. `bits`: the size of a number. `order`: for
    `unpack_columns`, the place of each number in its word, in four bits each.
    """

    _fields_ = task_fields("words result num_tokens width row_stride word_stride bits order")


class ScaleTask(ctypes.Structure):
    """The arguments of `scale_rows`.

    `codes`: `num_tokens` rows of bytes, `stride` bytes apart. Each has `width` codes of the same
    `kind`. `high_first`: the upper four bits of a byte with two codes have its first one. `table`:
    the sixteen values of codes of the kind `NAMED`. `result`: float32 `[num_tokens, width]`.
    `scales` and `zeros`: float32 `[num_tokens, num_blocks]`; if `zeros` is 0, `zero` is used for
    all. Column c is in block `index[c]` (float32), or without an index in block `c // block`, where
    `block` is a multiple of 16.
    """

    _fields_ = task_fields(
        "codes table scales zeros index result num_tokens width stride num_blocks block kind"
        " high_first",
        "zero factor",
    )


# Kinds of codes. Bytes: integers, or float8 (e4m3). Two in a byte: integers, float4 (E2M1), or
# places in a table of sixteen values.
UNSIGNED, SIGNED, E4M3, FOUR_BITS, E2M1, NAMED = range(6)
UNPACK_TASK, SCALE_TASK = np.dtype(UnpackTask), np.dtype(ScaleTask)


@loop
def _put_word(bits: int, word: int, to: int) -> None:
    """Store the numbers of a word as bytes."""
    word &= 0xFFFFFFFF
    if bits == 8:
        put_int(to, 0, word)
    elif bits == 4:
        word = (word | word << 16) & 0x0000FFFF0000FFFF
        word = (word | word << 8) & 0x00FF00FF00FF00FF
        put_long(to, 0, (word | word << 4) & 0x0F0F0F0F0F0F0F0F)
    else:
        for half in range(2):
            own = word >> 16 * half & 0xFFFF
            own = (own | own << 24) & 0x000000FF000000FF
            own = (own | own << 12) & 0x000F000F000F000F
            put_long(to, half, (own | own << 6) & 0x0303030303030303)


def unpack_rows(address: int) -> None:
    """Unpack words to rows of bytes.

    Sixteen rows are unpacked together, because their words may be in the same cache line.
    """
    t = task_at(address, UNPACK_TASK)
    per_word = 32 // t.bits
    panels = (t.num_tokens + LANES - 1) // LANES
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        first = panels * part // t.num_parts * LANES
        stop = min(t.num_tokens, panels * (part + 1) // t.num_parts * LANES)
        for start in range(first, stop, LANES):
            for number in range(t.width):
                for row in range(start, min(stop, start + LANES)):
                    word = get_int(t.words, row * t.row_stride + number * t.word_stride)
                    to = t.result + (row * t.width + number) * per_word
                    _put_word(t.bits, word, to)
        part = claim(address, NEXT_PART)


@intrinsic(nothing, long, long, long, long)
def _put_numbers(builder: Any, source: Any, shift: Any, mask: Any, to: Any) -> None:
    """Store one number of each of sixteen words, as sixteen bytes."""
    words = builder.load(builder.inttoptr(source, INDICES.as_pointer()), align=4)
    own = builder.lshr(words, spread(builder, builder.trunc(shift, INT)))
    own = builder.and_(own, spread(builder, builder.trunc(mask, INT)))
    pointer = builder.inttoptr(to, _BYTES.as_pointer())
    builder.store(builder.trunc(own, _BYTES), pointer, align=1)


def unpack_columns(address: int) -> None:
    """Unpack words to bytes `[num_tokens * numbers per word, width]`.

    Each row of words becomes a row of the first numbers of all words, a row of the second numbers,
    and so on. Rows are contiguous, and `width` is a multiple of sixteen.
    """
    t = task_at(address, UNPACK_TASK)
    per_word, mask = 32 // t.bits, (1 << t.bits) - 1
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for row in share_of(t, part):
            for number in range(per_word):
                shift = (t.order >> 4 * number & 15) * t.bits
                to = t.result + (row * per_word + number) * t.width
                for i in range(0, t.width, LANES):
                    _put_numbers(t.words + 4 * (row * t.width + i), shift, mask, to + i)
        part = claim(address, NEXT_PART)


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

    The second result has the bits of the codes without the sign.
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


def scale_rows(address: int) -> None:
    """Write (value - zero) * scale * factor for each code."""
    t = task_at(address, SCALE_TASK)
    factor, zero, scale = (splat(np.float32(t.factor)), splat(np.float32(t.zero)), splat(ZERO))
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for row in share_of(t, part):
            number, stop = row * t.num_blocks, 0
            for i in range(0, t.width, LANES):
                if t.index:
                    places = load_part(t.index, i, t.width - i)
                    scale = _looked_up(places, t.scales + 4 * number)
                    if t.zeros:
                        zero = _looked_up(places, t.zeros + 4 * number)
                elif i == stop:
                    scale = splat(get(t.scales, number))
                    if t.zeros:
                        zero = splat(get(t.zeros, number))
                    number, stop = number + 1, stop + t.block
                value = (_value(t, row, i) - zero) * scale * factor
                store_part(t.result, row * t.width + i, value, t.width - i)
        part = claim(address, NEXT_PART)
