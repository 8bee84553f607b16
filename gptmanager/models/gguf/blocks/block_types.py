"""`BLOCK_TYPES`: the tensor types of GGUF, and the dequantization of their blocks to float32.

A block stores `size` consecutive elements of a row in `num_bytes` bytes. The values are bitwise
those of llama.cpp's reference, because the arithmetic and its order are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gptmanager.kernels.gemm.int4_groups import CODEBOOKS, GROUP, MIDDLE, Codebook, Groups
from gptmanager.kernels.gemm.packed_matrix import Quantized
from gptmanager.models.gguf.blocks import grid_blocks
from gptmanager.models.gguf.blocks.block_fields import bit_fields, halves, stored_halves

_DOUBLED_E2M1, _IQ4 = CODEBOOKS["e2m1"].float(), CODEBOOKS["iq4"].float()
_ToGroups = Callable[[Tensor], Groups]


@dataclass(frozen=True, slots=True)
class BlockType:
    """The type of a tensor. `dtype`: torch's name of the element type after unpacking.

    `unpack` converts uint8 `[blocks, num_bytes]` to `[blocks, size]` of that dtype. `groups`
    converts each block to a row of groups of 4-bit values. It is None for types without such
    groups. The groups are equal to the block unless `rounds_scales`: then their scales and minima
    are those of the block, rounded to float16. `codebook`: that of the groups.
    """

    name: str
    size: int
    num_bytes: int
    unpack: Callable[[Tensor], Tensor]
    dtype: str = "float32"
    groups: _ToGroups | None = None
    rounds_scales: bool = False
    codebook: Codebook | None = None

    @property
    def group_kind(self) -> Quantized | None:
        """How a matrix stores the groups; None if there are none."""
        return None if self.groups is None else self.codebook or "int4"

    @property
    def is_quantized(self) -> bool:
        """Whether a block has several elements, which share a scale."""
        return self.size > 1


def _nibbles(packed: Tensor) -> Tensor:
    """Return the low four bits of all bytes, followed by the high four bits."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Return the 32 bits from byte `start` on, lowest bit of each byte first, each as 0 or 16."""
    return bit_fields(blocks[:, start : start + 4], 1, 8) << 4


def _q4_0_groups(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 2:]), stored_halves(blocks, 0))


