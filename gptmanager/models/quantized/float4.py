"""Descriptions of matrices of 4-bit floats (E2M1), which return rows as `Codes` or in groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gptmanager.kernels.gemm.int4_groups import GROUP
from gptmanager.kernels.gemm.packed_matrix import Quantized
from gptmanager.kernels.gemm.panels.code_loops import E2M1
from gptmanager.kernels.gemm.panels.codes import Codes, numbers
from gptmanager.kernels.gemm.panels.words import PackedGroups
from gptmanager.memory.checkpoint.tensor_sources import CodesOf
from gptmanager.models.quantized.matrices import Grid, Read, StoredMatrix, check_scales

# E8M0 of the scales of which float16 holds the half as a normal number: 2^-13 to 2^16
_LEAST_EXPONENT, _MOST_EXPONENT = 114, 143


@dataclass(frozen=True)
class Float4Matrix(StoredMatrix):
    """4-bit floats (E2M1), two in a byte, with a scale for each group of columns.

    `global_scale`: the name of a tensor with one number, or None. Scales are divided by this number
    or, if `is_factor`, multiplied by it. `groups_of`: whether `groups` can be called, as in
    `StoredMatrix`.
    """

    name: str
    shape: tuple[int, ...]
    scales: Grid
    global_scale: str | None = None
    is_factor: bool = False
    groups_of: Quantized | None = None

    def groups(self, read: Read, rows: range) -> PackedGroups:
        """Return `rows` as groups of 4-bit floats. `groups_of` must not be None."""
        packed = read(self.name, rows, range(self.shape[1] // 2))
        return float4_groups(packed, self.scales.rows(read, rows))

    def codes(self, read: Read, rows: range) -> Codes:
        scales = self.scales.rows(read, rows)
        if self.global_scale is not None:
            number = read(self.global_scale).float()
            scales = scales * number if self.is_factor else scales / number
            check_scales(self.global_scale, scales)
        packed = read(self.name, rows, range(self.shape[1] // 2))
        return Codes(codes=packed, scales=scales, block=self.scales.width, kind=E2M1)


@dataclass(frozen=True)
class ExpertBlocks:
    """One weight of all experts of a gpt-oss layer: 4-bit floats in groups of 32 columns.

    `name`, `scales`: the names of the tensors. `shape`: the dequantized shape, `[experts, columns,
    rows]`. `stored`: the shape of the tensor `name`, `[experts, rows, groups, bytes]`.
    `groups_of`: as in `StoredMatrix`.
    """

    name: str
    scales: str
    stored: tuple[int, ...]
    groups_of: Quantized | None = None
    codes_of: CodesOf = "columns"

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, groups, size = self.stored
        return experts, groups * size * 2, rows

    def codes(self, read: Read, rows: range) -> Codes:
        """Return `rows`, which must belong to one expert.

        Rows are numbered consecutively across the experts.
        """
        packed, scales = self._rows(read, rows)
        return Codes(codes=packed, scales=scales, block=2 * self.stored[3], kind=E2M1)

    def groups(self, read: Read, rows: range) -> PackedGroups:
        """Return `rows`, as `codes` does, as groups of 4-bit floats."""
        return float4_groups(*self._rows(read, rows))

    def _rows(self, read: Read, rows: range) -> tuple[Tensor, Tensor]:
        """Return the bytes and the scales of `rows`."""
        expert, first = divmod(rows.start, self.stored[1])
        each = range(expert, expert + 1), range(first, first + len(rows)), range(self.stored[2])
        packed = read(self.name, *each, range(self.stored[3]))[0]
        scales = numbers(read(self.scales, *each)[0])
        check_scales(self.scales, scales)
        return packed.flatten(1), scales


def float4_groups(packed: Tensor, scales: Tensor) -> PackedGroups:
    """Return 4-bit floats (E2M1) in groups of 32, two in each byte of uint8 `[n, columns / 2]`.

    The codebook has the doubled numbers, so `scales` `[n, groups]` are halved.
    """
    packed = packed.contiguous()
    if packed.storage_offset() % torch.int32.itemsize:
        packed = packed.clone()  # words cannot begin there
    words, columns = packed.view(torch.int32), 2 * packed.shape[1]
    return PackedGroups(words, columns, (scales / 2).half(), GROUP, codebook="e2m1")


def kept_groups(exponents: Tensor) -> Quantized | None:
    """Return "e2m1" if `float4_groups` keeps a matrix with these scales (E8M0), otherwise None.

    Half of the largest scale must be a normal float16 number. Groups of which float16 cannot hold
    the scale are then less than a thousandth of the largest one.
    """
    largest = int(exponents.view(torch.uint8).max())
    return "e2m1" if _LEAST_EXPONENT <= largest <= _MOST_EXPONENT else None
