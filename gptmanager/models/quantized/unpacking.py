"""Bits of packed integers as elements. The elements of a word are in order, lowest bits first."""

from __future__ import annotations

import torch
from torch import Tensor

# the sixteen values of float4 (E2M1), by their bits
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return int32 or uint8 `[n, words]` as uint8 `[n, elements]`; `bits` is 2, 4 or 8."""
    found = words.contiguous().view(torch.uint8)
    for width in (4, 2):
        if bits <= width:
            low = (1 << width) - 1
            found = torch.stack((found & low, found >> width), dim=-1).flatten(-2)
    return found


def unpack_columns(words: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """Return int32 `[n, words]` transposed, as uint8 `[elements, n]`.

    `order`: the place of each element in its word, counted from the lowest bits; (): in order.
    """
    words, count = words.t().contiguous(), 32 // bits
    found = torch.empty(len(words), count, words.shape[1], dtype=torch.uint8)
    for element, place in enumerate(order or range(count)):
        found[:, element] = (words >> (bits * place)) & ((1 << bits) - 1)
    return found.flatten(0, 1)


def pair_table(values: Tensor, high_first: bool = False) -> Tensor:
    """Return the two elements of each byte, `[256, 2]`, for sixteen values by four bits."""
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)
    return pairs.flip(-1) if high_first else pairs


def looked_up(packed: Tensor, table: Tensor) -> Tensor:
    """Return uint8 `[..., n]` as elements `[..., 2 * n]` of a `pair_table`."""
    return table[packed.int()].flatten(-2)


def float4(packed: Tensor) -> Tensor:
    """Return the E2M1 numbers of uint8 `[..., n]`, `[..., 2 * n]` in float32."""
    return looked_up(packed, pair_table(_E2M1))


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2 to the power of E8M0 exponents, in float32."""
    return torch.exp2(exponents.view(torch.uint8).float() - 127)


def numbers(given: Tensor) -> Tensor:
    """Return stored scales in float32; bytes are exponents (E8M0)."""
    return powers_of_two(given) if given.element_size() == 1 and _is_e8m0(given) else given.float()


def _is_e8m0(given: Tensor) -> bool:
    return given.dtype in (torch.uint8, torch.float8_e8m0fnu)
