"""Random tensors, and what "equal up to rounding" means for each dtype."""

from __future__ import annotations

import torch

from gptmanager.cuda.gemm.byte_rows import ByteRows, Int8Rows
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# A unit in the last place, and for float32 what approximate exponentials cost.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got, expected, absolute=1e-4):
    """`got` of its dtype, `expected` float64; NaN where NaN is expected."""
    relative = TOLERANCE[got.dtype]
    absolute = max(absolute if got.dtype is torch.float32 else 0, relative * 0.02)
    torch.testing.assert_close(
        got.double().cpu(), expected, rtol=relative, atol=absolute, equal_nan=True
    )


def rounded(weight, kind=Int8Rows):
    """The weight in 8 bits with a scale per row."""
    found = kind(*weight.shape, weight.dtype)
    found.copy_(weight)
    return found


def exact(weight):
    """The values of a weight in float64."""
    if isinstance(weight, Int4Matrix):
        return weight.groups().floats().double()
    if isinstance(weight, ByteRows):
        return weight.values.double() * weight.scales.double().unsqueeze(1)
    return weight.double()


def on(machine, weight):
    """A copy of a weight, or of any tensor, on a machine."""
    if not isinstance(weight, ByteRows | Int4Matrix):
        return None if weight is None else machine.tensor(weight)
    copy = type(weight)(*weight.shape, weight.dtype)
    if isinstance(weight, Int4Matrix) and weight.minima is not None:
        copy.minima = machine.tensor(weight.minima)
    copy.values, copy.scales = machine.tensor(weight.values), machine.tensor(weight.scales)
    return copy
