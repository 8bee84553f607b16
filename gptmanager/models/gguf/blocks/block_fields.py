"""Reads the fields of packed blocks: float16 numbers, and integers of fewer than 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor


def stored_halves(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """Return `count` float16 numbers of each block, from byte `start` on, `[blocks, count]`."""
    return _copied(blocks, start, start + 2 * count).view(torch.float16)


def halves(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """Return the numbers of `stored_halves` in float32."""
    return stored_halves(blocks, start, count).float()


def words(blocks: Tensor, start: int, stop: int) -> Tensor:
    """Return the bytes from `start` to `stop` of each block as int64 words of 32 bits."""
    return _copied(blocks, start, stop).view(torch.int32).long() & 0xFFFFFFFF


def short_words(blocks: Tensor, start: int, stop: int) -> Tensor:
    """Return the bytes from `start` to `stop` of each block as int64 words of 16 bits."""
    return _copied(blocks, start, stop).view(torch.int16).long() & 0xFFFF


def bit_fields(numbers: Tensor, bits: int, count: int) -> Tensor:
    """Return the lowest `count` fields of `bits` bits of each number, lowest first.

    The result is `[blocks, numbers of a block * count]`, of the dtype of `numbers [blocks, n]`.
    """
    shifts = torch.arange(0, bits * count, bits, dtype=numbers.dtype)
    return (numbers.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)


def _copied(blocks: Tensor, start: int, stop: int) -> Tensor:
    """Copy bytes of each block, also those of a single block, which can begin at any address."""
    return blocks[:, start:stop].clone(memory_format=torch.contiguous_format)
