"""GEMV with a 4-bit weight: matmul of few rows with an `Int4Matrix`, without dequantizing it."""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.cuda.device.launch import NAMES, Launcher, Program, check_tensors, ints
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix

MOST_ROWS = 64  # callers use another matmul for more rows of x: the weight is read per 16 rows
_DTYPES = (torch.float16, torch.bfloat16)
# As in the .cu: the threads of a block, and the columns and rows of `out` in an item.
_THREADS, _COLUMNS, _ROWS = 512, 32, 16
PROGRAM = Program(
    "gemm/gemv_int4.cu",
    tuple(
        f"gemv_int4<{NAMES[dtype]}, {minima}>" for dtype in _DTYPES for minima in ("false", "true")
    ),
    dependent=True,
)


def covers(x: Tensor, weight: Int4Matrix) -> bool:
    """Return whether `multiply` supports the tensors."""
    return (
        x.dtype in _DTYPES
        and weight.codebook is None
        and x.shape[1] % 4 == 0
        and x.is_contiguous()
        and x.data_ptr() % 16 == 0
        and weight.values.data_ptr() % 16 == 0
    )


def multiply(
    launcher: Launcher, out: Tensor, x: Tensor, weight: Int4Matrix, bias: Tensor | None = None
) -> None:
    """Compute `out [T, O] = x [T, I] @ weight [O, I]^T + bias [O]`, in float16 or bfloat16.

    `x` is multiplied by the 4-bit values. The sum of each group of 32 columns of the weight is then
    multiplied by the group's scale, in float32. If the weight has minima, the sum of the
    elements of `x` in the group's columns, times the group's minimum, is added. The result is
    rounded once. Batch-invariant: the bits of a row of `out` do not depend on the other rows or
    their number. A row of `x` must have a multiple of 8 bytes. Raises ValueError for tensors that
    `covers` refuses.
    """
    (num_rows, width), depth, dtype = out.shape, x.shape[1], out.dtype
    values, scales, minima, _ = weight.panels
    shape = scales.shape
    check_tensors(
        out=(out, (num_rows, width), dtype),
        x=(x, (num_rows, depth), dtype),
        values=(values, (shape[0], shape[1], 4, 16, 4), torch.uint8),
        scales=(scales, (-(-width // 16), -(-depth // 32), 16), torch.float16),
        minima=(minima, tuple(shape), torch.float16),
        bias=(bias, (width,), dtype),
    )
    if not covers(x, weight):
        raise ValueError(f"{num_rows} rows of {depth} {dtype} are not covered")
    if out.numel() == 0:
        return
    items = -(-width // _COLUMNS) * -(-num_rows // _ROWS)
    name = f"gemv_int4<{NAMES[dtype]}, {str(minima is not None).lower()}>"
    arguments = (out, x, values, scales, minima, bias, *ints(num_rows, width, depth))
    grid = (min(items, launcher.num_multiprocessors),)
    launcher.kernel(PROGRAM, name)(grid, (_THREADS,), arguments)
