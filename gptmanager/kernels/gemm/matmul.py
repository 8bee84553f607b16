"""Multiplies rows with a matrix of floats or int8.

There is one function for each dtype and kind of instruction.
"""

from __future__ import annotations

from typing import Any

from gptmanager.kernels.gemm.int8_tiles import FOUR, SPAN, has_int8_dots, int8_tile, lay_out
from gptmanager.kernels.gemm.int16_tiles import (
    FEW_ROWS,
    INT16_DEPTH,
    has_int16_dots,
    int16_tile,
)
from gptmanager.kernels.gemm.matmul_task import (
    MATMUL_TASK,
    SCRATCH_BYTES,
    begin,
    finish,
    panels,
    part_of,
)
from gptmanager.kernels.gemm.matrix_tiles import (
    configure,
    over_rows,
    release,
    unit_tile,
    widen_panel,
)
from gptmanager.kernels.gemm.quantized_activations import (
    MARK_BYTES,
    MAX_POSITIONS,
    STRETCH,
    quantize_to_int16,
    row_size,
)
from gptmanager.kernels.simd.lanes import LANES, claim, loop, loop_named, task_at
from gptmanager.kernels.simd.threads import NEXT_PART

BLOCK = 256  # positions (depth) of four panels that stay in the L1 cache for all rows
WIDE_BYTES = 4 * BLOCK * LANES  # size of BLOCK positions of one panel, widened to float32
STREAMED_ROWS = 6  # up to this number of rows, a pass reads the full depth of four panels
WIDEN_FROM = 32  # number of rows; with fewer rows, widening costs more time than it saves

_thirty_two, _sixteen = unit_tile(2), unit_tile(1)


