"""`MatmulTask`: a matmul of tokens with a packed matrix, which threads compute in parts.

A part is a chunk of rows times some groups of four panels. The panels of a group are a quarter of
the matrix apart, so that a thread with consecutive groups reads four long pieces of memory. The
sums of a chunk stay in scratch until they are complete. Then they are scaled, the bias is added,
the activation is applied, and they are rounded and stored.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gptmanager.kernels.activations.activation_loops import logistic
from gptmanager.kernels.gemm.matrix_tiles import PANELS
from gptmanager.kernels.simd.dtypes import load_as, store_as
from gptmanager.kernels.simd.lanes import LANES, claim, load, load_part, loop
from gptmanager.kernels.simd.threads import NEXT_THREAD, task_fields

CHUNK_ROWS = 192  # the float32 sums of a chunk and a group fit into the L2 cache with the panels
SCRATCH_BYTES = 4 * CHUNK_ROWS * PANELS * LANES


class MatmulTask(ctypes.Structure):
    """Addresses (or 0), sizes, and the layout of a group of panels.

    The fields up to `tail` depend on the call. `x` has `depth` elements per row: float32, or
    bfloat16 for dot products of pairs and for the bfloat16 matrix unit. Functions that quantize `x`
    to int16 themselves read `x` in `dtype`, the dtype of `result`. Other functions that multiply
    integers get rows in `x` that are already quantized.

    A part has `part_groups` groups. `num_groups` is the number of all groups, and also the distance
    in panels from the first to the second panel of a group, and from the third to the fourth.
    `second` is the distance in panels from the first to the third panel of a group. With `silu`,
    the SiLU of the first and second panels' sums is multiplied by the sums of the third and fourth.
    `positions` is the number of positions of a row that are adjacent in a panel (not used for 4
    bits), and `position_bytes` the size of one position of all rows of a panel.

    `full` and `tail` are the addresses of the
    configurations of the matrix unit (Intel AMX) for sixteen rows and for the remaining rows.
    `groups` is the address of the float16 scales of a 4-bit matrix, and `minima` the distance in
    bytes from the scales to the minima, or 0 without minima. `codebook` is the address of the
    sixteen int8 numbers of its codebook, or 0 without one. `counter` is the address of the task
    that has the counter of parts, or 0 if it is this task.
    """

    _fields_ = task_fields(
        "x result bias bias_dtype scratch scratch_bytes rows num_chunks part_groups full tail"
        " matrix scales columns depth num_panels num_groups second silu position_bytes positions"
        " dtype groups minima codebook counter"
    )


MATMUL_TASK = np.dtype(MatmulTask)


@loop
def begin(t: Any, address: int) -> Any:
    """Return the addresses of a thread's scratch and of the task that counts the parts."""
    counter = t.counter if t.counter else address
    return t.scratch + claim(address, NEXT_THREAD) * t.scratch_bytes, counter


@loop
def _finished(
    c: int, index: int, scales: int, bias: int, bias_dtype: int, column: int, count: int
) -> Any:
    value = load(c, index)
    if scales:
        value = value * load_part(scales, column, count)
    if bias:
        value = value + load_as(bias_dtype, bias, column, count)
    return value


@loop
def finish(t: Any, c: int, group: int, first_row: int, rows: int) -> None:
    """Apply scales, bias and activation to the sums of a chunk and a group, and store them."""
    # The fields are read once, because the compiler must assume that a store changes the task.
    scales, bias, silu, columns = t.scales, t.bias, t.silu, t.columns
    result, dtype, bias_dtype = t.result, t.dtype, t.bias_dtype
    num_panels, apart = 2 if silu else PANELS, t.num_groups
    for row in range(rows):
        start = (first_row + row) * columns
        for n in range(num_panels):
            column = LANES * (group + n * apart)
            count, index = columns - column, LANES * (PANELS * row + n)
            if count <= 0:
                break
            value = _finished(c, index, scales, bias, bias_dtype, column, count)
            if silu:
                behind = index + 2 * LANES, scales, bias, bias_dtype, columns + column
                value = value * logistic(value) * _finished(c, *behind, count)
            store_as(dtype, result, start + column, value, count)


@loop
def panel(t: Any, number: int) -> int:
    """Return the address of panel `number`, or of the last panel if `number` is too large."""
    address = t.matrix + min(number, t.num_panels - 1) * t.depth * t.position_bytes
    return int(address)


@loop
def panels(t: Any, group: int) -> Any:
    """Return the addresses of a group's four panels."""
    second, third = group + t.num_groups, group + t.second
    return panel(t, group), panel(t, second), panel(t, third), panel(t, third + t.num_groups)


@loop
def part_of(t: Any, part: int) -> Any:
    """Return the groups of a part, its first row, and its number of rows."""
    first = part // t.num_chunks * t.part_groups
    groups = range(first, min(first + t.part_groups, t.num_groups))
    first_row = part % t.num_chunks * CHUNK_ROWS
    return groups, first_row, min(CHUNK_ROWS, t.rows - first_row)
