"""Compiled linear attention (gated delta rule): gates, convolution, and the memory of each head.

`recurrent.delta_formulas` has the formulas. A thread runs up to SPAN tokens of a row on a tile of a
head's memory. A token's result has the same bits, however its row's tokens are divided among steps.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gptmanager.kernels.activations.activation_loops import logistic, softplus
from gptmanager.kernels.recurrent.convolution_loops import convolved, keep_inputs
from gptmanager.kernels.recurrent.delta_formulas import L2_EPS
from gptmanager.kernels.recurrent.memory_loops import (
    WIDTH,
    advance,
    load_tile,
    store_tile,
)
from gptmanager.kernels.simd.dtypes import LOG2_E, MINUS_LOG2_E, ONE, ZERO, load_as, store_as
from gptmanager.kernels.simd.lanes import (
    LANES,
    claim,
    exp2,
    fma,
    get,
    get_int,
    load,
    load_part,
    loop,
    splat,
    store,
    store_part,
    sum_lanes,
    task_at,
)
from gptmanager.kernels.simd.threads import NEXT_PART, NEXT_THREAD, share_of, task_fields

SPAN = 32  # the most tokens that a thread runs before it writes their results


class DeltaTask(ctypes.Structure):
    """Addresses, sizes in elements (`scratch_bytes`: bytes per thread), a dtype and `eps`.

    `projected` (`stride` elements per token), `conv`, `inputs`, `norm` and `result` have `dtype`.
    `gates`, `decay`, `step`, `mixed` and `memory` are float32. `mixed` `[num_tokens, channels]`
    has the convolved channels, with normalized queries and keys. `gates` has the arguments of the
    gates, which `activate_gates` replaces by rates and decay factors. `scratch` has, for each
    thread, `WIDTH` columns of a head's memory, and the values that up to `SPAN` tokens have read
    from the memory.
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
    wide = (value_dim + WIDTH - 1) // WIDTH * WIDTH
    return 4 * (key_dim * WIDTH + SPAN * wide)


def activate_gates(address: int) -> None:
    """Replace the arguments in `gates` by rates b and decay factors exp(g)."""
    t = task_at(address, DELTA_TASK)
    heads = t.value_heads
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in share_of(t, part, t.num_tokens):
            start = token * 2 * heads
            for head in range(0, heads, LANES):
                count = heads - head
                rate = logistic(load_part(t.gates, start + head, count))
                at = start + heads + head
                argument = load_part(t.gates, at, count) + load_part(t.step, head, count)
                speed = exp2(load_part(t.decay, head, count) * splat(LOG2_E))
                decay = exp2(speed * softplus(argument) * splat(MINUS_LOG2_E))
                store_part(t.gates, start + head, rate, count)
                store_part(t.gates, at, decay, count)
        part = claim(address, NEXT_PART)


@loop
def _place(t: Any, head: int) -> Any:
    """Return the first channel, the size and the scale of a head of queries, keys or values.

    The scale of a head of values is 0: values are not normalized.
    """
    keys = t.key_heads
    if head < 2 * keys:
        scale = 1.0 / np.sqrt(float(t.key_dim)) if head < keys else 1.0
        return head * t.key_dim, t.key_dim, scale
    return 2 * keys * t.key_dim + (head - 2 * keys) * t.value_dim, t.value_dim, 0.0


@loop
def _convolve_token(t: Any, first: int, offset: int, slot: int, head: int) -> None:
    """Convolve a head of a token and apply SiLU. If it has queries or keys, normalize and scale."""
    channel, size, scale = _place(t, head)
    to = (first + offset) * t.channels + channel
    squares = splat(ZERO)
    for i in range(0, size, LANES):
        count = size - i
        total = convolved(t, first, offset, slot, channel + i, count, splat(ZERO))
        value = total * logistic(total)
        squares = fma(value, value, squares)
        store_part(t.mixed, to + i, value, count)
    if scale > 0:
        by = np.float32(scale) / np.sqrt(sum_lanes(squares) + np.float32(L2_EPS))
        for i in range(0, size, LANES):
            value = load_part(t.mixed, to + i, size - i) * splat(by)
            store_part(t.mixed, to + i, value, size - i)


