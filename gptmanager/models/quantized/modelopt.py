"""Matrices that only ModelOpt writes: 4-bit integers in pairs of rows, and scales of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gptmanager.kernels.gemm.panels.codes import Codes
from gptmanager.memory.tensor_sources import CodesOf
from gptmanager.models.quantized.matrices import Grid, Read, StoredMatrix, check_scales


@dataclass(frozen=True)
class RowPairs(StoredMatrix):
    """Signed 4-bit integers, two in a byte, with a scale for each group of columns.

    A row of the tensor `name`, uint8 `[rows / 2, columns]`, has two rows of the matrix: the first
    one in the lower halves of its bytes.
    """

    name: str
    shape: tuple[int, ...]
    scales: Grid

    def codes(self, read: Read, rows: range) -> Codes:
        first = rows.start // 2
        pairs = read(self.name, range(first, -(-rows.stop // 2)), range(self.shape[1]))
        halves = torch.stack((pairs & 15, pairs >> 4), dim=1).flatten(0, 1)
        return Codes(
            codes=((halves ^ 8).to(torch.int8) - 8)[rows.start - 2 * first :][: len(rows)],
            scales=self.scales.rows(read, rows),
            block=self.scales.width,
        )


@dataclass(frozen=True)
class InputScaledMatrix(StoredMatrix):
    """A matrix of which each column is multiplied by the scale of an input.

    `stored` is the matrix without these scales, and `inputs` the name of the tensor of scales.
    """

    stored: StoredMatrix
    inputs: str
    codes_of: CodesOf = ""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.stored.shape

    def codes(self, read: Read, rows: range) -> Codes:
        raise NotImplementedError("a column of the codes has no scale of its own")

    def floats(self, read: Read, rows: range) -> Tensor:
        scales = read(self.inputs).float()
        check_scales(self.inputs, scales)
        return self.stored.floats(read, rows) * scales
