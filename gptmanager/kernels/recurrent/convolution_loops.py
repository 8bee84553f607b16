"""Compiled causal convolutions: those of all recurrent layers, and the gated ones of LFM2.

`recurrent.convolution` has the formula. A token's result has the same bits, however its row's
tokens are divided among steps.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gptmanager.kernels.simd.dtypes import ZERO, load_as, store_as
from gptmanager.kernels.simd.lanes import LANES, claim, fma, get_int, loop, splat, task_at
from gptmanager.kernels.simd.threads import NEXT_PART, share_of, task_fields

BLOCK = 16 * LANES  # the channels of a row that a thread convolves at a time


class ConvolutionTask(ctypes.Structure):
    """Addresses, sizes in elements, and the dtype of all tensors.

    A token has `stride` elements at `before`, at `after` and at `projected`: factors of the
    inputs, factors of the results, and the inputs, which are multiplied in place. `bias` may be 0.
    """

    _fields_ = task_fields(
        "before after projected conv bias inputs result row_starts slots"
        " num_rows stride channels width dtype"
    )


CONVOLUTION_TASK = np.dtype(ConvolutionTask)


@loop
def _input(t: Any, first: int, offset: int, slot: int, channel: int, count: int) -> Any:
    """Load `count` channels of the input of the row's token `offset`.

    Negative offsets are tokens of earlier steps, which `inputs` has.
    """
    if offset >= 0:
        return load_as(t.dtype, t.projected, (first + offset) * t.stride + channel, count)
    at = (slot * (t.width - 1) + t.width - 1 + offset) * t.channels + channel
    return load_as(t.dtype, t.inputs, at, count)


@loop
def convolved(
    t: Any, first: int, offset: int, slot: int, channel: int, count: int, bias: Any
) -> Any:
    """Return `count` channels of the convolution at the row's token `offset`, plus `bias`."""
    total = bias
    for j in range(t.width):
        weight = load_as(t.dtype, t.conv, j * t.channels + channel, count)
        own = _input(t, first, offset + j - t.width + 1, slot, channel, count)
        total = fma(weight, own, total)
    return total


@loop
def keep_inputs(t: Any, first: int, count: int, slot: int, channel: int, size: int) -> None:
    """Store the last inputs of `size` channels, for the tokens after the row's `count` tokens."""
    before = t.width - 1
    for j in range(before):
        at = (slot * before + j) * t.channels + channel
        for i in range(0, size, LANES):
            own = _input(t, first, count + j - before, slot, channel + i, size - i)
            store_as(t.dtype, t.inputs, at + i, own, size - i)


@loop
def _convolve_block(t: Any, row: int, channel: int) -> None:
    """Compute the results of a block of a row's channels, and keep its last inputs."""
    first, slot = get_int(t.row_starts, row), get_int(t.slots, row)
    count = get_int(t.row_starts, row + 1) - first
    size = min(BLOCK, t.channels - channel)
    for offset in range(count):
        start = (first + offset) * t.stride + channel
        for i in range(0, size, LANES):
            own = load_as(t.dtype, t.projected, start + i, size - i)
            own = own * load_as(t.dtype, t.before, start + i, size - i)
            store_as(t.dtype, t.projected, start + i, own, size - i)
    for offset in range(count):
        start = (first + offset) * t.stride + channel
        to = (first + offset) * t.channels + channel
        for i in range(0, size, LANES):
            bias = splat(ZERO)
            if t.bias != 0:
                bias = load_as(t.dtype, t.bias, channel + i, size - i)
            total = convolved(t, first, offset, slot, channel + i, size - i, bias)
            value = total * load_as(t.dtype, t.after, start + i, size - i)
            store_as(t.dtype, t.result, to + i, value, size - i)
    keep_inputs(t, first, count, slot, channel, size)


def convolve_gated(address: int) -> None:
    """Compute the results of all rows, and store the last inputs of each row in `inputs`."""
    t = task_at(address, CONVOLUTION_TASK)
    num_blocks = (t.channels + BLOCK - 1) // BLOCK
    num_items = t.num_rows * num_blocks
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for item in share_of(t, part, num_items):
            _convolve_block(t, item // num_blocks, item % num_blocks * BLOCK)
        part = claim(address, NEXT_PART)


BODIES = (convolve_gated,)
