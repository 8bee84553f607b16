"""Linear attention with a state, compiled: the gates, the convolution and the memories.

`recurrent.delta_formulas` has the formulas. A column of a memory does not depend on other columns.
So a thread keeps sixteen columns of a head in its cache while it runs up to SPAN tokens of a row. A
token's result has the same bits however the tokens of its row are divided among steps.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gptmanager.kernels.per_token_kernels import LOG2_E, MINUS_LOG2_E, ONE, ZERO, logistic
from gptmanager.kernels.recurrent.delta_formulas import L2_EPS
from gptmanager.kernels.simd.dtypes import load_as, store_as
from gptmanager.kernels.simd.lanes import (
    LANES,
    claim,
    exp2,
    fma,
    get,
    get_int,
    larger,
    load,
    load_part,
    loop,
    splat,
    store,
    store_part,
    sum_lanes,
    task_at,
)
from gptmanager.kernels.simd.threads import NEXT_PART, NEXT_THREAD, task_fields

SPAN = 32  # the number of tokens that a thread runs before it writes their outputs
TWO = np.float32(2.0)
# The series of atanh(x) / x in x^2, for x up to 1/3.
ATANH_TERMS = (1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0)


class DeltaTask(ctypes.Structure):
    """Addresses, and sizes in elements.

    `projected` (tokens are `stride` apart), `conv`, `inputs`, `norm` and `result` have `dtype`.
    `gates`, `decay`, `step`, `mixed` and `memory` are float32. `mixed` `[num_tokens, channels]` has
    the convolved channels, with normalized queries and keys. `activate_gates` replaces the
    arguments in `gates` by the rates and decays. `scratch` has sixteen columns of a memory and
    `SPAN` tokens of a head.
    """

    _fields_ = task_fields(
        "projected gates conv decay step norm inputs memory mixed result row_starts slots"
        " num_tokens num_rows stride channels key_heads value_heads key_dim value_dim width"
        " scratch scratch_bytes dtype",
        "eps",
    )


DELTA_TASK = np.dtype(DeltaTask)


def scratch_bytes(key_dim: int, value_dim: int) -> int:
    """Return the bytes of scratch that a thread needs."""
    wide = (value_dim + LANES - 1) // LANES * LANES
    return 4 * (key_dim * LANES + SPAN * wide)


@loop
def _softplus(x: Any) -> Any:
    """Return log(1 + exp(x)), accurate even where it is small.

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


def activate_gates(address: int) -> None:
    """Replace the arguments of the rates and decays by the rates, and by the factors of decay."""
    t = task_at(address, DELTA_TASK)
    heads = t.value_heads
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        first, stop = t.num_tokens * part // t.num_parts, t.num_tokens * (part + 1) // t.num_parts
        for token in range(first, stop):
            start = token * 2 * heads
            for head in range(0, heads, LANES):
                count = heads - head
                rate = logistic(load_part(t.gates, start + head, count))
                at = start + heads + head
                argument = load_part(t.gates, at, count) + load_part(t.step, head, count)
                speed = exp2(load_part(t.decay, head, count) * splat(LOG2_E))
                decay = exp2(speed * _softplus(argument) * splat(MINUS_LOG2_E))
                store_part(t.gates, start + head, rate, count)
                store_part(t.gates, at, decay, count)
        part = claim(address, NEXT_PART)


@loop
def _input(t: Any, first: int, offset: int, slot: int, channel: int, count: int) -> Any:
    """Load inputs of channels for token `offset` of a row; the state has those below 0."""
    if offset >= 0:
        return load_as(t.dtype, t.projected, (first + offset) * t.stride + channel, count)
    at = (slot * (t.width - 1) + t.width - 1 + offset) * t.channels + channel
    return load_as(t.dtype, t.inputs, at, count)


@loop
def _convolve_head(t: Any, row: int, channel: int, size: int, scale: float) -> None:
    """Convolve `size` channels of a row; with a scale, normalize each token and multiply by it."""
    first, stop = get_int(t.row_starts, row), get_int(t.row_starts, row + 1)
    slot = get_int(t.slots, row)
    before = t.width - 1
    for token in range(stop - first):
        to = (first + token) * t.channels + channel
        squares = splat(ZERO)
        for i in range(0, size, LANES):
            count = size - i
            total = splat(ZERO)
            for j in range(t.width):
                weight = load_as(t.dtype, t.conv, j * t.channels + channel + i, count)
                total = fma(
                    weight, _input(t, first, token + j - before, slot, channel + i, count), total
                )
            value = total * logistic(total)
            squares = fma(value, value, squares)
            store_part(t.mixed, to + i, value, count)
        if scale > 0:
            by = np.float32(scale) / np.sqrt(sum_lanes(squares) + np.float32(L2_EPS))
            for i in range(0, size, LANES):
                own = load_part(t.mixed, to + i, size - i) * splat(by)
                store_part(t.mixed, to + i, own, size - i)
    for j in range(before):
        at = (slot * before + j) * t.channels + channel
        for i in range(0, size, LANES):
            own = _input(t, first, stop - first + j - before, slot, channel + i, size - i)
            store_as(t.dtype, t.inputs, at + i, own, size - i)


