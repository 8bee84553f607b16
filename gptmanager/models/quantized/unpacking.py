"""Unpacks integers of 2, 4 or 8 bits from words. The lowest bits have the first element."""

from __future__ import annotations

import torch
from torch import Tensor

# The sixteen values of float4 (E2M1), indexed by their bits.
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 or uint8 `[n, words]` to uint8 `[n, elements]`; `bits` is 2, 4 or 8."""
    found = words.contiguous().view(torch.uint8)
    for width in (4, 2):
        if bits <= width:
            low = (1 << width) - 1
            found = torch.stack((found & low, found >> width), dim=-1).flatten(-2)
    return found


def unpack_columns(words: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """Unpack int32 `[n, words]` and transpose it to uint8 `[elements, n]`.

    `order`: the place of each element in its word, from the lowest bits on, unless they are in
    order.
    """
    words, count = words.t().contiguous(), 32 // bits
    found = torch.empty(len(words), count, words.shape[1], dtype=torch.uint8)
    for element, place in enumerate(order or range(count)):
        found[:, element] = (words >> (bits * place)) & ((1 << bits) - 1)
    return found.flatten(0, 1)


def pair_table(values: Tensor, high_first: bool = False) -> Tensor:
    """Return the two elements of each byte, `[256, 2]`, if 4 bits index the sixteen `values`."""
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)
    return pairs.flip(-1) if high_first else pairs


def looked_up(packed: Tensor, table: Tensor) -> Tensor:
    """Look up bytes `[..., n]` in a `pair_table`; return the elements `[..., 2 * n]`."""
    return table[packed.int()].flatten(-2)


def float4(packed: Tensor) -> Tensor:
    """Convert bytes `[..., n]` of two E2M1 numbers each to float32 `[..., 2 * n]`."""
    return looked_up(packed, pair_table(_E2M1))


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2 to the power of E8M0 exponents, in float32."""
    return torch.exp2(exponents.view(torch.uint8).float() - 127)


def numbers(given: Tensor) -> Tensor:
    """Convert stored scales to float32; bytes are exponents (E8M0)."""
    return powers_of_two(given) if given.element_size() == 1 and _is_e8m0(given) else given.float()


def _is_e8m0(given: Tensor) -> bool:
    return given.dtype in (torch.uint8, torch.float8_e8m0fnu)
