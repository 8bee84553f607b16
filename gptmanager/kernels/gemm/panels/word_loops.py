"""Compiled functions that unpack small integers from words, to bytes or to panels of 4 bits."""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from gptmanager.kernels.gemm.int4_groups import GROUP
from gptmanager.kernels.gemm.panels.panel_writing import panels_of
from gptmanager.kernels.simd.lanes import (
    INDICES,
    INT,
    LANES,
    claim,
    get_int,
    int_lanes,
    intrinsic,
    long,
    loop,
    nothing,
    put_int,
    put_long,
    spread,
    task_at,
    times,
)
from gptmanager.kernels.simd.threads import NEXT_PART, share_of, task_fields
from gptmanager.kernels.simd.tiles import (
    LINE_BYTES,
    exchanged,
    load_lines,
    store_line,
    transposed,
)

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # row 0 to 7 of a word -> place of the row's number
AWQ_ROWS = 8 * LANES  # rows in sixteen words, which one vector holds
_WORDS = 4  # words of a row in a group of 32 columns
_STEPS, _FOUR = 4, 4  # lines of a group in a panel, and bytes of a row in a line
_GROUP_BYTES = _STEPS * LINE_BYTES
_BYTES = ir.VectorType(ir.IntType(8), LANES)


class UnpackTask(ctypes.Structure):
    """The arguments of `unpack_rows` and `unpack_columns`.

    `words`: int32 `[num_tokens, width]`. `result`: uint8. `bits`: the number of bits of a packed
    number. Only `unpack_rows` reads `row_stride` and `word_stride`, the strides of `words` in
    elements. Only `unpack_columns` reads `order`: the place of each number in its word, with four
    bits for each place.
    """

    _fields_ = task_fields("words result num_tokens width row_stride word_stride bits order")


class GroupTask(ctypes.Structure):
    """The arguments of `word_groups` and `awq_groups`.

    `words`: int32, with eight numbers of 4 bits in each word. In `word_groups`, `row_stride` is the
    distance in elements between rows, and `word_stride` the distance between the words of a row. In
    `awq_groups`, they are the distances between columns, and between the words of a column.
    `values`: the panels of a matrix, with `num_groups` groups in a row. The numbers are written to
    `num_tokens` rows from `first_row` on, which must fill whole panels.
    """

    _fields_ = task_fields("words values num_tokens first_row num_groups row_stride word_stride")


UNPACK_TASK, GROUP_TASK = np.dtype(UnpackTask), np.dtype(GroupTask)


