"""Writes rows to panels: as they are, rounded to int8 with a scale for each row, or in 4 bits.

Compiled functions in torch's threads copy sixteen rows at a time, so that they read and write whole
cache lines. `PackedMatrix` and `Int4Matrix` describe the layouts of panels.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from torch import Tensor

from gptmanager.kernels.gemm.int4_groups import GROUP, whole_groups
from gptmanager.kernels.gemm.weight_quantization import run_in_team, team_size
from gptmanager.kernels.simd.dtypes import DTYPES, ONE, ZERO, load_as
from gptmanager.kernels.simd.lanes import (
    INDICES,
    LANES,
    ROUND,
    claim,
    float_lanes,
    fma,
    get_int,
    intrinsic,
    larger,
    long,
    loop,
    max_lanes,
    nothing,
    put,
    put_int,
    splat,
    sum_lanes,
    task_at,
    vector,
)
from gptmanager.kernels.simd.threads import NEXT_PART, NEXT_THREAD, alike, task_fields
from gptmanager.kernels.simd.tiles import LINE_BYTES, move_panel, move_row

_NAN = np.float32(np.nan)
_TINY = np.finfo(np.float32).tiny
_MOST_INT8 = np.float32(127.0)
_STEPS_OF_HALF = 4  # steps per group; a step packs 4 positions from each half of the group
_WORD = 4  # bytes; a line of a panel has one word of each row
_PAD = 64  # bytes after each row of scratch, so that not all rows compete for the same cache lines
_BYTES = ir.VectorType(ir.IntType(8), LANES)


class PanelTask(ctypes.Structure):
    """Rows `x`, `stride` elements apart, and the panels `values` with the `scales` of their rows.

    Rows have `width` elements; `num_columns` of them are written, from `first_column` on. The rows
    become the matrix's rows from `first_row` on. `depth` is the number of bytes of a row in its
    panel; `int4_rows` expects the number of positions of a row instead. `scratch` has
    `scratch_bytes` for each thread, with a row of `row_bytes` for each row of a panel.
    """

    _fields_ = task_fields(
        "x values scales num_tokens width stride first_column num_columns first_row depth x_dtype"
        " scratch scratch_bytes row_bytes"
    )


PANEL_TASK = np.dtype(PanelTask)


def write_words(rows: Tensor, values: Tensor, first: int, first_word: int) -> None:
    """Write words of 32 bits, int32 `[n, words]`, to whole panels from row `first` on.

    `first` and n are multiples of sixteen. The words are written from `first_word` of each row on.
    """
    task = PanelTask(
        x=rows.data_ptr(),
        values=values.data_ptr() + LINE_BYTES * first_word,
        num_tokens=len(rows),
        width=rows.shape[1],
        stride=rows.stride(0),
        first_row=first,
        depth=panel_depth(values),
    )
    run_in_team(word_rows, task, rows.numel())


def write_int8(rows: Tensor, columns: slice, values: Tensor, scales: Tensor, first: int) -> None:
    """Round rows to int8 as `round_to_int8` does, and write `columns` of them to panels.

    The rows become the matrix's rows from `first` on. A row with an element that is not finite has
    the scale NaN.
    """
    (rows,) = alike(rows)
    start, stop, _ = columns.indices(rows.shape[1])
    scratch, sizes = panel_scratch(stop - start, rows.numel())
    task = PanelTask(
        x=rows.data_ptr(),
        values=values.data_ptr(),
        scales=scales.data_ptr(),
        num_tokens=len(rows),
        width=rows.shape[1],
        stride=rows.shape[1],
        first_column=start,
        num_columns=stop - start,
        first_row=first,
        depth=panel_depth(values),
        x_dtype=DTYPES[rows.dtype],
        scratch=scratch.data_ptr(),
        **sizes,
    )
    run_in_team(int8_rows, task, rows.numel())


def write_int4(rows: Tensor, values: Tensor, first: int) -> None:
    """Write numbers from 0 to 15, uint8 `[n, columns]`, as the matrix's rows from `first` on."""
    if rows.shape[1] % GROUP or rows.stride(1) != 1 or rows.stride(0) % _STEPS_OF_HALF:
        rows = whole_groups(rows).flatten(1).contiguous()
    task = PanelTask(
        x=rows.data_ptr(),
        values=values.data_ptr(),
        num_tokens=len(rows),
        stride=rows.stride(0),
        first_row=first,
        depth=rows.shape[1],
    )
    run_in_team(int4_rows, task, rows.numel())


