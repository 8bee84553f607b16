"""The forms in which CUDA kernels read a weight: a tensor, `ByteRows`, or an `Int4Matrix`."""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.cuda.gemm.byte_rows import FP8, ByteRows
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.packed_matrix import Matrix, plain

DeviceMatrix = Tensor | ByteRows | Int4Matrix
# stored dtype of an 8-bit weight -> text of the last template argument of the kernels that read it
BYTES = {torch.int8: ", int8", FP8: ", __nv_fp8_e4m3"}


def on_device(matrix: Matrix) -> DeviceMatrix:
    """Return the matrix in a form that kernels read."""
    return matrix if isinstance(matrix, ByteRows | Int4Matrix) else plain(matrix)


def values_of(weight: DeviceMatrix) -> Tensor:
    """Return the stored values of a weight, without its scales."""
    return weight if isinstance(weight, Tensor) else weight.values


def scales_of(weight: Tensor | ByteRows) -> Tensor | None:
    """Return the scales of a weight's rows; None if the weight is a tensor."""
    return weight.scales if isinstance(weight, ByteRows) else None