@loop
def _put_word(bits: int, word: int, to: int) -> None:
    """Store each number of a word as a byte."""
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
    and so on. The rows of `words` must be contiguous, and `width` a multiple of sixteen.
    """
    t = task_at(address, UNPACK_TASK)
    per_word, mask = 32 // t.bits, (1 << t.bits) - 1
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for row in share_of(t, part, t.num_tokens):
            for number in range(per_word):
                shift = (t.order >> 4 * number & 15) * t.bits
                to = t.result + (row * per_word + number) * t.width
                for i in range(0, t.width, LANES):
                    _put_numbers(t.words + 4 * (row * t.width + i), shift, mask, to + i)
        part = claim(address, NEXT_PART)


def _spread_half(builder: Any, words: Any, half: int) -> Any:
    """Return the four numbers in a half of each word as the four bytes of a word."""
    own = builder.lshr(words, int_lanes(16)) if half else builder.and_(words, int_lanes(0xFFFF))
    for shift, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F)):
        own = builder.and_(builder.or_(own, builder.shl(own, int_lanes(shift))), int_lanes(mask))
    return own


def _store_group(builder: Any, words: Sequence[Any], target: Any, offset: int) -> None:
    """Store a group of sixteen rows. `words` are four vectors, each with one word of each row."""
    for step in range(_STEPS):
        number, half = divmod(step, 2)
        low = _spread_half(builder, words[number], half)
        high = _spread_half(builder, words[number + 2], half)
        line = builder.or_(low, builder.shl(high, int_lanes(4)))
        store_line(builder, target, offset + step * LINE_BYTES, line)


@intrinsic(nothing, long, long, long)
def _put_group(builder: Any, source: Any, stride: Any, target: Any) -> None:
    """Write a group of sixteen rows. The words of a row are `stride` bytes apart."""
    _store_group(builder, load_lines(builder, source, stride, _WORDS), target, 0)


@intrinsic(nothing, long, long, long)
def _put_four_groups(builder: Any, source: Any, stride: Any, target: Any) -> None:
    """Write four groups of sixteen rows. Rows are `stride` bytes apart."""
    words = transposed(builder, load_lines(builder, source, stride, LANES))
    for group in range(LANES // _WORDS):
        own = words[group * _WORDS :][:_WORDS]
        _store_group(builder, own, target, group * _GROUP_BYTES)


def word_groups(address: int) -> None:
    """Write the numbers of a `GroupTask` to panels. Each word has eight columns of a row.

    If `word_stride` is 1, `num_groups` must be a multiple of four; else `row_stride` must be 1.
    """
    t = task_at(address, GROUP_TASK)
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        panels = panels_of(t, part)
        if t.word_stride == 1:
            for panel in panels:
                source = t.words + 4 * t.row_stride * (panel * LANES - t.first_row)
                to = t.values + panel * t.num_groups * _GROUP_BYTES
                for group in range(0, t.num_groups, LANES // _WORDS):
                    _put_four_groups(
                        source + 4 * _WORDS * group, 4 * t.row_stride, to + group * _GROUP_BYTES
                    )
        else:  # the words of neighboring rows are in the same memory page
            for group in range(t.num_groups):
                source = t.words + 4 * _WORDS * t.word_stride * group
                for panel in panels:
                    to = t.values + (panel * t.num_groups + group) * _GROUP_BYTES
                    own = source + 4 * (panel * LANES - t.first_row)
                    _put_group(own, 4 * t.word_stride, to)
        part = claim(address, NEXT_PART)


def _transposed_numbers(builder: Any, vectors: Sequence[Any]) -> list[Any]:
    """Transpose the eight words of each lane, a matrix of eight by eight numbers of 4 bits."""
    found = [*vectors]
    for bit, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        lower, upper, shift = int_lanes(mask), int_lanes(~mask), int_lanes(4 * bit)
        for number in range(len(found)):
            if not number & bit:
                one, other = found[number], found[number + bit]
                found[number] = builder.or_(
                    builder.and_(one, lower), builder.and_(builder.shl(other, shift), upper)
                )
                found[number + bit] = builder.or_(
                    builder.and_(builder.lshr(one, shift), lower), builder.and_(other, upper)
                )
    return found


@intrinsic(nothing, long, long, long, long)
def _put_awq_group(builder: Any, source: Any, stride: Any, target: Any, panel: Any) -> None:
    """Write a group of 128 rows to eight panels, `panel` bytes apart.

    Columns are `stride` bytes apart. Each column has sixteen words of eight rows.
    """
    columns = load_lines(builder, source, stride, GROUP)
    in_order = [lane % 8 * 2 + lane // 8 for lane in range(LANES)]
    for step in range(_STEPS):
        low = columns[step * _FOUR :][:_FOUR]
        high = columns[GROUP // 2 + step * _FOUR :][:_FOUR]
        both = [it for pair in zip(low, high, strict=True) for it in pair]
        numbers = _transposed_numbers(builder, both)
        rows = [numbers[place] for place in AWQ_ORDER]
        for bit in (4, 2, 1):
            rows = exchanged(builder, rows, bit, 2 * bit)
        for number, words in enumerate(rows):
            line = builder.shuffle_vector(words, words, ir.Constant(INDICES, in_order))
            own = builder.add(target, times(builder, panel, number))
            store_line(builder, own, step * LINE_BYTES, line)


def awq_groups(address: int) -> None:
    """Write the numbers of a `GroupTask` to panels. Each word has eight rows of a column.

    The order in a word is `AWQ_ORDER`. `num_tokens` must be a multiple of 128, and `word_stride` 1.
    """
    t = task_at(address, GROUP_TASK)
    blocks, size = t.num_tokens // AWQ_ROWS, t.num_groups * _GROUP_BYTES
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for group in range(t.num_groups):
            for block in share_of(t, part, blocks):
                source = t.words + 4 * (t.row_stride * GROUP * group + LANES * block)
                panel = t.first_row // LANES + AWQ_ROWS // LANES * block
                to = t.values + panel * size + group * _GROUP_BYTES
                _put_awq_group(source, 4 * t.row_stride, to, size)
        part = claim(address, NEXT_PART)
