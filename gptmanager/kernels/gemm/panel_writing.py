"""Writes rows of weights to the panels of quantized matrices, by compiled functions.

See `PackedMatrix` and `Int4Matrix` for the layouts.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from torch import Tensor

from gptmanager.kernels.gemm.int4_groups import GROUP, whole_groups
from gptmanager.kernels.gemm.weight_quantization import run_in_team
from gptmanager.kernels.per_token_kernels import ZERO, share_of
from gptmanager.kernels.simd.dtypes import DTYPES, load_as
from gptmanager.kernels.simd.lanes import (
    INDICES,
    LANES,
    LONG,
    ROUND,
    VECTOR,
    claim,
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
from gptmanager.kernels.simd.threads import NEXT_PART, alike, task_fields

_LARGEST = np.float32(127.0)
_TINY, _NAN = np.finfo(np.float32).tiny, np.float32(np.nan)
_STEPS = 4  # steps of four positions in the lower halves of a group's bytes
_BYTES, _PAIRS = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(ir.IntType(16), LANES // 2)
_PAIR_BYTES = 2 * LANES  # two positions of a panel


class PanelTask(ctypes.Structure):
    """Rows `x`, `stride` elements apart, and the panels `values` with the `scales` of their rows.

    Rows have `width` elements; `num_columns` of them are written, from `first_column` on. They
    become the matrix's rows from `first_row` on. `depth`: of a panel.
    """

    _fields_ = task_fields(
        "x values scales num_tokens width stride first_column num_columns first_row depth x_dtype"
    )


PANEL_TASK = np.dtype(PanelTask)


def write_int8(rows: Tensor, columns: slice, values: Tensor, scales: Tensor, first: int) -> None:
    """Round rows to int8 as `round_to_int8` does, and write `columns` of them to panels.

    `first`: the matrix's row of the first one. A row with an element that is not finite has the
    scale NaN.
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
    if rows.shape[1] % GROUP or rows.stride(1) != 1 or rows.stride(0) % _STEPS:
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


@intrinsic(nothing, long, vector)
def _store_pairs(builder: Any, address: Any, value: Any) -> None:
    """Round sixteen positions of a row to int8, and store each two of them in their places."""
    shifted = builder.fadd(value, ir.Constant(VECTOR, [ROUND] * LANES))
    pairs = builder.bitcast(builder.trunc(builder.bitcast(shifted, INDICES), _BYTES), _PAIRS)
    for number in range(LANES // 2):
        place = builder.add(address, ir.Constant(LONG, number * _PAIR_BYTES))
        pair = builder.extract_element(pairs, ir.Constant(ir.IntType(32), number))
        builder.store(pair, builder.inttoptr(place, ir.IntType(16).as_pointer()))


@loop
def _int8_scale(t: Any, start: int) -> Any:
    largest, broken = splat(ZERO), splat(ZERO)
    for i in range(0, t.width, LANES):
        value = load_as(t.x_dtype, t.x, start + i, t.width - i)
        largest = larger(largest, larger(value, splat(ZERO) - value))
        broken = broken + (value - value)  # NaN unless all are finite
    return max_lanes(largest) / _LARGEST if sum_lanes(broken) == ZERO else _NAN


def int8_rows(address: int) -> None:
    """Round rows of `PanelTask` to int8 with a scale each, and write them."""
    t = task_at(address, PANEL_TASK)
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for row in share_of(t, part):
            start, own = row * t.stride, t.first_row + row
            scale = _int8_scale(t, start)
            put(t.scales, own, scale)
            to = t.values + own // LANES * LANES * t.depth + own % LANES * 2
            # NaN, which leaves zeros, stays NaN
            step = splat(_TINY if scale < _TINY else scale)
            start += t.first_column
            for i in range(0, t.num_columns, LANES):
                value = load_as(t.x_dtype, t.x, start + i, t.num_columns - i) / step
                _store_pairs(to + i * LANES, value)
        part = claim(address, NEXT_PART)


def int4_rows(address: int) -> None:
    """Write rows of `PanelTask` in 4 bits."""
    t = task_at(address, PANEL_TASK)
    groups = t.depth // GROUP
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for row in share_of(t, part):
            own = t.first_row + row
            panel, lane = own // LANES, own % LANES
            for group in range(groups):
                source = t.x + row * t.stride + group * GROUP
                to = (panel * groups + group) * _STEPS * LANES + lane
                for step in range(_STEPS):
                    low, high = get_int(source, step), get_int(source, step + _STEPS)
                    put_int(t.values, to + step * LANES, low | high << 4)
        part = claim(address, NEXT_PART)
