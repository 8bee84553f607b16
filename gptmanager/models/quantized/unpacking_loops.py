"""Compiled functions that unpack integers from words, and scale numbers of 8 bits or fewer."""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from gptmanager.kernels.per_token_kernels import share_of
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

    `words`: int32 `[num_tokens, width]` with the strides `row_stride` and `word_stride`, in
    elements. `result`: uint8. `bits`: the size of a number. `swapped`: the upper four bits of each
    byte have its first number. `order`: for `unpack_columns`, the place of each number in its word,
    in four bits each.
    """

    _fields_ = task_fields(
        "words result num_tokens width row_stride word_stride bits swapped order"
    )


class ScaleTask(ctypes.Structure):
    """The arguments of `scale_rows`.

    `codes`: bytes `[num_tokens, width]`, with rows `stride` bytes apart. `result`: float32. A code
    is an index into `table` if the table is not 0, otherwise an integer, which may be `signed`.
    `scales` and `zeros`: float32 `[num_tokens, num_blocks]`; if `zeros` is 0, `zero` is used for
    all. Column c is in block `index[c]`, or without an index in block `c // block`, where `block`
    is a multiple of 16.
    """

    _fields_ = task_fields(
        "codes table scales zeros index result num_tokens width stride num_blocks block signed",
        "zero factor",
    )


UNPACK_TASK, SCALE_TASK = np.dtype(UnpackTask), np.dtype(ScaleTask)


@loop
def _put_word(bits: int, swapped: int, word: int, to: int) -> None:
    """Store the numbers of a word as bytes."""
    word &= 0xFFFFFFFF
    if bits == 8:
        put_int(to, 0, word)
    elif bits == 4:
        if swapped:
            word = (word & 0x0F0F0F0F) << 4 | (word >> 4) & 0x0F0F0F0F
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
                    _put_word(t.bits, t.swapped, word, to)
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


@intrinsic(vector, long, long)
def _signed(builder: Any, address: Any, count: Any) -> Any:
    return _load_bytes(builder, address, count, lambda own: builder.sitofp(own, VECTOR))


@intrinsic(vector, long, long)
def _unsigned(builder: Any, address: Any, count: Any) -> Any:
    return _load_bytes(builder, address, count, lambda own: builder.uitofp(own, VECTOR))


@intrinsic(vector, vector, long)
def _looked_up(builder: Any, numbers: Any, table: Any) -> Any:
    """Return the elements of a float32 table at sixteen indices."""
    places = builder.fptoui(numbers, INDICES)
    found = ir.Constant(VECTOR, None)
    for lane in range(LANES):
        number = ir.Constant(INT, lane)
        place = builder.zext(builder.extract_element(places, number), LONG)
        at = builder.add(table, builder.shl(place, ir.Constant(LONG, 2)))
        value = builder.load(builder.inttoptr(at, FLOAT.as_pointer()))
        found = builder.insert_element(found, value, number)
    return found


@loop
def _of_block(t: Any, numbers: int, row: int, column: int) -> Any:
    """Load the scales or zeros of sixteen columns."""
    own = numbers + 4 * row * t.num_blocks
    if t.index:
        return _looked_up(load_part(t.index, column, t.width - column), own)
    return splat(get(own, column // t.block))


def scale_rows(address: int) -> None:
    """Write (number - zero) * scale * factor for each number."""
    t = task_at(address, SCALE_TASK)
    factor, zero = splat(np.float32(t.factor)), splat(np.float32(t.zero))
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for row in share_of(t, part):
            for i in range(0, t.width, LANES):
                left, source = t.width - i, t.codes + row * t.stride + i
                value = _signed(source, left) if t.signed else _unsigned(source, left)
                if t.table:
                    value = _looked_up(value, t.table)
                if t.zeros:
                    zero = _of_block(t, t.zeros, row, i)
                value = (value - zero) * _of_block(t, t.scales, row, i) * factor
                store_part(t.result, row * t.width + i, value, left)
        part = claim(address, NEXT_PART)
