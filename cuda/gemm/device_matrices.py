"""The forms in which CUDA kernels read a weight: a tensor, `ByteRows`, or an `Int4Matrix`."""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.cuda.gemm.byte_rows import FP8, ByteRows
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.packed_matrix import Matrix, plain

DeviceMatrix = Tensor | ByteRows | Int4Matrix
# the last template argument of kernels for weights in 8 bits, by the stored dtype
BYTES = {torch.int8: ", int8", FP8: ", __nv_fp8_e4m3"}


def on_device(matrix: Matrix) -> DeviceMatrix:
    """Return the matrix in a form that kernels read."""
    return matrix if isinstance(matrix, ByteRows | Int4Matrix) else plain(matrix)


def values_of(weight: DeviceMatrix) -> Tensor:
    """Return the stored values of a weight, without its scales."""
    return weight if isinstance(weight, Tensor) else weight.values


def scales_of(weight: Tensor | ByteRows) -> Tensor | None:
    """Return the scales of a weight's rows; None if it is a tensor."""
    return weight.scales if isinstance(weight, ByteRows) else None
