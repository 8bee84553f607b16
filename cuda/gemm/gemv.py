"""GEMV: matmul of few rows with a weight matrix, optionally fused with a gated activation.

`matmul_choice` decides when to use GEMV instead of torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.cuda.device.launch import NAMES, Launcher, Program, check_tensors, ints
from gptmanager.cuda.gemm.byte_rows import ByteRows
from gptmanager.cuda.gemm.device_matrices import BYTES, scales_of, values_of

FEW_ROWS = 16
_THREADS = 512
_VECTOR_BYTES = 16


# itemsize -> template arguments: number of tiles, and whether the activation is fused
_KINDS = {2: ("2, false", "4, false", "4, true"), 4: ("2, false", "4, true")}
PROGRAM = Program(
    "gemm/gemv.cu",
    tuple(
        f"gemv<{name}, {kind}{weight}>"
        for weight in ("", *BYTES.values())
        for dtype, name in NAMES.items()
        for kind in _KINDS[dtype.itemsize]
    ),
    dependent=True,
)


def covers(x: Tensor, weight: Tensor | ByteRows) -> bool:
    """Return whether `multiply` supports the tensors: it reads rows in 16-byte vectors."""
    values = values_of(weight)
    return (
        weight.dtype in NAMES
        and values.shape[1] * values.itemsize % _VECTOR_BYTES == 0
        and values.is_contiguous()
        and values.data_ptr() % _VECTOR_BYTES == 0
        and x.is_contiguous()
        and x.data_ptr() % _VECTOR_BYTES == 0
    )


def multiply(
    launcher: Launcher,
    out: Tensor,
    x: Tensor,
    weight: Tensor | ByteRows,
    bias: Tensor | None = None,
    *,
    silu: bool = False,
) -> None:
    """Compute `out [T, O] = x [T, I] @ weight [O, I]^T + bias [O]`; float32, float16 or bfloat16.

    For `ByteRows`, the stored values are multiplied, and each sum is then multiplied by the scale
    of its weight row.

    With `silu`, `weight [2O, I]` and `bias [2O]` contain the rows of the gate, then the rows of the
    up projection, and `out [T, O] = silu(gate) * up`; gate and up are not rounded before the
    activation. Accumulates in float32 and rounds once. Batch-invariant: the bits of a row of `out`
    do not depend on the other rows or their number. The weight is read once for each 16 rows
    (`FEW_ROWS`) of `x`, or for each 8 rows in float32. The row size of `weight` must be a multiple
    of 16 bytes. Raises ValueError for other tensors.
    """
    num_rows, width = out.shape
    depth, dtype, num_weights = x.shape[1], out.dtype, (1 + silu) * width
    values, scales = values_of(weight), scales_of(weight)
    check_tensors(
        out=(out, (num_rows, width), dtype),
        x=(x, (num_rows, depth), dtype),
        weight=(values, (num_weights, depth), dtype if scales is None else values.dtype),
        scales=(scales, (num_weights,), torch.float32),
        bias=(bias, (num_weights,), dtype),
    )
    if not covers(x, weight):
        raise ValueError(
            f"x and weight must be contiguous rows of a multiple of {_VECTOR_BYTES} bytes, aligned "
            f"to as many, got rows of {depth} {dtype}"
        )
    if out.numel() == 0:
        return
    row_tiles = -(-num_rows // (FEW_ROWS if dtype.itemsize == 2 else FEW_ROWS // 2))
    # A warp reads x once for all of its tiles of outputs: 4 tiles with silu, and for 2-byte dtypes
    # also without silu if at least three quarters of the multiprocessors then have work.
    tiles = 4 if silu or (dtype.itemsize == 2 and _fill(width // 32, launcher)) else 2
    items = -(-width // (16 if silu else 8 * tiles)) * row_tiles
    kind = BYTES.get(values.dtype, "")
    name = f"gemv<{NAMES[dtype]}, {tiles}, {str(silu).lower()}{kind}>"
    arguments = (out, x, values, scales, bias, *ints(num_rows, width, depth))
    grid = (min(items, launcher.num_multiprocessors),)
    launcher.kernel(PROGRAM, name)(grid, (_THREADS,), arguments)


def _fill(items: int, launcher: Launcher) -> bool:
    return 4 * items >= 3 * launcher.num_multiprocessors
