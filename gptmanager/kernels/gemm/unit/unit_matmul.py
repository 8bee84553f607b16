"""Matmuls of tokens with an 8-bit or 4-bit matrix, by a matrix unit for bytes (Intel AMX)."""

from __future__ import annotations

from typing import Any

from gptmanager.kernels.gemm.int4_activations import planes_size
from gptmanager.kernels.gemm.int4_groups import GROUP
from gptmanager.kernels.gemm.int4_matmul import scales_of
from gptmanager.kernels.gemm.int4_tiles import GROUP_BYTES, SCALE_BYTES
from gptmanager.kernels.gemm.matmul_task import (
    MATMUL_TASK,
    SCRATCH_BYTES,
    begin,
    finish,
    panels,
    part_of,
)
from gptmanager.kernels.gemm.matrix_tiles import CONFIGURATION_BYTES, configure, release
from gptmanager.kernels.gemm.quantized_activations import MAX_POSITIONS, split_row_size
from gptmanager.kernels.gemm.unit.int8_unit_tiles import (
    SPAN_GROUPS,
    STEP,
    UNIT_ROWS,
    groups_tile,
    stretch_tile,
    unpack_groups,
    unpack_numbers,
)
from gptmanager.kernels.simd.lanes import LANES, claim, loop, task_at
from gptmanager.kernels.simd.threads import NEXT_PART

SEVERAL_ROWS = 16  # up to this number of rows, 4-bit matrices are not widened to bfloat16
_FOR_INT8, _FOR_INT4 = CONFIGURATION_BYTES, 2 * CONFIGURATION_BYTES
_first_rows, _next_rows = stretch_tile(True), stretch_tile(False)
_eight_rows, _sixteen_rows = groups_tile(8), groups_tile(16)


@loop
def _configured(t: Any, rows: int, kind: int, now: int) -> int:
    """Configure the unit for `rows` rows, at most 16; return the address of the configuration.

    Do nothing if `now`, the address of the current configuration, is already the right one.
    """
    wanted = (t.full if rows == UNIT_ROWS else t.tail) + kind
    if wanted != now:
        configure(wanted)
    return int(wanted)


@loop
def _multiply_stretch(
    t: Any, c: int, x: int, k: int, b0: int, b1: int, next0: int, next1: int, rows: int, sums: int,
    now: int,
) -> int:  # fmt: skip
    """Multiply up to MAX_POSITIONS positions of the rows, from position `k` on, with two panels.

    Add the results to `c`, or overwrite `c` if `k` is 0. Return the address of the unit's
    configuration.
    """
    depth, stride = t.depth, split_row_size(t.depth)
    steps, factors = min(MAX_POSITIONS, depth - k) // STEP, 2 * depth + 4 * (k // MAX_POSITIONS)
    for row in range(0, rows, UNIT_ROWS):
        some, own, to = min(UNIT_ROWS, rows - row), x + row * stride, c + 256 * row
        now = _configured(t, some, _FOR_INT8, now)
        arguments = to, own + k, stride, depth, own + factors, b0, b1, next0, next1
        if row == 0:
            _first_rows(*arguments, steps, some, sums, k > 0)
        else:
            _next_rows(*arguments, steps, some, sums, k > 0)
    return now


@loop
def _share_int8(t: Any, address: int) -> None:
    """Compute the parts that a thread claims. A row of `x` has `split_row_size(depth)` bytes."""
    scratch, counter = begin(t, address)
    depth, c, sums, now = t.depth, scratch, scratch + SCRATCH_BYTES, 0
    size = MAX_POSITIONS * LANES
    part = claim(counter, NEXT_PART)
    while part < t.num_parts:
        groups, first, rows = part_of(t, part)
        x = t.x + first * split_row_size(depth)
        for group in groups:
            p0, p1, p2, p3 = panels(t, group)
            for k in range(0, depth, MAX_POSITIONS):
                at = k * LANES
                b0, b1, b2, b3, own = p0 + at, p1 + at, p2 + at, p3 + at, (rows, sums)
                now = _multiply_stretch(t, c, x, k, b0, b1, b2, b3, *own, now)
                second = c + 2 * 4 * LANES
                now = _multiply_stretch(t, second, x, k, b2, b3, b0 + size, b1 + size, *own, now)
            finish(t, scratch, group, first, rows)
        part = claim(counter, NEXT_PART)
    release()


@loop
def _multiply_groups(
    t: Any, c: int, x: int, k: int, panel: int, rows: int, span: int, now: int
) -> int:
    """Multiply up to SPAN_GROUPS groups of the rows, from group `k` on, with a panel.

    Add the results to `c`, or overwrite `c` if `k` is 0. Return the address of the unit's
    configuration.
    """
    num_groups, minima, stride = t.depth // GROUP, t.minima, planes_size(t.depth)
    count, values = min(SPAN_GROUPS, num_groups - k), panel + k * GROUP_BYTES
    scales = scales_of(t, panel) + k * SCALE_BYTES
    if t.codebook:
        unpack_numbers(span, values, scales, t.codebook, count)
    else:
        unpack_groups(span, values, scales, minima, count)
    for row in range(0, rows, UNIT_ROWS):
        some, own, to = min(UNIT_ROWS, rows - row), x + row * stride, c + 256 * row
        now = _configured(t, some, _FOR_INT4, now)
        factors, following = own + t.depth + 4 * k, values + SPAN_GROUPS * GROUP_BYTES
        arguments = to, own + GROUP * k, factors, 4 * num_groups, stride, span, count, some
        if some <= 8:
            _eight_rows(*arguments, minima, following, k > 0)
        else:
            _sixteen_rows(*arguments, minima, following, k > 0)
    return now


@loop
def _share_int4(t: Any, address: int) -> None:
    """Compute the parts that a thread claims. A row of `x` has `planes_size(depth)` bytes."""
    scratch, counter = begin(t, address)
    span, now, num_groups = scratch + SCRATCH_BYTES, 0, t.depth // GROUP
    part = claim(counter, NEXT_PART)
    while part < t.num_parts:
        groups, first, rows = part_of(t, part)
        x = t.x + first * planes_size(t.depth)
        for group in groups:
            for k in range(0, num_groups, SPAN_GROUPS):
                for number, panel in enumerate(panels(t, group)):
                    c = scratch + 4 * LANES * number
                    now = _multiply_groups(t, c, x, k, panel, rows, span, now)
            finish(t, scratch, group, first, rows)
        part = claim(counter, NEXT_PART)
    release()


def multiply_int8_in_unit(address: int) -> None:
    """Multiply int16 rows, as upper and lower bytes, with an int8 matrix."""
    _share_int8(task_at(address, MATMUL_TASK), address)


def multiply_int4_in_unit(address: int) -> None:
    """Multiply int8 rows with a 4-bit matrix."""
    _share_int4(task_at(address, MATMUL_TASK), address)
