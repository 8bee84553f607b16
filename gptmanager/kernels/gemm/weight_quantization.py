"""Quantizes weights: rows to int8 with a scale each, or groups of a row to 4 bits.

Compiled functions round groups, and write rows to panels, in torch's threads. `PackedMatrix` and
`Int4Matrix` describe the layouts of panels.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from torch import Tensor

from gptmanager.kernels.gemm.int4_groups import GROUP, MIDDLE, MOST, Groups, whole_groups
from gptmanager.kernels.per_token_kernels import ONE, ZERO, share_of
from gptmanager.kernels.simd.dtypes import DTYPES, load_as
from gptmanager.kernels.simd.lanes import (
    FLOAT,
    INDICES,
    INT,
    LANES,
    LONG,
    ROUND,
    VECTOR,
    call,
    claim,
    float_lanes,
    fma,
    get_int,
    int_lanes,
    intrinsic,
    larger,
    long,
    loop,
    max_lanes,
    nothing,
    put,
    put_int,
    real,
    splat,
    sum_lanes,
    task_at,
    vector,
)
from gptmanager.kernels.simd.machine_code import compiled
from gptmanager.kernels.simd.threads import NEXT_PART, Team, alike, task_fields

# The largest magnitude of a group divided by a candidate for its scale: see `round_to_groups`.
STEPS = (8.0, 7.5, 7.0, 8.5, 9.5)
_STEPS = tuple(map(np.float32, STEPS))
_LARGEST = np.float32(torch.finfo(torch.float16).max)
_INFINITY = np.float32(np.inf)
_NAN = np.float32(np.nan)
_ALONE = 1 << 15  # elements that are rounded before a second thread would be awake
_PARTS_PER_THREAD = 8
_TINY = np.finfo(np.float32).tiny
_MOST_INT8 = np.float32(127.0)
_STEPS_OF_HALF = 4  # steps of four positions in the lower halves of a group's bytes
_FOUR_BYTES = 4 * LANES  # four int8 positions of a panel
_BYTES, _FOURS = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(INT, LANES // 4)
_MASK = ir.IntType(LANES)


class RoundingTask(ctypes.Structure):
    """The addresses of rows to round, and of the results.

    `x` is `[num_tokens, width]`. The results are `values`, bytes `[num_tokens, groups, 32]`, and
    `scales`, float32 `[num_tokens, groups]`.
    """

    _fields_ = task_fields("x values scales num_tokens width x_dtype")


class PanelTask(ctypes.Structure):
    """Rows `x`, `stride` elements apart, and the panels `values` with the `scales` of their rows.

    Rows have `width` elements; `num_columns` of them are written, from `first_column` on. They
    become the matrix's rows from `first_row` on. `depth` is the depth of a panel.
    """

    _fields_ = task_fields(
        "x values scales num_tokens width stride first_column num_columns first_row depth x_dtype"
    )


ROUNDING_TASK, PANEL_TASK = np.dtype(RoundingTask), np.dtype(PanelTask)


def round_to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers from -127 to 127, as floats `[n, columns]`, and scales, float32 `[n]`.

    The scale of a row of zeros is 0.
    """
    wide = rows.float()
    scales = wide.abs().amax(dim=1) / 127
    return (wide / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)).round(), scales