def _q4_1_groups(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 4:]), stored_halves(blocks, 0), stored_halves(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return (values.float() - 16) * halves(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return values.float() * halves(blocks, 0) + halves(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * halves(blocks, 0)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and the minima of the 8 sub-blocks of each block, `[blocks, 8, 1]` each."""
    packed = blocks[:, 4:16]
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (last & 15) | (first >> 6 << 4)), -1)
    minima = torch.cat((second & 63, (last >> 4) | (second >> 6 << 4)), -1)
    return (
        (halves(blocks, 0) * scales.float()).unsqueeze(-1),
        (halves(blocks, 2) * minima.float()).unsqueeze(-1),
    )


def _quarters(packed: Tensor) -> Tensor:
    """Return the 2-bit numbers of all bytes.

    32 bytes result in 128 numbers: the lowest two bits of each byte, then the next two, and so on.
    """
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1)
    return ((packed.reshape(-1, packed.shape[1] // 32, 1, 32) >> shifts) & 3).flatten(1)


def _q2_k(blocks: Tensor) -> Tensor:
    scales = halves(blocks, 80) * (blocks[:, :16] & 15).float()
    minima = halves(blocks, 82) * (blocks[:, :16] >> 4).float()
    values = _quarters(blocks[:, 16:80]).float().view(-1, 16, 16)
    return (scales.unsqueeze(-1) * values - minima.unsqueeze(-1)).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    high = ((blocks[:, :32].unsqueeze(1) >> shifts) & 1).flatten(1)  # if 0, the value is 4 less
    values = (_quarters(blocks[:, 32:96]) | (high << 2)).float() - 4
    packed = blocks[:, 96:108]
    last = (packed[:, 8:].unsqueeze(1) >> (shifts[:4] * 2)) & 3
    scales = (_nibbles(packed[:, :8]) | (last.flatten(1) << 4)).float() - 32
    scales *= halves(blocks, 108)
    return (scales.unsqueeze(-1) * values.view(-1, 16, 16)).flatten(1)


def _q4_k_values(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    return (scales * _q4_k_values(blocks).float() - minima).flatten(1)


def _q4_k_groups(blocks: Tensor) -> Groups:
    scales, minima = (it.squeeze(-1) for it in _scales_and_minima(blocks))
    return Groups(_q4_k_values(blocks).flatten(1), scales.half(), minima.neg().half())


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    values = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    values |= ((blocks[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4
    return (scales * values.float() - minima).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    values = (low | (high << 4)).reshape(-1, 16, 16).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * halves(blocks, 208)
    return (scales.unsqueeze(-1) * values).flatten(1)


def _iq4_nl_groups(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 2:]), stored_halves(blocks, 0), None, "iq4")


def _iq4_xs_scales(blocks: Tensor) -> Tensor:
    """Return the scales of the 8 sub-blocks of each block."""
    low, high = bit_fields(blocks[:, 4:8], 4, 2), bit_fields(blocks[:, 2:4], 2, 4)
    return halves(blocks, 0) * ((low | high << 4).float() - 32)


def _iq4_xs_values(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 8:].reshape(-1, 8, 16))


def _iq4_xs(blocks: Tensor) -> Tensor:
    values = _IQ4[_iq4_xs_values(blocks).int()]
    return (_iq4_xs_scales(blocks).unsqueeze(-1) * values).flatten(1)


def _iq4_xs_groups(blocks: Tensor) -> Groups:
    values, scales = _iq4_xs_values(blocks).flatten(1), _iq4_xs_scales(blocks).half()
    return Groups(values, scales, None, "iq4")


def _mxfp4_scales(blocks: Tensor) -> Tensor:
    """Return 2 ** (first byte - 127) / 2: the numbers of the codebook are doubled."""
    return torch.exp2(blocks[:, :1].float() - 128)  # a subnormal number for the byte 0


def _mxfp4(blocks: Tensor) -> Tensor:
    return _DOUBLED_E2M1[_nibbles(blocks[:, 1:]).int()] * _mxfp4_scales(blocks)


def _mxfp4_groups(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 1:]), _mxfp4_scales(blocks).half(), None, "e2m1")


def _nvfp4(blocks: Tensor) -> Tensor:
    """Return the E2M1 numbers of each block times a scale for each sixteen of them.

    The scales are E4M3 without a sign, in which 127 means 0. They are halved, because the table
    has the doubled E2M1 numbers.
    """
    stored = blocks[:, :4]
    exponents, fractions = (stored >> 3 & 15).float(), (stored & 7).float()
    normal = (1 + fractions / 8) * torch.exp2(exponents - 8)
    scales = torch.where(exponents == 0, fractions * 2.0**-10, normal).masked_fill(stored == 127, 0)
    values = _DOUBLED_E2M1[_nibbles(blocks[:, 4:].reshape(-1, 4, 8)).int()]
    return (scales.unsqueeze(-1) * values).flatten(1)


def _small_groups(numbers: Tensor, scales: Tensor) -> Groups:
    """Return integers from 0 to 3, of which 1 is a zero, with one scale for each block."""
    return Groups(numbers + (MIDDLE - 1), scales.expand(-1, numbers.shape[1] // GROUP))


def _q1_0_groups(blocks: Tensor) -> Groups:
    return _small_groups(2 * bit_fields(blocks[:, 2:], 1, 8), stored_halves(blocks, 0))


def _q2_0_groups(blocks: Tensor) -> Groups:
    return _small_groups(bit_fields(blocks[:, 2:], 2, 4), stored_halves(blocks, 0))


def _tq1_0_groups(blocks: Tensor) -> Groups:
    """Return the elements -1, 0 and 1 of each block.

    A byte has five elements (four in the last bytes of a block), as digits of a fraction in base 3.
    """
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8).unsqueeze(1)
    parts = ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
    shifted = torch.cat([(own.unsqueeze(1) * powers[:n]).flatten(1) for own, n in parts], 1)
    return _small_groups((shifted.short() * 3 >> 8).to(torch.uint8), stored_halves(blocks, 52))


def _tq2_0_groups(blocks: Tensor) -> Groups:
    return _small_groups(_quarters(blocks[:, :64]), stored_halves(blocks, 64))


def _in_groups(
    name: str, size: int, num_bytes: int, groups: _ToGroups, codebook: Codebook | None = None
) -> BlockType:
    def unpack(blocks: Tensor) -> Tensor:
        return groups(blocks).floats()

    return BlockType(name, size, num_bytes, unpack, groups=groups, codebook=codebook)


def _near_groups(
    name: str,
    size: int,
    num_bytes: int,
    unpack: Callable[[Tensor], Tensor],
    groups: _ToGroups,
    codebook: Codebook | None = None,
) -> BlockType:
    """Return a type with scales that must be rounded to float16 for groups."""
    return BlockType(name, size, num_bytes, unpack, "float32", groups, True, codebook)


def _as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: blocks.contiguous().view(dtype)


BLOCK_TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4, _as(torch.float32)),
    1: BlockType("F16", 1, 2, _as(torch.float16), "float16"),
    2: _in_groups("Q4_0", 32, 18, _q4_0_groups),
    3: _in_groups("Q4_1", 32, 20, _q4_1_groups),
    6: BlockType("Q5_0", 32, 22, _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    10: BlockType("Q2_K", 256, 84, _q2_k),
    11: BlockType("Q3_K", 256, 110, _q3_k),
    12: _near_groups("Q4_K", 256, 144, _q4_k, _q4_k_groups),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    16: BlockType("IQ2_XXS", 256, 66, grid_blocks.iq2_xxs),
    17: BlockType("IQ2_XS", 256, 74, grid_blocks.iq2_xs),
    18: BlockType("IQ3_XXS", 256, 98, grid_blocks.iq3_xxs),
    19: BlockType("IQ1_S", 256, 50, grid_blocks.iq1_s),
    20: _in_groups("IQ4_NL", 32, 18, _iq4_nl_groups, "iq4"),
    21: BlockType("IQ3_S", 256, 110, grid_blocks.iq3_s),
    22: BlockType("IQ2_S", 256, 82, grid_blocks.iq2_s),
    23: _near_groups("IQ4_XS", 256, 136, _iq4_xs, _iq4_xs_groups, "iq4"),
    29: BlockType("IQ1_M", 256, 56, grid_blocks.iq1_m),
    30: BlockType("BF16", 1, 2, _as(torch.bfloat16), "bfloat16"),
    34: _in_groups("TQ1_0", 256, 54, _tq1_0_groups),
    35: _in_groups("TQ2_0", 256, 66, _tq2_0_groups),
    39: _near_groups("MXFP4", 32, 17, _mxfp4, _mxfp4_groups, "e2m1"),
    40: BlockType("NVFP4", 64, 36, _nvfp4),
    41: _in_groups("Q1_0", 128, 18, _q1_0_groups),
    42: _in_groups("Q2_0", 64, 18, _q2_0_groups),
}
# names of unsupported types, for the error message
TYPE_NAMES: Mapping[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
}
