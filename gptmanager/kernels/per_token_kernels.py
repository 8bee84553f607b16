"""The ops that work token by token: rotation and KV write, norms, conversions.

A function with the argument `address` computes the parts of a task that its thread claims. Parts
are ranges of tokens of nearly equal length. The arithmetic of a token depends only on the token.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gptmanager.kernels.simd.dtypes import FLOAT32, ONE, ZERO, load_as, move_item, store_as
from gptmanager.kernels.simd.lanes import (
    LANES,
    claim,
    fma,
    get_int,
    get_long,
    keep_lanes,
    load_part,
    loop,
    splat,
    store_part,
    sum_lanes,
    task_at,
)
from gptmanager.kernels.simd.threads import NEXT_PART, share_of, task_fields


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
    The weights, and biases if any, of a part are `weight_stride` elements after those of the part
    before it.
    """

    _fields_ = task_fields(
        "x residual weight bias result num_tokens width heads stride weight_stride centered dtype",
        "eps plus",
    )


class ConversionTask(ctypes.Structure):
    """Addresses, sizes, and the dtypes of `x` and `result`, which may differ.

    A token has `given` elements in `x`, and `width` elements in `result`. Tokens are `stride`
    elements apart in `x`, and `result_stride` in `result`.
    """

    _fields_ = task_fields("x result num_tokens given width stride result_stride x_dtype dtype")


ROPE_TASK, NORM_TASK = np.dtype(RopeTask), np.dtype(NormTask)
CONVERSION_TASK = np.dtype(ConversionTask)


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
        for token in share_of(t, part, t.num_tokens):
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
        for token in share_of(t, part, t.num_tokens):
            x, start = t.x, token * t.stride
            if t.residual:
                x = t.residual
                for i in range(0, width, LANES):
                    value = load_as(t.dtype, t.x, start + i, width - i)
                    value = load_as(t.dtype, x, start + i, width - i) + value
                    store_as(t.dtype, x, start + i, value, width - i)
            for head in range(t.heads):
                _normalize_token(t, x, start + head * width, head * t.weight_stride)
        part = claim(address, NEXT_PART)


def convert(address: int) -> None:
    """Convert tokens to another dtype and pad them with zeros."""
    t = task_at(address, CONVERSION_TASK)
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in share_of(t, part, t.num_tokens):
            for i in range(0, t.width, LANES):
                value = splat(ZERO)
                if i < t.given:
                    value = load_as(t.x_dtype, t.x, token * t.stride + i, t.given - i)
                store_as(t.dtype, t.result, token * t.result_stride + i, value, t.width - i)
        part = claim(address, NEXT_PART)
