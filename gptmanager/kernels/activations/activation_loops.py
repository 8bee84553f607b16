"""Compiled activations of MLPs, and other ops on single elements.

The arithmetic of an element does not depend on its place.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np

from gptmanager.kernels.activations.activation_kinds import (
    SWIGLU_LIMIT,
    SWIGLU_SLOPE,
    XIELU_BETA,
    XIELU_EPS,
    Activation,
)
from gptmanager.kernels.simd.dtypes import LOG2_E, MINUS_LOG2_E, ONE, ZERO, load_as, store_as
from gptmanager.kernels.simd.lanes import (
    LANES,
    claim,
    exp2,
    fma,
    keep_lanes,
    larger,
    loop,
    mark_nan,
    splat,
    sum_lanes,
    task_at,
    where_above,
    where_at_least,
)
from gptmanager.kernels.simd.threads import NEXT_PART, share_of, task_fields

KINDS: Mapping[Activation, int] = {name: kind for kind, name in enumerate(get_args(Activation))}
SILU, GELU_ERF, GELU_TANH, RELU, RELU2, CLAMPED_SWIGLU = range(6)  # in the order of `Activation`
# kinds of other ops: `scaled`, `gated` with a gate for each element or token, `add_to`, and the
# ops of the same names
SCALE, GATE, TOKEN_GATE, ADD, SCALE_ROWS, CLAMP, XIELU = range(6, 13)
# GELU with tanh is x * logistic(TANH_LINEAR * x + TANH_CUBIC * x^3). TANH_LINEAR is
# 2 * sqrt(2 / pi), and TANH_CUBIC is 0.044715 times this number.
TANH_LINEAR, TANH_CUBIC = np.float32(1.5957691216057308), np.float32(0.07135481282565715)
# Abramowitz and Stegun 7.1.26: erfc with an absolute error of at most 1.5e-7.
ERFC_STEP = np.float32(0.3275911)
ERFC_TERMS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
# The series of tanh(x) / x in x^2, for |x| up to TANH_SMALL.
TANH_TERMS, TANH_SMALL = (62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0), 0.3
# The series of (exp(x) - 1 - x) / x^2, highest term first, for x from -EXP_SMALL to 0.
EXP_TERMS, EXP_SMALL = (1 / 40320, 1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2), 0.5
HALF_ROOT = np.float32(0.7071067811865476)
TWO = np.float32(2.0)
# Coefficients of the series of atanh(x) / x in powers of x^2, highest first, for x up to 1/3.
ATANH_TERMS = (1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0)


class ActivationTask(ctypes.Structure):
    """Addresses and sizes. `factor` has the elements that multiply the activation of `x`.

    Without a gate, `factor` is 0. For the kind ADD, `factor` has the elements to add, and for XIELU
    two numbers for all tokens. Tokens are `stride` elements apart in `x`, `factor_stride` in
    `factor`, and `width` in `result`. `factor_dtype` is the dtype of `factor` for XIELU and
    SCALE_ROWS; for other kinds it is `dtype`. `scale` and `cap` are for the kind SCALE; for CLAMP,
    `cap` is the limit.
    """

    _fields_ = task_fields(
        "x factor result num_tokens width stride factor_stride kind dtype factor_dtype", "scale cap"
    )


ACTIVATION_TASK = np.dtype(ActivationTask)


@loop
def logistic(x: Any) -> Any:
    return splat(ONE) / (splat(ONE) + exp2(x * splat(MINUS_LOG2_E)))


@loop
def _erfc(z: Any) -> Any:
    """Return erfc(z) for z >= 0."""
    step = splat(ONE) / fma(z, splat(ERFC_STEP), splat(ONE))
    total = splat(np.float32(ERFC_TERMS[0]))
    for term in ERFC_TERMS[1:]:
        total = fma(total, step, splat(np.float32(term)))
    return total * step * exp2(z * z * splat(MINUS_LOG2_E))


@loop
def _gelu_erf(x: Any) -> Any:
    """Return `x * Phi(x)` as `max(x, 0) - |x| / 2 * erfc(|x| / sqrt(2))`."""
    size = larger(x, splat(ZERO) - x)
    return larger(x, splat(ZERO)) - size * splat(np.float32(0.5)) * _erfc(size * splat(HALF_ROOT))


@loop
def softplus(x: Any) -> Any:
    """Return log(1 + exp(x)), with a small relative error even if the result is small.

    With e = exp(-|x|), log(1 + e) = 2 atanh(e / (2 + e)).
    """
    size = larger(x, splat(ZERO) - x)
    e = exp2(size * splat(MINUS_LOG2_E))
    ratio = e / (e + splat(TWO))
    square = ratio * ratio
    series = splat(np.float32(ATANH_TERMS[0]))
    for term in ATANH_TERMS[1:]:
        series = fma(series, square, splat(np.float32(term)))
    return larger(x, splat(ZERO)) + splat(TWO) * ratio * series


@loop
def _activated(t: Any, x: Any) -> Any:
    if t.kind == SILU:
        return x * logistic(x)
    if t.kind == GELU_TANH:
        return x * logistic(x * fma(x * x, splat(TANH_CUBIC), splat(TANH_LINEAR)))
    if t.kind == GELU_ERF:
        return _gelu_erf(x)
    positive = mark_nan(larger(x, splat(ZERO)), x)
    return positive * positive if t.kind == RELU2 else positive


@loop
def _clamped(x: Any, low: float, high: float) -> Any:
    zero = splat(ZERO)
    limited = zero - larger(zero - larger(x, splat(np.float32(low))), splat(np.float32(-high)))
    return mark_nan(limited, x)


@loop
def _clamped_swiglu(gate: Any, up: Any) -> Any:
    """Return `(up + 1) * gate * sigmoid(1.702 * gate)` of clamped values, as in gpt-oss."""
    gate = _clamped(gate, -np.inf, SWIGLU_LIMIT)
    up = _clamped(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + splat(ONE)) * gate * logistic(gate * splat(np.float32(SWIGLU_SLOPE)))


@loop
def soft_capped(x: Any, cap: float) -> Any:
    """Return `cap * tanh(x / cap)`, accurate even where x is far smaller than the cap.

    For the exponential, `x / cap` is clamped to -15..15, because tanh(15) is 1 in float32.
    """
    ratio = x * splat(np.float32(1.0 / cap))
    square = ratio * ratio
    series = splat(np.float32(TANH_TERMS[0]))
    for term in TANH_TERMS[1:]:
        series = fma(series, square, splat(np.float32(term)))
    e = exp2(_clamped(ratio, -15.0, 15.0) * splat(np.float32(2.0) * LOG2_E))
    size, small = larger(ratio, splat(ZERO) - ratio), splat(np.float32(TANH_SMALL))
    far = where_above(size, small, (e - splat(ONE)) / (e + splat(ONE)))
    near = where_at_least(small, size, series * ratio)
    return mark_nan(far + near, x) * splat(np.float32(cap))


@loop
def _scaled(t: Any, x: Any) -> Any:
    value = x * splat(np.float32(t.scale))
    return soft_capped(value, t.cap) if t.cap else value


@loop
def _lane(x: Any, lane: int) -> Any:
    """Return a vector with one lane of x in each lane."""
    return splat(sum_lanes(keep_lanes(x, lane, lane + 1, ZERO)))


@loop
def _expm1_without_x(x: Any) -> Any:
    """Return exp(x) - 1 - x for x <= 0."""
    series = splat(np.float32(EXP_TERMS[0]))
    for term in EXP_TERMS[1:]:
        series = fma(series, x, splat(np.float32(term)))
    size, small = splat(ZERO) - x, splat(np.float32(EXP_SMALL))
    far = where_above(size, small, exp2(x * splat(LOG2_E)) - splat(ONE) - x)
    return far + where_at_least(small, size, series * x * x)


@loop
def _xielu(x: Any, slopes: Any) -> Any:
    """Return xIELU. `slopes` has those of positive and negative numbers in its first two lanes."""
    zero, beta = splat(ZERO), splat(np.float32(XIELU_BETA))
    low = zero - larger(zero - x, splat(np.float32(-XIELU_EPS)))
    left = (_expm1_without_x(low) + (low - x)) * (_lane(slopes, 1) + beta)
    right = where_above(x, zero, _lane(slopes, 0) * x * x)
    return right + where_at_least(zero, x, left) + beta * x


@loop
def _change_row(t: Any, start: int, other: int, to: int) -> None:
    """Compute SCALE_ROWS, CLAMP or XIELU for a token."""
    kind, own = t.kind, splat(ZERO)
    if kind == SCALE_ROWS:
        own = _lane(load_as(t.factor_dtype, t.factor, other, 1), 0)
    elif kind == XIELU:
        own = softplus(load_as(t.factor_dtype, t.factor, other, 2))
    for i in range(0, t.width, LANES):
        value = load_as(t.dtype, t.x, start + i, t.width - i)
        if kind == SCALE_ROWS:
            value = value * own
        elif kind == CLAMP:
            value = _clamped(value, -t.cap, t.cap)
        else:
            value = _xielu(value, own)
        store_as(t.dtype, t.result, to + i, value, t.width - i)


def activate(address: int) -> None:
    """Compute the activation of `x`, times `factor` if there is one, or another op by its kind."""
    t = task_at(address, ACTIVATION_TASK)
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in share_of(t, part, t.num_tokens):
            start, other = token * t.stride, token * t.factor_stride
            if t.kind >= SCALE_ROWS:
                _change_row(t, start, other, token * t.width)
                continue
            gate = splat(ZERO)
            if t.kind == TOKEN_GATE:
                gate = logistic(splat(sum_lanes(load_as(t.dtype, t.factor, other, 1))))
            for i in range(0, t.width, LANES):
                value = load_as(t.dtype, t.x, start + i, t.width - i)
                factor = splat(ONE)
                if t.factor and t.kind != TOKEN_GATE:
                    factor = load_as(t.dtype, t.factor, other + i, t.width - i)
                if t.kind == SCALE:
                    value = _scaled(t, value)
                elif t.kind == CLAMPED_SWIGLU:
                    value = _clamped_swiglu(value, factor)
                elif t.kind == GATE:
                    value = value * logistic(factor)
                elif t.kind == TOKEN_GATE:
                    value = value * gate
                elif t.kind == ADD:
                    value = value + factor
                else:
                    value = _activated(t, value) * factor
                store_as(t.dtype, t.result, token * t.width + i, value, t.width - i)
        part = claim(address, NEXT_PART)
