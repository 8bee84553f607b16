"""Quantizes weights: to int8 with a scale per row, or to 4 bits with a scale per group.

A group is a part of a row. Compiled functions round groups in torch's threads.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from torch import Tensor

from gptmanager.kernels.gemm.int4_groups import (
    CODEBOOKS,
    GROUP,
    MIDDLE,
    MOST,
    Codebook,
    Groups,
    whole_groups,
)
from gptmanager.kernels.simd.dtypes import DTYPES, ZERO, load_as
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
    int_lanes,
    intrinsic,
    larger,
    long,
    loop,
    max_lanes,
    nothing,
    put,
    real,
    splat,
    sum_lanes,
    task_at,
    vector,
)
from gptmanager.kernels.simd.machine_code import compiled
from gptmanager.kernels.simd.threads import NEXT_PART, Team, alike, share_of, task_fields

# Each number gives a candidate for the scale of a group: see `round_to_groups`.
STEPS = (8.0, 7.5, 7.0, 8.5, 9.5)
_STEPS = tuple(map(np.float32, STEPS))
# Likewise for a codebook, the numbers that the largest element of a group may become.
_ENDS: Mapping[Codebook, tuple[int, ...]] = {
    "e2m1": (12, 8),
    "iq4": (-127, -104, -83, -65, 69, 89, 113),
}
_LARGEST = np.float32(torch.finfo(torch.float16).max)
_NAN = np.float32(np.nan)
_ALONE = 1 << 15  # with fewer elements, one thread is done before a second thread is awake
_PARTS_PER_THREAD = 8
_AT_ONCE = 1 << 18  # elements that are rounded to a codebook at once: they take 40 bytes each
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_MASK = ir.IntType(LANES)


class RoundingTask(ctypes.Structure):
    """The addresses of rows to round, and of the results.

    `x` is `[num_tokens, width]`. The results are `values`, bytes `[num_tokens, groups, 32]`, and
    `scales`, float32 `[num_tokens, groups]`.
    """

    _fields_ = task_fields("x values scales num_tokens width x_dtype")


ROUNDING_TASK = np.dtype(RoundingTask)


def round_to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers from -127 to 127, as floats `[n, columns]`, and scales, float32 `[n]`.

    The scale of a row of zeros is 0.
    """
    wide = rows.float()
    scales = wide.abs().amax(dim=1) / 127
    return (wide / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)).round(), scales


def round_to_groups(rows: Tensor) -> Groups:
    """Round floats `[n, columns]` to groups without minima.

    Several scales are tried for each group, and the scale with the least squared error is kept.
    Each value of `STEPS` gives a candidate: the element with the largest magnitude, divided by the
    negated value. The group is rounded to integers with the candidate. The scale that is tried is
    the least-squares scale of these integers, as in `make_qx_quants` of llama.cpp's
    `ggml-quants.c`. The first candidate is the scale of Q4_0, with which the element with the
    largest magnitude becomes -8. A group with an element that is not finite has the scale NaN.
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


def round_to_codebook(rows: Tensor, codebook: Codebook) -> Groups:
    """Round floats `[n, columns]` to the nearest numbers of a codebook, in groups.

    Several scales are tried for each group, and the scale with the least squared error is kept.
    With each of them the element with the largest magnitude becomes another number of `_ENDS`. So a
    group of the codebook's numbers, the largest of which is one of these, remains as it is. A group
    with an element that is not finite has the scale NaN.
    """
    columns = rows.shape[1]
    own = rows.split(max(1, _AT_ONCE // columns))
    values, scales = zip(*(_numbers_of(it, codebook) for it in own), strict=True)
    return Groups(torch.cat(values)[:, :columns], torch.cat(scales), None, codebook)


def _numbers_of(rows: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor]:
    """Return the values, uint8 `[n, groups * 32]`, and the scales of `round_to_codebook`."""
    numbers, places = CODEBOOKS[codebook].float().sort()
    middles = (numbers[1:] + numbers[:-1]) / 2
    groups = whole_groups(rows.float())
    most = groups.gather(2, groups.abs().argmax(2, keepdim=True))

    def rounded(end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return scales, values and squared errors if the largest element becomes `end`."""
        scales = (most / end).clamp(-float(_LARGEST), float(_LARGEST)).half().float()
        wanted = (groups / scales).nan_to_num_(0.0, 0.0, 0.0)
        found = torch.bucketize(wanted, middles, out_int32=True)
        errors = (numbers[found] * scales - groups).square_().sum(2, keepdim=True)
        return scales, places[found].to(torch.uint8), errors

    first, *others = _ENDS[codebook]
    scales, values, errors = rounded(first)
    for end in others:
        own = rounded(end)
        is_better = own[2] < errors  # false if both are infinite, as for huge elements
        scales, values, errors = (
            torch.where(is_better, new, old)
            for new, old in zip(own, (scales, values, errors), strict=True)
        )
    scales[~groups.isfinite().all(2)] = torch.nan
    return values.flatten(1), scales.squeeze(2).half()


