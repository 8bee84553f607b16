"""The ops that take tokens one by one: rotation and KV write, norms, activations.

What one thread does of each. It knows addresses and sizes only; a token's arithmetic depends on
nothing but the token. Parts of a task are equal ranges of its tokens.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gptmanager.kernels.lanes import (
    LANES,
    claim,
    exp2,
    fma,
    get,
    get_int,
    get_long,
    keep_lanes,
    larger,
    load_part,
    loop,
    put,
    splat,
    store_part,
    sum_lanes,
    task_at,
)
from gptmanager.kernels.threads import NEXT_PART, task_fields

ZERO, ONE = np.float32(0.0), np.float32(1.0)
MINUS_LOG2_E = np.float32(-1.4426950408889634)
SILU_MUL, GELU_TANH, GELU_ERF = 0, 1, 2
# 2 * sqrt(2 / pi), which makes the tanh of GELU a logistic function, and that times 0.044715.
TANH_LINEAR, TANH_CUBIC = np.float32(1.5957691216057308), np.float32(0.07135481282565715)
# Abramowitz and Stegun 7.1.26: erfc to 1.5e-7.
ERFC_STEP = np.float32(0.3275911)
ERFC_TERMS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
HALF_ROOT = np.float32(0.7071067811865476)


class RopeTask(ctypes.Structure):
    """Addresses (0: none) and sizes; `q` has room for one more head for each token.

    `token_major`: the keys of a page lie as its values do.
    """

    _fields_ = task_fields(
        "qkv q keys values positions cos_sin q_norm k_norm row_starts kv_lengths slots block_tables"
        " num_tokens table_width num_heads num_kv_heads head_dim rotary_dim tokens_per_block"
        " block_stride token_major",
        "eps",
    )


class NormTask(ctypes.Structure):
    """Addresses (0: none) and sizes; `centered` for a layer norm."""

    _fields_ = task_fields("x residual weight bias result num_tokens width centered", "eps")


class ActivationTask(ctypes.Structure):
    """`x` and `factor` have `stride` elements from token to token, `result` has `width`."""

    _fields_ = task_fields("x factor result num_tokens width stride kind")


ROPE_TASK, NORM_TASK = np.dtype(RopeTask), np.dtype(NormTask)
ACTIVATION_TASK = np.dtype(ActivationTask)


@loop
def _share(t: Any, part: int) -> range:
    return range(t.num_tokens * part // t.num_parts, t.num_tokens * (part + 1) // t.num_parts)


@loop
def _turn_head(t: Any, source: int, target: int, weight: int, cos_sin: int) -> None:
    """One head of a token, normalized if there is a weight, turned if there are angles."""
    dim = t.head_dim
    if weight:
        total = splat(ZERO)
        for d in range(0, dim, LANES):
            value = load_part(source, d, dim - d)
            total = fma(value, value, total)
        mean_square = sum_lanes(total) / np.float32(dim)
        factor = splat(ONE / np.sqrt(mean_square + np.float32(t.eps)))
        for d in range(0, dim, LANES):
            value = load_part(source, d, dim - d) * factor * load_part(weight, d, dim - d)
            store_part(target, d, value, dim - d)
        source = target
    turned = t.rotary_dim if cos_sin else 0
    half = turned // 2
    for d in range(0, half, LANES):
        a, b = load_part(source, d, half - d), load_part(source, half + d, half - d)
        cos, sin = load_part(cos_sin, d, half - d), load_part(cos_sin, half + d, half - d)
        store_part(target, d, a * cos - b * sin, half - d)
        store_part(target, half + d, b * cos + a * sin, half - d)
    for d in range(turned, dim, LANES):
        store_part(target, d, load_part(source, d, dim - d), dim - d)


@loop
def _write_token(t: Any, token: int, block: int, offset: int) -> None:
    dim, size, heads, kv_heads = t.head_dim, t.tokens_per_block, t.num_heads, t.num_kv_heads
    cos_sin = 0
    if t.cos_sin:
        cos_sin = t.cos_sin + 4 * get_long(t.positions, token) * t.rotary_dim
    source = t.qkv + 4 * token * (heads + 2 * kv_heads) * dim
    for head in range(heads):
        target = t.q + 4 * (token * heads + head) * dim
        _turn_head(t, source + 4 * head * dim, target, t.q_norm, cos_sin)
    turned = t.q + 4 * (t.num_tokens * heads + token) * dim
    for kv_head in range(kv_heads):
        key = source + 4 * (heads + kv_head) * dim
        value = key + 4 * kv_heads * dim
        page = block * t.block_stride + kv_head * dim * size
        if t.token_major:
            _turn_head(t, key, t.keys + 4 * (page + offset * dim), t.k_norm, cos_sin)
        else:
            _turn_head(t, key, turned, t.k_norm, cos_sin)
            for d in range(dim):
                put(t.keys, page + d * size + offset, get(turned, d))
        for d in range(0, dim, LANES):
            item = load_part(value, d, dim - d)
            store_part(t.values, page + offset * dim + d, item, dim - d)


def rope_and_write(address: int) -> None:
    """Queries turned, keys turned and written to their pages, values written."""
    t = task_at(address, ROPE_TASK)
    part = claim(address, NEXT_PART)
    row = 0
    while part < t.num_parts:
        for token in _share(t, part):
            while get_int(t.row_starts, row + 1) <= token:
                row += 1
            position = get_int(t.kv_lengths, row) - get_int(t.row_starts, row + 1) + token
            table = get_int(t.slots, row) * t.table_width
            block = get_int(t.block_tables, table + position // t.tokens_per_block)
            _write_token(t, token, block, position % t.tokens_per_block)
        part = claim(address, NEXT_PART)


@loop
def _normalize_token(t: Any, x: int, result: int) -> None:
    width = t.width
    mean = splat(ZERO)
    if t.centered:
        total = splat(ZERO)
        for i in range(0, width, LANES):
            total = total + load_part(x, i, width - i)
        mean = splat(sum_lanes(total) / np.float32(width))
    total = splat(ZERO)
    for i in range(0, width, LANES):
        value = load_part(x, i, width - i) - mean
        if i + LANES > width:
            value = keep_lanes(value, 0, width - i, ZERO)
        total = fma(value, value, total)
    mean_square = sum_lanes(total) / np.float32(width)
    factor = splat(ONE / np.sqrt(mean_square + np.float32(t.eps)))
    for i in range(0, width, LANES):
        value = (load_part(x, i, width - i) - mean) * factor
        value = value * load_part(t.weight, i, width - i)
        if t.bias:
            value = value + load_part(t.bias, i, width - i)
        store_part(result, i, value, width - i)


def normalize(address: int) -> None:
    """RMS norm, or layer norm if `centered`, of `x` or of `residual`, to which x is added."""
    t = task_at(address, NORM_TASK)
    width = t.width
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in _share(t, part):
            x = t.x + 4 * token * width
            if t.residual:
                residual = t.residual + 4 * token * width
                for i in range(0, width, LANES):
                    value = load_part(residual, i, width - i) + load_part(x, i, width - i)
                    store_part(residual, i, value, width - i)
                x = residual
            _normalize_token(t, x, t.result + 4 * token * width)
        part = claim(address, NEXT_PART)


@loop
def logistic(x: Any) -> Any:
    return splat(ONE) / (splat(ONE) + exp2(x * splat(MINUS_LOG2_E)))


@loop
def _erfc(z: Any) -> Any:
    """For z >= 0."""
    step = splat(ONE) / fma(z, splat(ERFC_STEP), splat(ONE))
    total = splat(np.float32(ERFC_TERMS[0]))
    for term in ERFC_TERMS[1:]:
        total = fma(total, step, splat(np.float32(term)))
    return total * step * exp2(z * z * splat(MINUS_LOG2_E))


@loop
def _gelu_erf(x: Any) -> Any:
    """`x * Phi(x)` as `max(x, 0) - |x| / 2 * erfc(|x| / sqrt(2))`."""
    size = larger(x, splat(ZERO) - x)
    return larger(x, splat(ZERO)) - size * splat(np.float32(0.5)) * _erfc(size * splat(HALF_ROOT))


def activate(address: int) -> None:
    """SiLU of `x` times `factor`, or a GELU of `x`."""
    t = task_at(address, ACTIVATION_TASK)
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in _share(t, part):
            start = token * t.stride
            for i in range(0, t.width, LANES):
                x = load_part(t.x, start + i, t.width - i)
                if t.kind == SILU_MUL:
                    value = x * logistic(x) * load_part(t.factor, start + i, t.width - i)
                elif t.kind == GELU_TANH:
                    cube = fma(x * x, splat(TANH_CUBIC), splat(TANH_LINEAR))
                    value = x * logistic(x * cube)
                else:
                    value = _gelu_erf(x)
                store_part(t.result, token * t.width + i, value, t.width - i)
        part = claim(address, NEXT_PART)
