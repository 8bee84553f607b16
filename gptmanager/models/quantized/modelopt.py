"""Matrices that only ModelOpt writes.

These are 4-bit integers in pairs of rows, scales of inputs, and the experts of Llama 4 in NVFP4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gptmanager.errors import ConfigError
from gptmanager.kernels.gemm.panels.code_loops import E2M1
from gptmanager.kernels.gemm.panels.codes import Codes, numbers
from gptmanager.memory.checkpoint.tensor_sources import CodesOf, TensorInfo, tensor_name
from gptmanager.models.quantized.matrices import Grid, Read, StoredMatrix, check_scales

_GROUP = 16  # columns of NVFP4 that share a scale


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
    It is read as floats only, because codes have no scale for a column.
    """

    stored: StoredMatrix
    inputs: str
    codes_of: CodesOf = ""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.stored.shape

    def codes(self, read: Read, rows: range) -> Codes:
        raise TypeError(f"the columns of {self.inputs} have scales of their own: read floats")

    def floats(self, read: Read, rows: range) -> Tensor:
        scales = read(self.inputs).float()
        check_scales(self.inputs, scales)
        return self.stored.floats(read, rows) * scales


@dataclass(frozen=True)
class Float4Experts(StoredMatrix):
    """The matrices of all experts, `[experts, columns, rows]`, in NVFP4.

    The tensor `name` is uint8 `[experts, columns / 2, rows]`: a byte has two columns of a row. The
    tensor `scales` is `[experts, groups of columns, rows]`, and is multiplied by the number in the
    tensor `factor`. Rows are numbered consecutively across the experts; rows that are read belong
    to one expert.
    """

    name: str
    shape: tuple[int, ...]
    scales: str
    groups: int
    factor: str
    codes_of: CodesOf = "columns"

    def codes(self, read: Read, rows: range) -> Codes:
        expert, first = divmod(rows.start, self.shape[2])
        own = range(first, first + len(rows))

        def read_own(name: str, count: int) -> Tensor:
            return read(name, range(expert, expert + 1), range(count), own)[0].t().contiguous()

        scales = numbers(read_own(self.scales, self.groups))
        check_scales(self.scales, scales)
        scales = scales * read(self.factor).float()
        check_scales(self.factor, scales)
        packed, width = read_own(self.name, self.shape[1] // 2), self.shape[1] // self.groups
        return Codes(codes=packed, scales=scales, block=width, kind=E2M1)


def float4_experts(name: str, info: TensorInfo, take: Callable[..., TensorInfo]) -> Float4Experts:
    """Describe the matrices of all experts in the tensor `name`. `take`: see `codebook_matrix`."""
    if len(info.shape) != 3 or 0 in info.shape or 2 * info.shape[1] % _GROUP:
        raise ConfigError(
            f"tensor {tensor_name(name)} is uint8 {list(info.shape)}: it must be [experts, "
            f"inputs / 2, outputs], with inputs in groups of {_GROUP}"
        )
    count, half, rows = info.shape
    groups, scales, factor = 2 * half // _GROUP, f"{name}_weight_scale", f"{name}_weight_scale_2"
    take(scales, "float8_e4m3fn", (count, groups, rows))
    take(factor, "float32", (), (1,))
    return Float4Experts(name, (count, 2 * half, rows), scales, groups, factor)
