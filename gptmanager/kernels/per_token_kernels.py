"""The ops that work token by token: rotation and KV write, norms, activations, conversions.

A function with the argument `address` computes the parts of a task that its thread claims. Parts
are ranges of tokens of nearly equal length. The arithmetic of a token depends only on the token.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np

from gptmanager.kernels.activation_kinds import SWIGLU_LIMIT, SWIGLU_SLOPE, Activation
from gptmanager.kernels.simd.dtypes import FLOAT32, load_as, move_item, store_as
from gptmanager.kernels.simd.lanes import (
    LANES,
    claim,
    exp2,
    fma,
    get_int,
    get_long,
    keep_lanes,
    larger,
    load_part,
    loop,
    mark_nan,
    splat,
    store_part,
    sum_lanes,
    task_at,
    where_above,
    where_at_least,
)
from gptmanager.kernels.simd.threads import NEXT_PART, task_fields

ZERO, ONE, NAN = np.float32(0.0), np.float32(1.0), np.float32(np.nan)
LOG2_E = np.float32(1.4426950408889634)
MINUS_LOG2_E = -LOG2_E
KINDS: Mapping[Activation, int] = {name: kind for kind, name in enumerate(get_args(Activation))}
SILU, GELU_ERF, GELU_TANH, RELU, RELU2, CLAMPED_SWIGLU = range(6)  # as `Activation` lists them
# kinds of other ops: `scaled`, `gated` with a gate for each element or each token, and `add_to`
SCALE, GATE, TOKEN_GATE, ADD = range(6, 10)
# GELU with tanh is x * logistic(TANH_LINEAR * x + TANH_CUBIC * x^3). TANH_LINEAR is
# 2 * sqrt(2 / pi), and TANH_CUBIC is 0.044715 times this number.
TANH_LINEAR, TANH_CUBIC = np.float32(1.5957691216057308), np.float32(0.07135481282565715)
# Abramowitz and Stegun 7.1.26: erfc with an absolute error of at most 1.5e-7.
ERFC_STEP = np.float32(0.3275911)
ERFC_TERMS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
# The series of tanh(x) / x in x^2, for |x| up to TANH_SMALL.
TANH_TERMS, TANH_SMALL = (62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0), 0.3
HALF_ROOT = np.float32(0.7071067811865476)


class RopeTask(ctypes.Structure):
    """Addresses, sizes, and dtypes. The address of a missing tensor is 0.

    `dtype` is the dtype of `qkv` and the norms, `page_dtype` the dtype of the pages and `q`.
    Tokens are `stride` elements apart in `qkv`.
    `rotated` is memory for one head of each token, float32 `[num_tokens, head_dim]`. With
    `token_major`, keys have the layout of values in a page. If `values` is 0, the keys are also the
    values, and `qkv` has no values.
    """

    _fields_ = task_fields(
        "qkv q rotated keys values positions cos_sin q_norm k_norm row_starts kv_lengths slots"
        " block_tables num_tokens table_width num_heads num_kv_heads head_dim rotary_dim"
        " tokens_per_block block_stride token_major dtype page_dtype norm_last stride",
        "eps norm_plus",
    )


class NormTask(ctypes.Structure):
    """Addresses, sizes, and the dtype of all tensors. The address of a missing tensor is 0.

    `centered` is true for a layer norm. Each token has `heads` parts of `width` elements that are
    normalized separately. Tokens are `stride` elements apart. `plus` is added to the weights.
    """

    _fields_ = task_fields(
        "x residual weight bias result num_tokens width heads stride centered dtype", "eps plus"
    )


class ActivationTask(ctypes.Structure):
    """Addresses and sizes. `factor` has the elements that multiply the activation of `x`.

    Without a gate, `factor` is 0. For the kind ADD, `factor` has the elements to add. Tokens are
    `stride` elements apart in `x`, `factor_stride` in `factor`, and `width` in `result`. `scale`
    and `cap` are for the kind SCALE.
    """

    _fields_ = task_fields(
        "x factor result num_tokens width stride factor_stride kind dtype", "scale cap"
    )


class ConversionTask(ctypes.Structure):
    """Addresses, sizes, and the dtypes of `x` and `result`, which may differ.

    A token has `given` elements in `x`, and `width` elements in `result`. Tokens are `stride`
    elements apart in `x`, and `result_stride` in `result`.
    """

    _fields_ = task_fields("x result num_tokens given width stride result_stride x_dtype dtype")


ROPE_TASK, NORM_TASK = np.dtype(RopeTask), np.dtype(NormTask)
ACTIVATION_TASK = np.dtype(ActivationTask)
CONVERSION_TASK = np.dtype(ConversionTask)


@loop
def share_of(t: Any, part: int) -> range:
    return range(t.num_tokens * part // t.num_parts, t.num_tokens * (part + 1) // t.num_parts)


@loop
def _norm_head(t: Any, source: int, start: int, dtype: int, to: int, weight: int) -> None:
    """Write the RMS norm of a head to `to`, as float32."""
    dim = t.head_dim
    total = splat(ZERO)
    for d in range(0, dim, LANES):
        value = load_as(dtype, source, start + d, dim - d)
        total = fma(value, value, total)
    mean_square = sum_lanes(total) / np.float32(dim)
    factor = splat(ONE / np.sqrt(mean_square + np.float32(t.eps)))
    for d in range(0, dim, LANES):
        value = load_as(dtype, source, start + d, dim - d) * factor
        by = load_as(t.dtype, weight, d, dim - d) + splat(np.float32(t.norm_plus))
        store_part(to, d, value * by, dim - d)


@loop
def _rotate_head(t: Any, start: int, rotated: int, weight: int, cos_sin: int) -> None:
    """Write the head of `qkv` that begins at element `start` to `rotated`, as float32.

    If `weight` is not 0, the head is normalized. If `cos_sin` is not 0, the head is rotated, after
    the norm or, with `norm_last`, before it.
    """
    source, dtype, dim = t.qkv, t.dtype, t.head_dim
    if weight and not t.norm_last:
        _norm_head(t, source, start, dtype, rotated, weight)
        source, start, dtype = rotated, 0, FLOAT32
    rotary = t.rotary_dim if cos_sin else 0
    half = rotary // 2
    for d in range(0, half, LANES):
        a = load_as(dtype, source, start + d, half - d)
        b = load_as(dtype, source, start + half + d, half - d)
        cos, sin = load_part(cos_sin, d, half - d), load_part(cos_sin, half + d, half - d)
        store_part(rotated, d, a * cos - b * sin, half - d)
        store_part(rotated, half + d, b * cos + a * sin, half - d)
    for d in range(rotary, dim, LANES):
        store_part(rotated, d, load_as(dtype, source, start + d, dim - d), dim - d)
    if weight and t.norm_last:
        _norm_head(t, rotated, 0, FLOAT32, rotated, weight)


@loop
def _write_token(t: Any, token: int, block: int, offset: int) -> None:
    dim, size, heads, kv_heads = t.head_dim, t.tokens_per_block, t.num_heads, t.num_kv_heads
    cos_sin = 0
    if t.cos_sin:
        cos_sin = t.cos_sin + 4 * get_long(t.positions, token) * t.rotary_dim
    first, rotated = token * t.stride, t.rotated + 4 * token * dim
    for head in range(heads):
        _rotate_head(t, first + head * dim, rotated, t.q_norm, cos_sin)
        for d in range(0, dim, LANES):
            item = load_part(rotated, d, dim - d)
            store_as(t.page_dtype, t.q, (token * heads + head) * dim + d, item, dim - d)
    for kv_head in range(kv_heads):
        key = first + (heads + kv_head) * dim
        value = key + kv_heads * dim
        page = block * t.block_stride + kv_head * dim * size
        to, keys = page + offset * dim, t.keys
        _rotate_head(t, key, rotated, t.k_norm, cos_sin)
        if not t.token_major:
            to, keys = 0, rotated  # the key is rounded in place, and moved to its page below
        for d in range(0, dim, LANES):
            store_as(t.page_dtype, keys, to + d, load_part(rotated, d, dim - d), dim - d)
            if t.values:
                item = load_as(t.dtype, t.qkv, value + d, dim - d)
                store_as(t.page_dtype, t.values, page + offset * dim + d, item, dim - d)
        if not t.token_major:
            for d in range(dim):
                move_item(t.page_dtype, t.keys, page + d * size + offset, rotated, d)


def rope_and_write(address: int) -> None:
    """Rotate queries and keys, and write keys and values to their pages."""
    t = task_at(address, ROPE_TASK)
    part = claim(address, NEXT_PART)
    row = 0
    while part < t.num_parts:
        for token in share_of(t, part):
            while get_int(t.row_starts, row + 1) <= token:
                row += 1
            position = get_int(t.kv_lengths, row) - get_int(t.row_starts, row + 1) + token
            table = get_int(t.slots, row) * t.table_width
            block = get_int(t.block_tables, table + position // t.tokens_per_block)
            _write_token(t, token, block, position % t.tokens_per_block)
        part = claim(address, NEXT_PART)


@loop
def _normalize_token(t: Any, x: int, start: int, first: int) -> None:
    """Normalize `width` elements of `x` from `start` on, with the weights from `first` on."""
    width = t.width
    mean = splat(ZERO)
    if t.centered:
        total = splat(ZERO)
        for i in range(0, width, LANES):
            total = total + load_as(t.dtype, x, start + i, width - i)
        mean = splat(sum_lanes(total) / np.float32(width))
    total = splat(ZERO)
    for i in range(0, width, LANES):
        value = load_as(t.dtype, x, start + i, width - i) - mean
        if i + LANES > width:
            value = keep_lanes(value, 0, width - i, ZERO)
        total = fma(value, value, total)
    mean_square = sum_lanes(total) / np.float32(width)
    factor = splat(ONE / np.sqrt(mean_square + np.float32(t.eps)))
    plus = splat(np.float32(t.plus))
    for i in range(0, width, LANES):
        value = (load_as(t.dtype, x, start + i, width - i) - mean) * factor
        value = value * (load_as(t.dtype, t.weight, first + i, width - i) + plus)
        if t.bias:
            value = value + load_as(t.dtype, t.bias, first + i, width - i)
        store_as(t.dtype, t.result, start + i, value, width - i)


def normalize(address: int) -> None:
    """Compute an RMS norm, or a layer norm if `centered`, of `x`.

    If there is a `residual`, `x` is first added to it in place, and the sum is normalized.
    """
    t = task_at(address, NORM_TASK)
    width = t.width
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in share_of(t, part):
            x, start = t.x, token * t.stride
            if t.residual:
                x = t.residual
                for i in range(0, width, LANES):
                    value = load_as(t.dtype, t.x, start + i, width - i)
                    value = load_as(t.dtype, x, start + i, width - i) + value
                    store_as(t.dtype, x, start + i, value, width - i)
            for head in range(t.heads):
                _normalize_token(t, x, start + head * width, head * width)
        part = claim(address, NEXT_PART)


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


def convert(address: int) -> None:
    """Convert tokens to another dtype and pad them with zeros."""
    t = task_at(address, CONVERSION_TASK)
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in share_of(t, part):
            for i in range(0, t.width, LANES):
                value = splat(ZERO)
                if i < t.given:
                    value = load_as(t.x_dtype, t.x, token * t.stride + i, t.given - i)
                store_as(t.dtype, t.result, token * t.result_stride + i, value, t.width - i)
        part = claim(address, NEXT_PART)


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


def activate(address: int) -> None:
    """Compute the activation of `x`, times `factor` if there is one, or another op by its kind."""
    t = task_at(address, ACTIVATION_TASK)
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in share_of(t, part):
            start, other = token * t.stride, token * t.factor_stride
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
