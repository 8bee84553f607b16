"""Tiles of sixteen rows of four-byte words, transposed in registers.

A tile is transposed so that memory is read and written in whole cache lines.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from gptmanager.kernels.simd.lanes import (
    INDICES,
    LANES,
    get_int,
    intrinsic,
    long,
    loop,
    nothing,
    plus,
    put_int,
    times,
)

LINE_BYTES = 4 * LANES  # a line has one word of each of sixteen rows


def load_lines(builder: Any, address: Any, stride: Any, count: int) -> list[Any]:
    """Load `count` vectors of sixteen words, which begin `stride` bytes apart."""
    addresses = [builder.add(address, times(builder, stride, number)) for number in range(count)]
    pointers = [builder.inttoptr(it, INDICES.as_pointer()) for it in addresses]
    return [builder.load(pointer, align=1) for pointer in pointers]


def store_line(builder: Any, address: Any, offset: int, words: Any) -> None:
    """Store a vector of sixteen words at `offset` bytes after `address`."""
    pointer = builder.inttoptr(plus(builder, address, offset), INDICES.as_pointer())
    builder.store(words, pointer, align=4)


def exchanged(builder: Any, vectors: Sequence[Any], distance: int, lanes: int) -> list[Any]:
    """Move words: exchange one bit of the index of their vector with one bit of their lane index.

    `distance` is the bit of the vector index, `lanes` the bit of the lane index: 1, 2, 4 or 8.
    """
    found = [*vectors]
    first = [LANES + lane - lanes if lane & lanes else lane for lane in range(LANES)]
    second = [LANES + lane if lane & lanes else lane + lanes for lane in range(LANES)]
    for number in range(len(found)):
        if not number & distance:
            pair = found[number], found[number + distance]
            for place, order in ((number, first), (number + distance, second)):
                found[place] = builder.shuffle_vector(*pair, ir.Constant(INDICES, order))
    return found


def transposed(builder: Any, vectors: Sequence[Any]) -> list[Any]:
    """Transpose sixteen vectors of sixteen words."""
    found = [*vectors]
    for bit in (8, 4, 2, 1):
        found = exchanged(builder, found, bit, bit)
    return found


@intrinsic(nothing, long, long, long)
def _move_tile(builder: Any, source: Any, stride: Any, target: Any) -> None:
    """Write sixteen words of each of sixteen rows as sixteen lines.

    The rows begin `stride` bytes apart.
    """
    rows = load_lines(builder, source, stride, LANES)
    for number, words in enumerate(transposed(builder, rows)):
        store_line(builder, target, number * LINE_BYTES, words)


@loop
def move_panel(source: int, stride: int, num_words: int, target: int) -> None:
    """Write `num_words` words of each of sixteen rows as `num_words` lines.

    The rows begin `stride` bytes apart.
    """
    whole = num_words // LANES * LANES
    for i in range(0, whole, LANES):
        _move_tile(source + 4 * i, stride, target + LINE_BYTES * i)
    for i in range(whole, num_words):
        for lane in range(LANES):
            put_int(target + LINE_BYTES * i, lane, get_int(source + stride * lane, i))


@loop
def move_row(source: int, num_words: int, target: int, lane: int) -> None:
    """Write word i of a row to the lane `lane` of line i."""
    for i in range(num_words):
        put_int(target + LINE_BYTES * i, lane, get_int(source, i))
