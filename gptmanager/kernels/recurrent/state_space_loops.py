"""Compiled Mamba-2: steps, the convolution, the memory of each head, and gated norms.

`recurrent.state_space_formulas` has the formulas. A token's result has the same bits, however its
row's tokens are divided among steps.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gptmanager.kernels.activations.activation_loops import logistic, softplus
from gptmanager.kernels.recurrent.convolution_loops import BLOCK, convolved, keep_inputs
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
    load_part,
    loop,
    splat,
    store_part,
    sum_lanes,
    task_at,
)
from gptmanager.kernels.simd.threads import NEXT_PART, NEXT_THREAD, share_of, task_fields


class StateSpaceTask(ctypes.Structure):
    """Addresses, sizes in elements (`scratch_bytes`: bytes per thread), a dtype and `eps`.

    A token has `stride` elements at `gates`, at `projected` (the inputs of the convolution) and at
    `steps`. These, `conv`, `bias` (may be 0), `inputs`, `norm` and `result` have `dtype`. `decay`,
    `step`, `skip`, `rates`, `mixed`, `read` and `memory` are float32. `rates` `[num_tokens, 2,
    heads]` has steps and decay factors, `mixed` `[num_tokens, channels]` the convolved channels,
    and `read` `[num_tokens, heads * head_dim]` the outputs before the norm. `scratch` has a tile
    for each thread.
    """

    _fields_ = task_fields(
        "gates projected steps conv bias decay step skip norm inputs memory rates mixed read result"
        " row_starts slots num_tokens num_rows stride channels heads head_dim state groups"
        " norm_groups width scratch scratch_bytes dtype",
        "eps",
    )


STATE_SPACE_TASK = np.dtype(StateSpaceTask)


def scratch_bytes(state: int) -> int:
    """Return the bytes of scratch that a thread needs."""
    return 4 * state * WIDTH


def activate_steps(address: int) -> None:
    """Write the steps t and the decay factors exp(g) of all tokens to `rates`."""
    t = task_at(address, STATE_SPACE_TASK)
    heads = t.heads
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in share_of(t, part, t.num_tokens):
            for head in range(0, heads, LANES):
                count, at = heads - head, 2 * token * heads + head
                argument = load_as(t.dtype, t.steps, token * t.stride + head, count)
                step = softplus(argument + load_part(t.step, head, count))
                speed = exp2(load_part(t.decay, head, count) * splat(LOG2_E))
                store_part(t.rates, at, step, count)
                store_part(t.rates, at + heads, exp2(speed * step * splat(MINUS_LOG2_E)), count)
        part = claim(address, NEXT_PART)


@loop
def _convolve_channels(t: Any, row: int, channel: int) -> None:
    """Convolve a block of a row's channels, apply SiLU, and keep the last inputs."""
    first, slot = get_int(t.row_starts, row), get_int(t.slots, row)
    count = get_int(t.row_starts, row + 1) - first
    size = min(BLOCK, t.channels - channel)
    for offset in range(count):
        to = (first + offset) * t.channels + channel
        for i in range(0, size, LANES):
            bias = splat(ZERO)
            if t.bias != 0:
                bias = load_as(t.dtype, t.bias, channel + i, size - i)
            total = convolved(t, first, offset, slot, channel + i, size - i, bias)
            store_part(t.mixed, to + i, total * logistic(total), size - i)
    keep_inputs(t, first, count, slot, channel, size)


def convolve_channels(address: int) -> None:
    """Convolve the channels of all rows, and store the last inputs of each row in `inputs`."""
    t = task_at(address, STATE_SPACE_TASK)
    num_blocks = (t.channels + BLOCK - 1) // BLOCK
    num_items = t.num_rows * num_blocks
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for item in share_of(t, part, num_items):
            _convolve_channels(t, item // num_blocks, item % num_blocks * BLOCK)
        part = claim(address, NEXT_PART)


@loop
def _scan_head(t: Any, row: int, head: int, tile: int) -> None:
    """Update the memory of a head with the tokens of a row, and write what the tokens read."""
    first, stop = get_int(t.row_starts, row), get_int(t.row_starts, row + 1)
    heads, size, state = t.heads, t.head_dim, t.state
    inner, group = heads * size, head // (heads // t.groups)
    memory = t.memory + 4 * (get_int(t.slots, row) * heads + head) * state * size
    skip = splat(get(t.skip, head))
    for column in range(0, size, WIDTH):
        count = size - column
        more = count - LANES  # columns left for the second half, if positive
        load_tile(tile, memory, column, state, size)
        for token in range(first, stop):
            start = token * t.channels
            b = t.mixed + 4 * (start + inner + group * state)
            c = b + 4 * t.groups * state
            step = splat(get(t.rates, 2 * token * heads + head))
            decay = get(t.rates, 2 * token * heads + heads + head)
            at = start + head * size + column
            x, y = load_part(t.mixed, at, count), load_part(t.mixed, at + LANES, more)
            left, right = advance(tile, b, c, decay, x * step, y * step, state)
            at = token * inner + head * size + column
            store_part(t.read, at, fma(skip, x, left), count)
            store_part(t.read, at + LANES, fma(skip, y, right), more)
        store_tile(tile, memory, column, state, size)


def scan_heads(address: int) -> None:
    """Update the memories of all heads with the tokens of all rows."""
    t = task_at(address, STATE_SPACE_TASK)
    tile = t.scratch + claim(address, NEXT_THREAD) * t.scratch_bytes
    num_items = t.num_rows * t.heads
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for item in share_of(t, part, num_items):
            _scan_head(t, item // t.heads, item % t.heads, tile)
        part = claim(address, NEXT_PART)


@loop
def _norm_group(t: Any, token: int, group: int, size: int) -> None:
    """Write a group of a token's result: the outputs times SiLU of their gates, RMS-normalized."""
    inner = t.heads * t.head_dim
    first, start = group * size, token * inner + group * size
    squares = splat(ZERO)
    for i in range(0, size, LANES):
        gate = load_as(t.dtype, t.gates, token * t.stride + first + i, size - i)
        value = load_part(t.read, start + i, size - i) * gate * logistic(gate)
        squares = fma(value, value, squares)
        store_part(t.read, start + i, value, size - i)
    mean = sum_lanes(squares) / np.float32(size)
    by = splat(ONE / np.sqrt(mean + np.float32(t.eps)))
    for i in range(0, size, LANES):
        value = load_part(t.read, start + i, size - i) * by
        value = value * load_as(t.dtype, t.norm, first + i, size - i)
        store_as(t.dtype, t.result, start + i, value, size - i)


def norm_gated(address: int) -> None:
    """Write the results of all tokens."""
    t = task_at(address, STATE_SPACE_TASK)
    size = t.heads * t.head_dim // t.norm_groups
    num_items = t.num_tokens * t.norm_groups
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for item in share_of(t, part, num_items):
            _norm_group(t, item // t.norm_groups, item % t.norm_groups, size)
        part = claim(address, NEXT_PART)


BODIES = (scan_heads, convolve_channels, norm_gated, activate_steps)