def _share_by_lanes(dtype: str) -> Any:
    """Return a function that computes the parts that its thread claims, in SIMD lanes.

    `dtype`: the dtype of the matrix, or "bfloat16 pairs" for bfloat16 that is multiplied in pairs.
    For at least `WIDEN_FROM` rows, panels of float16, int8, and bfloat16 without pairs are first
    widened to float32, which is exact.
    """
    is_pairs, name = dtype == "bfloat16 pairs", dtype.replace(" ", "_")
    widens, item = not is_pairs and dtype != "float32", 2 if is_pairs else 4
    multiply_few, widen = over_rows(dtype), widen_panel(dtype.removesuffix(" pairs"))
    multiply_many = over_rows("float32") if widens else multiply_few

    @loop_named(f"share_{name}")
    def share(t: Any, address: int) -> None:
        scratch, counter = begin(t, address)
        w0 = scratch + SCRATCH_BYTES
        w1, w2, w3 = w0 + WIDE_BYTES, w0 + 2 * WIDE_BYTES, w0 + 3 * WIDE_BYTES
        part = claim(counter, NEXT_PART)
        while part < t.num_parts:
            groups, first, rows = part_of(t, part)
            x, stride = t.x + item * first * t.depth, item * t.depth
            span = BLOCK if rows > STREAMED_ROWS else t.depth
            for group in groups:
                b0, b1, b2, b3 = panels(t, group)
                for k in range(0, t.depth, span):
                    a, at, count = x + item * k, k * t.position_bytes, min(span, t.depth - k)
                    if widens and rows >= WIDEN_FROM:
                        widen(w0, b0 + at, count)
                        widen(w1, b1 + at, count)
                        widen(w2, b2 + at, count)
                        widen(w3, b3 + at, count)
                        multiply_many(scratch, a, stride, w0, w1, w2, w3, count, k > 0, rows)
                    else:
                        multiply_few(
                            *(scratch, a, stride, b0 + at, b1 + at, b2 + at, b3 + at),
                            *(count // t.positions, k > 0, rows),
                        )
                finish(t, scratch, group, first, rows)
            part = claim(counter, NEXT_PART)

    return share


def _share_by_int8() -> Any:
    """Return a function that computes the parts that its thread claims, in int8 arithmetic."""
    three, two, one = (int8_tile(rows) for rows in (3, 2, 1))

    @loop_named("share_int8_by_int8")
    def share(t: Any, address: int) -> None:
        scratch, counter = begin(t, address)
        depth, b, size = t.depth, scratch + SCRATCH_BYTES, LANES * SPAN
        stride = row_size(depth)
        part = claim(counter, NEXT_PART)
        while part < t.num_parts:
            groups, first, rows = part_of(t, part)
            x = t.x + first * stride
            for group in groups:
                b0, b1, b2, b3 = panels(t, group)
                for k in range(0, depth, SPAN):
                    fours, more, at = min(SPAN, depth - k) // FOUR, k > 0, k * LANES
                    lay_out(b, b0 + at, fours)
                    lay_out(b + size, b1 + at, fours)
                    lay_out(b + 2 * size, b2 + at, fours)
                    lay_out(b + 3 * size, b3 + at, fours)
                    left, marks = depth + k, 2 * depth + MARK_BYTES * (k // STRETCH)
                    for row in range(0, rows - 2, 3):
                        c, a = scratch + 256 * row, x + row * stride
                        three(c, a + k, a + left, a + marks, stride, b, fours, more)
                    row = rows // 3 * 3
                    c, a = scratch + 256 * row, x + row * stride
                    if rows - row == 2:
                        two(c, a + k, a + left, a + marks, stride, b, fours, more)
                    elif rows - row == 1:
                        one(c, a + k, a + left, a + marks, stride, b, fours, more)
                finish(t, scratch, group, first, rows)
            part = claim(counter, NEXT_PART)

    return share


def _share_by_int16() -> Any:
    """Return a function that computes the parts that its thread claims, for few rows.

    There are at most `FEW_ROWS` rows. Each thread first quantizes all rows to int16.
    """
    four, three, two, one = (int16_tile(rows) for rows in (4, 3, 2, 1))

    @loop_named("share_int8_by_int16")
    def share(t: Any, address: int) -> None:
        scratch, counter = begin(t, address)
        depth, stride = t.depth, 2 * t.depth
        x, factors_stride = scratch + SCRATCH_BYTES, 4 * ((depth - 1) // MAX_POSITIONS + 1)
        factors = x + FEW_ROWS * stride
        for row in range(t.rows):  # in every thread, which is faster than waiting for one thread
            to = factors + row * factors_stride
            quantize_to_int16(t.dtype, t.x, row, depth, depth, x + row * stride, to, False)
        part = claim(counter, NEXT_PART)
        while part < t.num_parts:
            groups, _, rows = part_of(t, part)
            for group in groups:
                b0, b1, b2, b3 = panels(t, group)
                for number, k in enumerate(range(0, depth, MAX_POSITIONS)):
                    steps = min(MAX_POSITIONS, depth - k) // INT16_DEPTH
                    a, by, at, more = x + 2 * k, factors + 4 * number, k * LANES, k > 0
                    c0, c1, c2, c3 = b0 + at, b1 + at, b2 + at, b3 + at
                    own = scratch, a, stride, by, factors_stride
                    if rows == 1:
                        one(*own, c0, c1, c2, c3, steps, more)
                    elif rows == 2:
                        two(*own, c0, c1, c2, c3, steps, more)
                    elif rows == 3:
                        three(*own, c0, c1, c2, c3, steps, more)
                    else:
                        four(*own, c0, c1, c2, c3, steps, more)
                finish(t, scratch, group, 0, rows)
            part = claim(counter, NEXT_PART)

    return share


_float32, _bfloat16 = _share_by_lanes("float32"), _share_by_lanes("bfloat16")
_float16, _int8 = _share_by_lanes("float16"), _share_by_lanes("int8")
_pairs = _share_by_lanes("bfloat16 pairs")
_int8_by_int16 = _share_by_int16() if has_int16_dots() else _int8
_int8_by_int8 = _share_by_int8() if has_int8_dots() else _int8


def multiply_float32(address: int) -> None:
    """Compute `result = x @ matrix.T` for a float32 matrix.

    The next three functions do the same for a matrix of another dtype.
    """
    _float32(task_at(address, MATMUL_TASK), address)


def multiply_bfloat16(address: int) -> None:
    _bfloat16(task_at(address, MATMUL_TASK), address)


def multiply_float16(address: int) -> None:
    _float16(task_at(address, MATMUL_TASK), address)


def multiply_int8(address: int) -> None:
    _int8(task_at(address, MATMUL_TASK), address)


def multiply_int8_by_int16(address: int) -> None:
    """Quantize at most `FEW_ROWS` rows to int16, and multiply them with an int8 matrix."""
    _int8_by_int16(task_at(address, MATMUL_TASK), address)


def multiply_pairs(address: int) -> None:
    """Multiply bfloat16 rows with a bfloat16 matrix, by dot products of pairs."""
    _pairs(task_at(address, MATMUL_TASK), address)


def multiply_int8_by_int8(address: int) -> None:
    """Multiply rows that are already quantized to int8 with an int8 matrix."""
    _int8_by_int8(task_at(address, MATMUL_TASK), address)


@loop
def multiply_by_tiles(
    t: Any, scratch: int, b0: int, b1: int, b2: int, b3: int, first: int, rows: int
) -> None:
    """Compute a chunk of rows for a group of bfloat16 panels, with the matrix unit (Intel AMX)."""
    span = BLOCK if rows >= 32 else t.depth
    for k in range(0, t.depth, span):
        steps, at = min(span, t.depth - k) // 32, 2 * LANES * k
        configure(t.full)
        for row in range(0, rows - 31, 32):
            c, x = scratch + 256 * row, t.x + 2 * ((first + row) * t.depth + k)
            _thirty_two(c, x, t.depth, b0 + at, b1 + at, b2 + at, b3 + at, steps, k > 0)
        for row in range(rows // 32 * 32, rows, 16):
            if rows - row < 16:
                configure(t.tail)
            c, x = scratch + 256 * row, t.x + 2 * ((first + row) * t.depth + k)
            _sixteen(c, x, t.depth, b0 + at, b1 + at, b2 + at, b3 + at, steps, k > 0)


@loop
def _share_by_unit(t: Any, address: int) -> None:
    """Compute the parts that a thread claims, with the matrix unit."""
    scratch, counter = begin(t, address)
    part = claim(counter, NEXT_PART)
    while part < t.num_parts:
        groups, first, rows = part_of(t, part)
        for group in groups:
            b0, b1, b2, b3 = panels(t, group)
            multiply_by_tiles(t, scratch, b0, b1, b2, b3, first, rows)
            finish(t, scratch, group, first, rows)
        part = claim(counter, NEXT_PART)
    release()


def multiply_by_unit(address: int) -> None:
    """Multiply bfloat16 rows with a bfloat16 matrix, with the matrix unit."""
    _share_by_unit(task_at(address, MATMUL_TASK), address)
