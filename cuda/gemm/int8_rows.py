"""`Int8Rows`: a weight of the network in 8 bits, in the order in which CUDA kernels read it."""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.kernels.gemm.packed_matrix import PackedMatrix, Panels
from gptmanager.kernels.gemm.weight_quantization import round_to_int8

_ALL = slice(None)


class Int8Rows(PackedMatrix):
    """A matrix `[rows, columns]` of float32, bfloat16 or float16 as int8, on any device.

    `values` is int8 `[rows, columns]`, `scales` float32 `[rows]`. The largest magnitude of a row
    becomes 127, so `copy_` needs whole rows, even to write only some of their columns.
    """

    scales: Tensor

    def __init__(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.shape, self.dtype, self.depth = torch.Size((rows, columns)), dtype, columns
        self.values = torch.zeros(rows, columns, dtype=torch.int8, device=device)
        self.scales = torch.zeros(rows, dtype=torch.float32, device=device)
        self.plans, self._parts = {}, ()

    def adopt(self, panels: Panels) -> bool:
        return False  # packed files have the order of the CPU kernels

    def unpacked(self, rows: slice = _ALL) -> Tensor:
        return (self.values[rows] * self.scales[rows].unsqueeze(1)).to(self.dtype)

    def gathered(self, ids: Tensor) -> Tensor:
        """Return the rows `ids [T]`, as `[T, columns]`."""
        return (self.values[ids] * self.scales[ids].unsqueeze(1)).to(self.dtype)

    def copy_(
        self,
        values: Tensor,
        first_row: int = 0,
        first_column: int = 0,
        columns: slice = _ALL,
    ) -> None:
        ints, scales = round_to_int8(values.to(self.values.device))
        own, rows = ints[:, columns], slice(first_row, first_row + len(values))
        self.scales[rows] = scales
        self.values[rows, first_column : first_column + own.shape[1]] = own.to(torch.int8)

    def _part(self, first: int, size: int) -> PackedMatrix:
        part = Int8Rows.__new__(Int8Rows)
        part.shape, part.dtype = torch.Size((size, self.shape[1])), self.dtype
        rows = slice(first, first + size)
        part.depth, part.values, part.scales = self.depth, self.values[rows], self.scales[rows]
        part.plans, part._parts = {}, ()
        return part
