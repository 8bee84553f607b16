"""`multiply`: torch's matmul (cuBLAS) of rows and a weight that are both in 8-bit floats."""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.cuda.gemm.byte_rows import FP8, Fp8Rows
from gptmanager.cuda.gemm.device_matrices import DeviceMatrix

_ALIGNMENT = 16  # the sizes of the weight are multiples of this number


def covers(x: Tensor, weight: DeviceMatrix) -> bool:
    """Return whether `multiply` supports the tensors.

    `x` must be bfloat16 on a GPU. `weight` must be `Fp8Rows` with aligned sizes.
    """
    return (
        isinstance(weight, Fp8Rows)
        and x.is_cuda
        and x.dtype is torch.bfloat16
        and not any(size % _ALIGNMENT for size in weight.shape)
    )


def multiply(x: Tensor, weight: Fp8Rows, bias: Tensor | None = None) -> Tensor:
    """Return `x [T, I] @ weight [O, I]^T + bias [O]`. Each row of x is rounded to 8 bits first."""
    rounded, scales = Fp8Rows.round(x)
    result: Tensor = torch._scaled_mm(
        rounded.to(FP8),
        weight.values.t(),
        scale_a=scales.unsqueeze(1),
        scale_b=weight.scales.unsqueeze(0),
        bias=bias,
        out_dtype=x.dtype,
    )
    return result