def convolve(address: int) -> None:
    """Convolve the channels of all rows, each head on its own, and keep their last inputs."""
    t = task_at(address, DELTA_TASK)
    keys, num_heads = t.key_heads, 2 * t.key_heads + t.value_heads
    num_items = t.num_rows * num_heads
    scale = 1.0 / np.sqrt(float(t.key_dim))
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        first, stop = num_items * part // t.num_parts, num_items * (part + 1) // t.num_parts
        for item in range(first, stop):
            row, head = item // num_heads, item % num_heads
            if head < 2 * keys:
                by = scale if head < keys else 1.0
                _convolve_head(t, row, head * t.key_dim, t.key_dim, by)
            else:
                channel = 2 * keys * t.key_dim + (head - 2 * keys) * t.value_dim
                _convolve_head(t, row, channel, t.value_dim, 0.0)
        part = claim(address, NEXT_PART)


@loop
def _dot(tile: int, vector: int, size: int) -> Any:
    """Return `vector [size] @ tile [size, 16]`."""
    a, b, c, d = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
    whole = size // 4 * 4
    for i in range(0, whole, 4):
        a = fma(splat(get(vector, i)), load(tile, i * LANES), a)
        b = fma(splat(get(vector, i + 1)), load(tile, (i + 1) * LANES), b)
        c = fma(splat(get(vector, i + 2)), load(tile, (i + 2) * LANES), c)
        d = fma(splat(get(vector, i + 3)), load(tile, (i + 3) * LANES), d)
    for i in range(whole, size):
        a = fma(splat(get(vector, i)), load(tile, i * LANES), a)
    return (a + b) + (c + d)


@loop
def _advance(tile: int, key: int, query: int, decay: float, change: Any, size: int) -> Any:
    """Multiply a tile by `decay` and add `key [size] x change [16]`; return `query @ tile`."""
    a, b = splat(ZERO), splat(ZERO)
    whole, by = size // 2 * 2, splat(decay)
    for i in range(0, whole, 2):
        own = fma(splat(get(key, i)), change, load(tile, i * LANES) * by)
        store(tile, i * LANES, own)
        a = fma(splat(get(query, i)), own, a)
        own = fma(splat(get(key, i + 1)), change, load(tile, (i + 1) * LANES) * by)
        store(tile, (i + 1) * LANES, own)
        b = fma(splat(get(query, i + 1)), own, b)
    for i in range(whole, size):
        own = fma(splat(get(key, i)), change, load(tile, i * LANES) * by)
        store(tile, i * LANES, own)
        a = fma(splat(get(query, i)), own, a)
    return a + b


@loop
def _finish_token(t: Any, token: int, head: int, read: int) -> None:
    """Write the norm of the values that a token has read, times SiLU of its gates."""
    size, heads = t.value_dim, t.value_heads
    total = splat(ZERO)
    for i in range(0, size, LANES):
        value = load_part(read, i, size - i)
        total = fma(value, value, total)
    mean = sum_lanes(total) / np.float32(size)
    by = splat(ONE / np.sqrt(mean + np.float32(t.eps)))
    for i in range(0, size, LANES):
        value = load_part(read, i, size - i) * by * load_as(t.dtype, t.norm, i, size - i)
        at = token * t.stride + t.channels + head * size + i
        gate = load_as(t.dtype, t.projected, at, size - i)
        value = value * gate * logistic(gate)
        store_as(t.dtype, t.result, (token * heads + head) * size + i, value, size - i)


@loop
def _run_head(t: Any, row: int, head: int, tile: int) -> None:
    """Update the memory of a head with the tokens of a row, and write their results."""
    first, stop = get_int(t.row_starts, row), get_int(t.row_starts, row + 1)
    key_dim, value_dim, heads = t.key_dim, t.value_dim, t.value_heads
    wide = (value_dim + LANES - 1) // LANES * LANES
    memory = t.memory + 4 * (get_int(t.slots, row) * heads + head) * key_dim * value_dim
    read = tile + 4 * key_dim * LANES
    key_head = head // (heads // t.key_heads)
    keys = t.key_heads * key_dim
    for start in range(first, stop, SPAN):
        end = min(stop, start + SPAN)
        for column in range(0, value_dim, LANES):
            count = value_dim - column
            for i in range(key_dim):
                store(tile, i * LANES, load_part(memory, i * value_dim + column, count))
            for token in range(start, end):
                at = token * t.channels + key_head * key_dim
                query, key = t.mixed + 4 * at, t.mixed + 4 * (at + keys)
                rate = get(t.gates, token * 2 * heads + head)
                decay = get(t.gates, token * 2 * heads + heads + head)
                value = load_part(
                    t.mixed, token * t.channels + 2 * keys + head * value_dim + column, count
                )
                seen = _dot(tile, key, key_dim) * splat(decay)
                change = (value - seen) * splat(rate)
                own = _advance(tile, key, query, decay, change, key_dim)
                store(read, (token - start) * wide + column, own)
            for i in range(key_dim):
                store_part(memory, i * value_dim + column, load(tile, i * LANES), count)
        for token in range(start, end):
            _finish_token(t, token, head, read + 4 * (token - start) * wide)


def run_memories(address: int) -> None:
    """Update the memories with the tokens of all rows, each head on its own; write the results."""
    t = task_at(address, DELTA_TASK)
    tile = t.scratch + claim(address, NEXT_THREAD) * t.scratch_bytes
    num_items = t.num_rows * t.value_heads
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        first, stop = num_items * part // t.num_parts, num_items * (part + 1) // t.num_parts
        for item in range(first, stop):
            _run_head(t, item // t.value_heads, item % t.value_heads, tile)
        part = claim(address, NEXT_PART)


BODIES = (convolve, run_memories, activate_gates)
