"""`ByteRows`: a weight matrix with 8 bits a weight, row by row, as the CUDA kernels read it."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from gptmanager.kernels.gemm.packed_matrix import PackedMatrix, Panels
from gptmanager.kernels.gemm.panels.codes import Codes
from gptmanager.kernels.gemm.weight_quantization import round_to_int8

FP8 = torch.float8_e4m3fn
_LARGEST = 448.0  # the largest number of FP8
_ALL = slice(None)


class ByteRows(PackedMatrix):
    """A matrix `[rows, columns]` of float32, bfloat16 or float16, stored in 8 bits, on any device.

    `values` is `[rows, columns]` of the dtype `stored`; `scales` is float32 `[rows]`. The scale of
    a row is the row's largest magnitude, divided by 127 for int8 or 448 for FP8. `copy_` therefore
    needs whole rows, even to write only some of their columns.
    """

    stored: torch.dtype
    scales: Tensor

    def __init__(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.shape, self.dtype, self.depth = torch.Size((rows, columns)), dtype, columns
        self.values = torch.zeros(rows, columns, dtype=self.stored, device=device)
        self.scales = torch.zeros(rows, dtype=torch.float32, device=device)
        self.plans, self._parts = {}, ()

    @staticmethod
    @abstractmethod
    def round(values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers to store, not yet converted to `stored`, and the scale of each row."""

    @property
    def takes_codes(self) -> bool:
        return False  # a piece of codes has more rows than a piece of floats, which they become

    def adopt(self, panels: Panels) -> bool:
        return False  # packed files have the order of the CPU kernels

    def unpacked(self, rows: slice = _ALL) -> Tensor:
        return self._floats(self.values[rows], self.scales[rows])

    def gathered(self, ids: Tensor) -> Tensor:
        """Return the rows `ids [T]` dequantized, as `[T, columns]`."""
        values = self.values.view(torch.uint8)[ids].view(self.stored)  # FP8 cannot be indexed
        return self._floats(values, self.scales[ids])

    def _rounded(self, values: Tensor) -> Tensor:
        found, scales = self.round(values)
        return self._floats(found.to(self.stored), scales)

    def _floats(self, values: Tensor, scales: Tensor) -> Tensor:
        return (values.float() * scales.unsqueeze(1)).to(self.dtype)

    def copy_(
        self,
        values: Tensor | Codes,
        first_row: int = 0,
        first_column: int = 0,
        columns: slice = _ALL,
    ) -> None:
        assert isinstance(values, Tensor)  # not `Codes`, see `takes_codes`
        found, scales = self.round(values.to(self.values.device))
        own, rows = found[:, columns], slice(first_row, first_row + len(values))
        self.scales[rows] = scales
        self.values[rows, first_column : first_column + own.shape[1]] = own.to(self.stored)

    def _part(self, first: int, size: int) -> PackedMatrix:
        part = type(self).__new__(type(self))
        part.shape, part.dtype = torch.Size((size, self.shape[1])), self.dtype
        rows = slice(first, first + size)
        part.depth, part.values, part.scales = self.depth, self.values[rows], self.scales[rows]
        part.plans, part._parts = {}, ()
        return part


class Int8Rows(ByteRows):
    """Rows of integers from -127 to 127."""

    stored = torch.int8

    @staticmethod
    def round(values: Tensor) -> tuple[Tensor, Tensor]:
        return round_to_int8(values)


class Fp8Rows(ByteRows):
    """Rows of FP8 numbers (e4m3: 3 bits of mantissa), from -448 to 448."""

    stored = FP8

    @staticmethod
    def round(values: Tensor) -> tuple[Tensor, Tensor]:
        floats = values.float()
        scales = floats.abs().amax(dim=1) / _LARGEST
        by = torch.where(scales > 0, scales, 1.0).unsqueeze(1)
        return (floats / by).clamp(-_LARGEST, _LARGEST), scales