def panel_scratch(columns: int, work: int, more_bytes: int = 0) -> tuple[Tensor, dict[str, int]]:
    """Return scratch in which each thread has the int8 rows of a panel, and the task's sizes.

    `work`: see `run_in_team`. Each thread has `more_bytes` after its rows.
    """
    row_bytes = -(-columns // LINE_BYTES) * LINE_BYTES + _PAD
    sizes = {"row_bytes": row_bytes, "scratch_bytes": LANES * row_bytes + more_bytes}
    return torch.empty(team_size(work) * sizes["scratch_bytes"], dtype=torch.uint8), sizes


def panel_depth(values: Tensor) -> int:
    """Return the number of bytes of one row in a panel."""
    return math.prod(values.shape[1:]) * values.itemsize // LANES


@loop
def panels_of(t: Any, part: int) -> range:
    """Return the panels of a part. Parts are whole panels, so threads do not share cache lines."""
    first = t.first_row // LANES
    panels = (t.first_row + t.num_tokens + LANES - 1) // LANES - first
    return range(first + panels * part // t.num_parts, first + panels * (part + 1) // t.num_parts)


@loop
def rows_of(t: Any, panel: int) -> range:
    """Return the indices of the task's rows that are in a panel of the matrix."""
    start = panel * LANES - t.first_row
    return range(max(0, start), min(t.num_tokens, start + LANES))


def word_rows(address: int) -> None:
    """Write words of `PanelTask` to whole panels."""
    t = task_at(address, PANEL_TASK)
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for panel in panels_of(t, part):
            source = t.x + (panel * LANES - t.first_row) * t.stride * _WORD
            move_panel(source, t.stride * _WORD, t.width, t.values + panel * LANES * t.depth)
        part = claim(address, NEXT_PART)


@intrinsic(nothing, long, vector)
def _store_int8(builder: Any, address: Any, value: Any) -> None:
    """Round sixteen positions of a row to int8."""
    shifted = builder.fadd(value, float_lanes(ROUND))
    integers = builder.trunc(builder.bitcast(shifted, INDICES), _BYTES)
    builder.store(integers, builder.inttoptr(address, _BYTES.as_pointer()), align=1)


@loop
def _int8_scale(dtype: int, x: int, start: int, width: int) -> Any:
    largest, broken = splat(ZERO), splat(ZERO)
    for i in range(0, width, LANES):
        value = load_as(dtype, x, start + i, width - i)
        largest = larger(largest, larger(value, splat(ZERO) - value))
        broken = broken + (value - value)  # NaN unless all are finite
    return max_lanes(largest) / _MOST_INT8 if sum_lanes(broken) == ZERO else _NAN


@loop
def quotient(value: Any, step: Any, by: Any) -> Any:
    """Return value / step, rounded once. `by` is 1 / step.

    A division of sixteen lanes would take three times as long as these corrections.
    """
    found, back = value * by, splat(ZERO) - step
    found = fma(fma(found, back, value), by, found)
    return fma(fma(found, back, value), by, found)


@loop
def round_row(t: Any, dtype: int, x: int, start: int, to: int) -> Any:
    """Round columns of a row to int8 at `to`, padded with zeros; return the scale of the row."""
    own = _int8_scale(dtype, x, start, t.width)
    # a scale of NaN stays NaN; the row's integers are then zeros
    scale = _TINY if own < _TINY else own
    step, by = splat(scale), splat(ONE / scale)
    start += t.first_column
    for i in range(0, (t.num_columns + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES, LANES):
        value = load_as(dtype, x, start + i, t.num_columns - i)
        _store_int8(to + i, quotient(value, step, by))
    return own


@loop
def move_int8(t: Any, panel: int, scratch: int) -> None:
    """Copy the rows of a panel, which `round_row` has written to scratch, to the panel."""
    rows, to = rows_of(t, panel), t.values + panel * LANES * t.depth
    num_words = (t.num_columns + LINE_BYTES - 1) // LINE_BYTES * LANES
    if len(rows) == LANES:
        move_panel(scratch, t.row_bytes, num_words, to)
    else:
        for row in rows:
            lane = (t.first_row + row) % LANES
            move_row(scratch + lane * t.row_bytes, num_words, to, lane)


def int8_rows(address: int) -> None:
    """Round rows of `PanelTask` to int8 with a scale each, and write them."""
    t = task_at(address, PANEL_TASK)
    scratch = t.scratch + claim(address, NEXT_THREAD) * t.scratch_bytes
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for panel in panels_of(t, part):
            for row in rows_of(t, panel):
                own = t.first_row + row
                to = scratch + own % LANES * t.row_bytes
                put(t.scales, own, round_row(t, t.x_dtype, t.x, row * t.stride, to))
            move_int8(t, panel, scratch)
        part = claim(address, NEXT_PART)


def int4_rows(address: int) -> None:
    """Write rows of `PanelTask` in 4 bits."""
    t = task_at(address, PANEL_TASK)
    groups = t.depth // GROUP
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for panel in panels_of(t, part):
            for row in rows_of(t, panel):
                lane = (t.first_row + row) % LANES
                for group in range(groups):
                    source = t.x + row * t.stride + group * GROUP
                    to = (panel * groups + group) * _STEPS_OF_HALF * LANES + lane
                    for step in range(_STEPS_OF_HALF):
                        low, high = get_int(source, step), get_int(source, step + _STEPS_OF_HALF)
                        put_int(t.values, to + step * LANES, low | high << 4)
        part = claim(address, NEXT_PART)