def round_to_groups(rows: Tensor) -> Groups:
    """Round floats `[n, columns]` to groups without minima.

    For each group, several candidates for its scale are tried, and the one with the least squared
    error is kept. A candidate is the element with the largest magnitude divided by one of the
    numbers `-STEPS`. It is then replaced by the least-squares scale for the integers to which it
    rounds the group, as in `make_qx_quants` of llama.cpp's `ggml-quants.c`. The first candidate is
    the scale of Q4_0: the element with the largest magnitude becomes -8. A group with an element
    that is not finite has the scale NaN.
    """
    (rows,) = alike(rows)
    count, columns = rows.shape
    groups = -(-columns // GROUP)
    values = torch.empty(count, groups * GROUP, dtype=torch.uint8)
    scales = torch.empty(count, groups)
    task = RoundingTask(
        x=rows.data_ptr(),
        values=values.data_ptr(),
        scales=scales.data_ptr(),
        num_tokens=count,
        width=columns,
        x_dtype=DTYPES[rows.dtype],
    )
    run_in_team(round_groups, task, values.numel())
    return Groups(values[:, :columns], scales.to(torch.float16))


def write_int8(rows: Tensor, columns: slice, values: Tensor, scales: Tensor, first: int) -> None:
    """Round rows to int8 as `round_to_int8` does, and write `columns` of them to panels.

    The rows become the matrix's rows from `first` on. A row with an element that is not finite has
    the scale NaN.
    """
    (rows,) = alike(rows)
    start, stop, _ = columns.indices(rows.shape[1])
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
        depth=values.shape[1] * values.shape[3],
        x_dtype=DTYPES[rows.dtype],
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


def run_in_team(body: Callable[[int], None], task: Any, work: int) -> None:
    """Run a compiled body in torch's threads; for few elements (`work`), only in the caller's."""
    team = _team()
    size = team.max_size if work >= _ALONE else 1
    task.num_parts = _PARTS_PER_THREAD * size
    team.run(compiled(body), task, size)


@functools.cache
def _team() -> Team:
    return Team()


def _mask_of(builder: Any, lanes: Any) -> Any:
    return builder.zext(builder.bitcast(lanes, _MASK), LONG)


@intrinsic(long, vector, vector)
def _equal_lanes(builder: Any, one: Any, other: Any) -> Any:
    """Return a bit for each lane with equal values."""
    return _mask_of(builder, builder.fcmp_ordered("==", one, other))


@intrinsic(long, vector)
def _negative_lanes(builder: Any, value: Any) -> Any:
    """Return a bit for each lane below zero."""
    return _mask_of(builder, builder.fcmp_ordered("<", value, float_lanes(0.0)))


@intrinsic(vector, vector)
def _whole(builder: Any, value: Any) -> Any:
    """Return the nearest integers from -8 to 7, ties to even; 0 for infinities and NaN."""
    magnitude = call(builder, "llvm.fabs.v16f32", VECTOR, value)
    is_finite = builder.fcmp_ordered("<", magnitude, float_lanes(float("inf")))
    value = builder.select(is_finite, value, float_lanes(0.0))
    least, most = float_lanes(-float(MIDDLE)), float_lanes(float(MOST - MIDDLE))
    value = builder.select(builder.fcmp_ordered("<", value, least), least, value)
    value = builder.select(builder.fcmp_ordered(">", value, most), most, value)
    return builder.fsub(builder.fadd(value, float_lanes(ROUND)), float_lanes(ROUND))


@intrinsic(nothing, long, vector)
def _store_values(builder: Any, address: Any, value: Any) -> None:
    """Store sixteen integers from -8 to 7 as bytes from 0 to 15."""
    whole = builder.add(builder.fptosi(value, INDICES), int_lanes(MIDDLE))
    pointer = builder.inttoptr(address, _BYTES.as_pointer())
    builder.store(builder.trunc(whole, _BYTES), pointer, align=1)


@intrinsic(real, real)
def _as_half(builder: Any, value: Any) -> Any:
    """Round to the precision of float16, ties to even; magnitudes are at most its largest.

    This needs no instructions for float16, which some processors do not have.
    """
    bits = builder.bitcast(value, INT)
    odd = builder.and_(builder.lshr(bits, ir.Constant(INT, 13)), ir.Constant(INT, 1))
    normal = builder.add(bits, builder.add(odd, ir.Constant(INT, 0xFFF)))
    normal = builder.bitcast(builder.and_(normal, ir.Constant(INT, 0xFFFFE000)), FLOAT)
    magnitude = call(builder, "llvm.fabs.f32", FLOAT, value)
    step = ir.Constant(FLOAT, 0.5)  # numbers from here on are 2^-24 apart, as the least float16
    small = builder.fsub(builder.fadd(magnitude, step), step)
    small = call(builder, "llvm.copysign.f32", FLOAT, small, value)
    is_small = builder.fcmp_ordered("<", magnitude, ir.Constant(FLOAT, 2.0**-14))
    return builder.select(is_small, small, normal)


@loop
def _inverse(scale: Any) -> Any:
    return splat(np.float32(1.0) / scale if scale != ZERO else ZERO)


@loop
def _with_scale(first: Any, second: Any, scale: Any) -> Any:
    """Return the least-squares scale for the integers of `scale`, and its squared error."""
    by = _inverse(scale)
    low, high = _whole(first * by), _whole(second * by)
    squares = sum_lanes(low * low + high * high)
    products = sum_lanes(first * low + second * high)
    fitted = products / squares if squares != ZERO else ZERO
    fitted = _as_half(min(max(fitted, -_LARGEST), _LARGEST))
    by, wide = _inverse(fitted), splat(fitted)
    low, high = first - wide * _whole(first * by), second - wide * _whole(second * by)
    return fitted, sum_lanes(low * low + high * high)


@loop
def _largest(first: Any, second: Any) -> Any:
    """Return the element with the largest magnitude; the first of several."""
    none = splat(ZERO)
    low, high = larger(first, none - first), larger(second, none - second)
    most = max_lanes(larger(low, high))
    equal = _equal_lanes(low, splat(most)) | _equal_lanes(high, splat(most)) << LANES
    negative = _negative_lanes(first) | _negative_lanes(second) << LANES
    return -most if equal & -equal & negative else most


@loop
def _round_group(first: Any, second: Any, values: int) -> Any:
    """Write the bytes of a group, and return its scale."""
    none, scale, best = splat(ZERO), ZERO, _INFINITY
    broken = sum_lanes((first - first) + (second - second))  # NaN unless all are finite
    if broken == ZERO:
        largest = _largest(first, second)
        for steps in _STEPS:
            own, error = _with_scale(first, second, largest / -steps)
            if error < best:
                scale, best = own, error
        by = _inverse(scale)
        _store_values(values, _whole(first * by))
        _store_values(values + LANES, _whole(second * by))
        return scale
    _store_values(values, none)
    _store_values(values + LANES, none)
    return _NAN


def round_groups(address: int) -> None:
    """Round rows of `RoundingTask` to groups of 4 bits."""
    t = task_at(address, ROUNDING_TASK)
    groups = (t.width + GROUP - 1) // GROUP
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for row in share_of(t, part):
            for group in range(groups):
                left = t.width - GROUP * group
                start, place = t.width * row + GROUP * group, groups * row + group
                first = load_as(t.x_dtype, t.x, start, left)
                second = load_as(t.x_dtype, t.x, start + LANES, left - LANES)
                put(t.scales, place, _round_group(first, second, t.values + GROUP * place))
        part = claim(address, NEXT_PART)


@intrinsic(nothing, long, vector)
def _store_fours(builder: Any, address: Any, value: Any) -> None:
    """Round sixteen positions of a row to int8, and store each four of them in their panel."""
    shifted = builder.fadd(value, float_lanes(ROUND))
    fours = builder.bitcast(builder.trunc(builder.bitcast(shifted, INDICES), _BYTES), _FOURS)
    for number in range(LANES // 4):
        place = builder.add(address, ir.Constant(LONG, number * _FOUR_BYTES))
        four = builder.extract_element(fours, ir.Constant(INT, number))
        builder.store(four, builder.inttoptr(place, INT.as_pointer()))


@loop
def _int8_scale(t: Any, start: int) -> Any:
    largest, broken = splat(ZERO), splat(ZERO)
    for i in range(0, t.width, LANES):
        value = load_as(t.x_dtype, t.x, start + i, t.width - i)
        largest = larger(largest, larger(value, splat(ZERO) - value))
        broken = broken + (value - value)  # NaN unless all are finite
    return max_lanes(largest) / _MOST_INT8 if sum_lanes(broken) == ZERO else _NAN


@loop
def _panels_of(t: Any, part: int) -> range:
    """Return the rows of a part: whole panels, so that threads do not share cache lines."""
    first = t.first_row // LANES
    panels = (t.first_row + t.num_tokens + LANES - 1) // LANES - first
    start = (first + panels * part // t.num_parts) * LANES - t.first_row
    stop = (first + panels * (part + 1) // t.num_parts) * LANES - t.first_row
    return range(max(0, start), min(t.num_tokens, stop))


@loop
def _quotient(value: Any, step: Any, by: Any) -> Any:
    """Return value / step, rounded once. `by` is 1 / step.

    A division of sixteen lanes would take three times as long as these corrections.
    """
    found, back = value * by, splat(ZERO) - step
    found = fma(fma(found, back, value), by, found)
    return fma(fma(found, back, value), by, found)


def int8_rows(address: int) -> None:
    """Round rows of `PanelTask` to int8 with a scale each, and write them."""
    t = task_at(address, PANEL_TASK)
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for row in _panels_of(t, part):
            start, own = row * t.stride, t.first_row + row
            scale = _int8_scale(t, start)
            put(t.scales, own, scale)
            to = t.values + own // LANES * LANES * t.depth + own % LANES * 4
            # a scale of NaN stays NaN; the row's integers are then zeros
            scale = _TINY if scale < _TINY else scale
            step, by = splat(scale), splat(ONE / scale)
            start += t.first_column
            for i in range(0, t.num_columns, LANES):
                value = load_as(t.x_dtype, t.x, start + i, t.num_columns - i)
                _store_fours(to + i * LANES, _quotient(value, step, by))
        part = claim(address, NEXT_PART)


def int4_rows(address: int) -> None:
    """Write rows of `PanelTask` in 4 bits."""
    t = task_at(address, PANEL_TASK)
    groups = t.depth // GROUP
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for row in _panels_of(t, part):
            own = t.first_row + row
            panel, lane = own // LANES, own % LANES
            for group in range(groups):
                source = t.x + row * t.stride + group * GROUP
                to = (panel * groups + group) * _STEPS_OF_HALF * LANES + lane
                for step in range(_STEPS_OF_HALF):
                    low, high = get_int(source, step), get_int(source, step + _STEPS_OF_HALF)
                    put_int(t.values, to + step * LANES, low | high << 4)
        part = claim(address, NEXT_PART)
