"""The forms in which CUDA kernels read a weight: a tensor, `Int8Rows`, or an `Int4Matrix`."""

from __future__ import annotations

from torch import Tensor

from gptmanager.cuda.gemm.int8_rows import Int8Rows
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.packed_matrix import Matrix, plain

DeviceMatrix = Tensor | Int8Rows | Int4Matrix
INT8 = ", int8"  # the last template argument of kernels for int8 weights


def on_device(matrix: Matrix) -> DeviceMatrix:
    """Return the matrix in a form that kernels read."""
    return matrix if isinstance(matrix, Int8Rows | Int4Matrix) else plain(matrix)


def values_of(weight: DeviceMatrix) -> Tensor:
    """Return the stored values of a weight, without its scales."""
    return weight if isinstance(weight, Tensor) else weight.values


def scales_of(weight: Tensor | Int8Rows) -> Tensor | None:
    """Return the scales of a weight's rows; None if it is a tensor."""
    return weight.scales if isinstance(weight, Int8Rows) else None
