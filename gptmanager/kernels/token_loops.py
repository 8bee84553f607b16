"""The ops that work token by token: rotation and KV write, norms, activations, embeddings.

Each body is the share of one thread. Bodies know addresses and sizes only; a token's arithmetic
depends on the token alone. Parts of a task are equal ranges of its tokens.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gptmanager.kernels.simd.dtypes import FLOAT32, get_byte, load_as, move_item, store_as
from gptmanager.kernels.simd.lanes import (
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
from gptmanager.kernels.simd.threads import NEXT_PART, NEXT_THREAD, task_fields

ZERO, ONE, NAN = np.float32(0.0), np.float32(1.0), np.float32(np.nan)
MINUS_LOG2_E = np.float32(-1.4426950408889634)
SILU_MUL, GELU_TANH, GELU_ERF = 0, 1, 2
# 2 * sqrt(2 / pi), which makes the tanh of GELU a logistic function, and that times 0.044715.
TANH_LINEAR, TANH_CUBIC = np.float32(1.5957691216057308), np.float32(0.07135481282565715)
# Abramowitz and Stegun 7.1.26: erfc to 1.5e-7.
ERFC_STEP = np.float32(0.3275911)
ERFC_TERMS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
HALF_ROOT = np.float32(0.7071067811865476)


class RopeTask(ctypes.Structure):
    """Addresses (0: none), sizes, and dtypes: of `qkv` and the norms; of the pages and `q`.

    `rotated`: float32 `[num_tokens, head_dim]`, for one head of a token. `token_major`: keys have
    the layout of values in a page.
    """

    _fields_ = task_fields(
        "qkv q rotated keys values positions cos_sin q_norm k_norm row_starts kv_lengths slots"
        " block_tables num_tokens table_width num_heads num_kv_heads head_dim rotary_dim"
        " tokens_per_block block_stride token_major dtype page_dtype",
        "eps",
    )


class NormTask(ctypes.Structure):
    """Addresses (0: none), sizes, the dtype of all; `centered` for a layer norm."""

    _fields_ = task_fields("x residual weight bias result num_tokens width centered dtype", "eps")


class ActivationTask(ctypes.Structure):
    """`x` and `factor` have `stride` elements from token to token, `result` has `width`."""

    _fields_ = task_fields("x factor result num_tokens width stride kind dtype")


class ConversionTask(ctypes.Structure):
    """`x` has `given` elements a token, and `result` has `width`, of another dtype perhaps."""

    _fields_ = task_fields("x result num_tokens given width x_dtype dtype")


class EmbeddingTask(ctypes.Structure):
    """Addresses (`scales` 0: none), and the index of element k of row i in `table`:
    `i // lanes * panel + i % lanes * positions + k // positions * step + k % positions`.

    `wide`: float32 `[width]` for each thread; `dtype`: of `result`, and of a table without scales.
    `adds`: add to the values in `result`; rows are contiguous.
    """

    _fields_ = task_fields(
        "ids table scales wide result num_tokens num_rows width lanes panel positions step dtype"
        " adds"
    )


ROPE_TASK, NORM_TASK = np.dtype(RopeTask), np.dtype(NormTask)
ACTIVATION_TASK, EMBEDDING_TASK = np.dtype(ActivationTask), np.dtype(EmbeddingTask)
CONVERSION_TASK = np.dtype(ConversionTask)


@loop
def share_of(t: Any, part: int) -> range:
    return range(t.num_tokens * part // t.num_parts, t.num_tokens * (part + 1) // t.num_parts)


@loop
def _rotate_head(t: Any, start: int, rotated: int, weight: int, cos_sin: int) -> None:
    """Write the head of `qkv` from element `start` on to `rotated`, as float32.

    It is normalized if there is a weight, and rotated if there are angles.
    """
    source, dtype, dim = t.qkv, t.dtype, t.head_dim
    if weight:
        total = splat(ZERO)
        for d in range(0, dim, LANES):
            value = load_as(dtype, source, start + d, dim - d)
            total = fma(value, value, total)
        mean_square = sum_lanes(total) / np.float32(dim)
        factor = splat(ONE / np.sqrt(mean_square + np.float32(t.eps)))
        for d in range(0, dim, LANES):
            value = load_as(dtype, source, start + d, dim - d) * factor
            store_part(rotated, d, value * load_as(dtype, weight, d, dim - d), dim - d)
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


@loop
def _write_token(t: Any, token: int, block: int, offset: int) -> None:
    dim, size, heads, kv_heads = t.head_dim, t.tokens_per_block, t.num_heads, t.num_kv_heads
    cos_sin = 0
    if t.cos_sin:
        cos_sin = t.cos_sin + 4 * get_long(t.positions, token) * t.rotary_dim
    first, rotated = token * (heads + 2 * kv_heads), t.rotated + 4 * token * dim
    for head in range(heads):
        _rotate_head(t, (first + head) * dim, rotated, t.q_norm, cos_sin)
        for d in range(0, dim, LANES):
            item = load_part(rotated, d, dim - d)
            store_as(t.page_dtype, t.q, (token * heads + head) * dim + d, item, dim - d)
    for kv_head in range(kv_heads):
        key = (first + heads + kv_head) * dim
        value = key + kv_heads * dim
        page = block * t.block_stride + kv_head * dim * size
        to, keys = page + offset * dim, t.keys
        _rotate_head(t, key, rotated, t.k_norm, cos_sin)
        if not t.token_major:
            to, keys = 0, rotated  # rounded where it is
        for d in range(0, dim, LANES):
            store_as(t.page_dtype, keys, to + d, load_part(rotated, d, dim - d), dim - d)
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
def _normalize_token(t: Any, x: int, start: int) -> None:
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
    for i in range(0, width, LANES):
        value = (load_as(t.dtype, x, start + i, width - i) - mean) * factor
        value = value * load_as(t.dtype, t.weight, i, width - i)
        if t.bias:
            value = value + load_as(t.dtype, t.bias, i, width - i)
        store_as(t.dtype, t.result, start + i, value, width - i)


def normalize(address: int) -> None:
    """Compute an RMS norm, or a layer norm if `centered`, of `x`, or of `residual` + x in place."""
    t = task_at(address, NORM_TASK)
    width = t.width
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in share_of(t, part):
            x, start = t.x, token * width
            if t.residual:
                x = t.residual
                for i in range(0, width, LANES):
                    value = load_as(t.dtype, t.x, start + i, width - i)
                    value = load_as(t.dtype, x, start + i, width - i) + value
                    store_as(t.dtype, x, start + i, value, width - i)
            _normalize_token(t, x, start)
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
                    value = load_as(t.x_dtype, t.x, token * t.given + i, t.given - i)
                store_as(t.dtype, t.result, token * t.width + i, value, t.width - i)
        part = claim(address, NEXT_PART)


@loop
def _embed_token(t: Any, token: int, wide: int) -> None:
    row, to, width, positions = get_long(t.ids, token), token * t.width, t.width, t.positions
    if row < 0 or row >= t.num_rows:  # NaN makes an invalid id visible; no other memory is read
        for i in range(0, width, LANES):
            store_as(t.dtype, t.result, to + i, splat(NAN), width - i)
        return
    first = row // t.lanes * t.panel + row % t.lanes * positions
    if t.adds:
        for i in range(0, width, LANES):
            value = load_as(t.dtype, t.result, to + i, width - i)
            value = value + load_as(t.dtype, t.table, first + i, width - i)
            store_as(t.dtype, t.result, to + i, value, width - i)
        return
    if not t.scales:
        for k in range(width):
            index = first + k // positions * t.step + k % positions
            move_item(t.dtype, t.result, to + k, t.table, index)
        return
    scale = get(t.scales, row)
    for k in range(width):
        put(wide, k, get_byte(t.table, first + k // positions * t.step + k % positions) * scale)
    for i in range(0, width, LANES):
        store_as(t.dtype, t.result, to + i, load_part(wide, i, width - i), width - i)


def embed(address: int) -> None:
    """Look up rows of an embedding table by token id; NaN for an id out of range."""
    t = task_at(address, EMBEDDING_TASK)
    wide = t.wide + claim(address, NEXT_THREAD) * 4 * t.width
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in share_of(t, part):
            _embed_token(t, token, wide)
        part = claim(address, NEXT_PART)


def activate(address: int) -> None:
    """Compute the SiLU of `x` times `factor`, or a GELU of `x`."""
    t = task_at(address, ACTIVATION_TASK)
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in share_of(t, part):
            start = token * t.stride
            for i in range(0, t.width, LANES):
                x = load_as(t.dtype, t.x, start + i, t.width - i)
                if t.kind == SILU_MUL:
                    factor = load_as(t.dtype, t.factor, start + i, t.width - i)
                    value = x * logistic(x) * factor
                elif t.kind == GELU_TANH:
                    cube = fma(x * x, splat(TANH_CUBIC), splat(TANH_LINEAR))
                    value = x * logistic(x * cube)
                else:
                    value = _gelu_erf(x)
                store_as(t.dtype, t.result, token * t.width + i, value, t.width - i)
        part = claim(address, NEXT_PART)