def run_in_team(body: Callable[[int], None], task: Any, work: int) -> None:
    """Run a compiled body in torch's threads, or in the caller's thread if there are few elements.

    `work`: the number of elements.
    """
    size = team_size(work)
    task.num_parts = _PARTS_PER_THREAD * size
    _team().run(compiled(body), task, size)


def team_size(work: int) -> int:
    """Return the number of threads in which `run_in_team` runs a body for `work` elements."""
    return _team().max_size if work >= _ALONE else 1


@functools.cache
def _team() -> Team:
    return Team()


def _mask_of(builder: Any, lanes: Any) -> Any:
    return builder.zext(builder.bitcast(lanes, _MASK), LONG)


@intrinsic(long, vector, vector)
def _equal_lanes(builder: Any, one: Any, other: Any) -> Any:
    """Return a mask with a set bit for each lane with equal values."""
    return _mask_of(builder, builder.fcmp_ordered("==", one, other))


@intrinsic(long, vector)
def _negative_lanes(builder: Any, value: Any) -> Any:
    """Return a mask with a set bit for each lane below zero."""
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
    """Round to the precision of float16, ties to even; `value` must be in the range of float16.

    This needs no instructions for float16, which some processors do not have.
    """
    bits = builder.bitcast(value, INT)
    odd = builder.and_(builder.lshr(bits, ir.Constant(INT, 13)), ir.Constant(INT, 1))
    normal = builder.add(bits, builder.add(odd, ir.Constant(INT, 0xFFF)))
    normal = builder.bitcast(builder.and_(normal, ir.Constant(INT, 0xFFFFE000)), FLOAT)
    magnitude = call(builder, "llvm.fabs.f32", FLOAT, value)
    step = ir.Constant(FLOAT, 0.5)  # from 0.5 to 1, float32 has steps of 2^-24, like float16 near 0
    small = builder.fsub(builder.fadd(magnitude, step), step)
    small = call(builder, "llvm.copysign.f32", FLOAT, small, value)
    is_small = builder.fcmp_ordered("<", magnitude, ir.Constant(FLOAT, 2.0**-14))
    return builder.select(is_small, small, normal)


@loop
def _inverse(scale: Any) -> Any:
    return splat(np.float32(1.0) / scale if scale != ZERO else ZERO)


@loop
def _with_scale(first: Any, second: Any, scale: Any) -> Any:
    """Round a group with `scale`, and fit another scale to the integers by least squares.

    Return the fitted scale and its squared error.
    """
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
    """Return the element with the largest magnitude, or the first of several such elements."""
    none = splat(ZERO)
    low, high = larger(first, none - first), larger(second, none - second)
    most = max_lanes(larger(low, high))
    equal = _equal_lanes(low, splat(most)) | _equal_lanes(high, splat(most)) << LANES
    negative = _negative_lanes(first) | _negative_lanes(second) << LANES
    return -most if equal & -equal & negative else most


@loop
def _round_group(first: Any, second: Any, values: int) -> Any:
    """Write the bytes of a group, and return its scale."""
    none, scale, best = splat(ZERO), ZERO, _NAN
    broken = sum_lanes((first - first) + (second - second))  # NaN unless all are finite
    if broken == ZERO:
        largest = _largest(first, second)
        for steps in _STEPS:
            own, error = _with_scale(first, second, largest / -steps)
            # the errors of huge elements are infinite: the first candidate is always taken
            if best != best or error < best:
                scale, best = own, error
        by = _inverse(scale)
        _store_values(values, _whole(first * by))
        _store_values(values + LANES, _whole(second * by))
        return scale
    _store_values(values, none)
    _store_values(values + LANES, none)
    return _NAN


def round_groups(address: int) -> None:
    """Round the rows of a `RoundingTask` to groups of 4-bit values."""
    t = task_at(address, ROUNDING_TASK)
    groups = (t.width + GROUP - 1) // GROUP
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for row in share_of(t, part, t.num_tokens):
            for group in range(groups):
                left = t.width - GROUP * group
                start, place = t.width * row + GROUP * group, groups * row + group
                first = load_as(t.x_dtype, t.x, start, left)
                second = load_as(t.x_dtype, t.x, start + LANES, left - LANES)
                put(t.scales, place, _round_group(first, second, t.values + GROUP * place))
        part = claim(address, NEXT_PART)