def convolve(address: int) -> None:
    """Convolve the channels of all rows, and store the last inputs of each row in `inputs`.

    A part of the work is a range of (row, head) pairs. All heads of a token in the part run before
    the next token, so that `projected` is read in order.
    """
    t = task_at(address, DELTA_TASK)
    num_heads = 2 * t.key_heads + t.value_heads
    num_items = t.num_rows * num_heads
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        item, stop = num_items * part // t.num_parts, num_items * (part + 1) // t.num_parts
        while item < stop:
            row = item // num_heads
            heads = range(item - row * num_heads, min(stop - row * num_heads, num_heads))
            first, slot = get_int(t.row_starts, row), get_int(t.slots, row)
            count = get_int(t.row_starts, row + 1) - first
            for offset in range(count):
                for head in heads:
                    _convolve_token(t, first, offset, slot, head)
            for head in heads:
                channel, size, _ = _place(t, head)
                keep_inputs(t, first, count, slot, channel, size)
            item += len(heads)
        part = claim(address, NEXT_PART)


@loop
def _dot(tile: int, vector: int, size: int) -> Any:
    """Return `vector [size] @ tile [size, 32]` as two vectors of lanes.

    Eight independent sums keep the processor's FMA units busy.
    """
    a, b, c, d = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
    e, f, g, h = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
    whole = size // 4 * 4
    for i in range(0, whole, 4):
        first, second = splat(get(vector, i)), splat(get(vector, i + 1))
        third, fourth = splat(get(vector, i + 2)), splat(get(vector, i + 3))
        at = i * WIDTH
        a, b = fma(first, load(tile, at), a), fma(first, load(tile, at + LANES), b)
        at += WIDTH
        c, d = fma(second, load(tile, at), c), fma(second, load(tile, at + LANES), d)
        at += WIDTH
        e, f = fma(third, load(tile, at), e), fma(third, load(tile, at + LANES), f)
        at += WIDTH
        g, h = fma(fourth, load(tile, at), g), fma(fourth, load(tile, at + LANES), h)
    for i in range(whole, size):
        own, at = splat(get(vector, i)), i * WIDTH
        a, b = fma(own, load(tile, at), a), fma(own, load(tile, at + LANES), b)
    return (a + c) + (e + g), (b + d) + (f + h)


@loop
def _finish_token(t: Any, token: int, head: int, read: int) -> None:
    """Write a token's result: the RMS norm of the values in `read`, times SiLU of output gates."""
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
    wide = (value_dim + WIDTH - 1) // WIDTH * WIDTH
    memory = t.memory + 4 * (get_int(t.slots, row) * heads + head) * key_dim * value_dim
    read = tile + 4 * key_dim * WIDTH
    key_head = head // (heads // t.key_heads)
    keys = t.key_heads * key_dim
    for start in range(first, stop, SPAN):
        end = min(stop, start + SPAN)
        for column in range(0, value_dim, WIDTH):
            count = value_dim - column
            more = count - LANES  # columns left for the second half, if positive
            load_tile(tile, memory, column, key_dim, value_dim)
            for token in range(start, end):
                at = token * t.channels + key_head * key_dim
                query, key = t.mixed + 4 * at, t.mixed + 4 * (at + keys)
                rate = get(t.gates, token * 2 * heads + head)
                decay = get(t.gates, token * 2 * heads + heads + head)
                at = token * t.channels + 2 * keys + head * value_dim + column
                left, right = _dot(tile, key, key_dim)
                left = (load_part(t.mixed, at, count) - left * splat(decay)) * splat(rate)
                right = (load_part(t.mixed, at + LANES, more) - right * splat(decay)) * splat(rate)
                left, right = advance(tile, key, query, decay, left, right, key_dim)
                at = (token - start) * wide + column
                store(read, at, left)
                store(read, at + LANES, right)
            store_tile(tile, memory, column, key_dim, value_dim)
        for token in range(start, end):
            _finish_token(t, token, head, read + 4 * (token - start) * wide)


def run_memories(address: int) -> None:
    """Update the memories of all heads with the tokens of all rows; write the results."""
    t = task_at(address, DELTA_TASK)
    tile = t.scratch + claim(address, NEXT_THREAD) * t.scratch_bytes
    num_items = t.num_rows * t.value_heads
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for item in share_of(t, part, num_items):
            _run_head(t, item // t.value_heads, item % t.value_heads, tile)
        part = claim(address, NEXT_PART)


BODIES = (convolve, run_memories, activate_gates)
