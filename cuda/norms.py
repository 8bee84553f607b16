"""Launchers of RMSNorm and LayerNorm, optionally fused with an addition to the residual."""

from __future__ import annotations

import itertools

import numpy as np
from torch import Tensor

from gptmanager.cuda.device.launch import NAMES, Launcher, Program, check_tensors

_COUNTS = {True: (1, 2, 4), False: (1, 2, 8)}  # vectors per thread, for wide and narrow vectors
_MAX_THREADS = 1024


def _kernels() -> tuple[str, ...]:
    flags = ("false", "true")
    choices = itertools.product(NAMES.items(), (True, False), flags, flags)
    return tuple(
        f"norm<{name}, {16 // dtype.itemsize if wide else 1}, {count}, {centered}, {add}>"
        for (dtype, name), wide, centered, add in choices
        for count in _COUNTS[wide]
    )


PROGRAM = Program("norms.cu", _kernels(), dependent=True)


def rms_norm(
    launcher: Launcher,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
) -> None:
    """Compute `out = y / sqrt(mean(y^2) + eps) * weight` over the last dimension.

    y is x; with a residual, y is their rounded sum, which is also written to the residual. `out`,
    `x`, `residual` `[T, C]`; `weight` `[C]`; one dtype of float32, float16, bfloat16. `out` may be
    `x`. ValueError for other tensors, and for rows of more than 64 KiB, or of more than 8192
    elements if a row is not a multiple of 16 bytes.
    """
    _norm(launcher, out, x, weight, None, eps, residual, centered=False)


def layer_norm(
    launcher: Launcher,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
) -> None:
    """Compute `out = (y - mean(y)) / sqrt(variance(y) + eps) * weight + bias`, as `rms_norm`."""
    _norm(launcher, out, x, weight, bias, eps, residual, centered=True)


def _norm(
    launcher: Launcher,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    *,
    centered: bool,
) -> None:
    num_tokens, width = x.shape
    row = (num_tokens, width)
    check_tensors(
        x=(x, row, x.dtype),
        out=(out, row, x.dtype),
        residual=(residual, row, x.dtype),
        weight=(weight, (width,), x.dtype),
        bias=(bias, (width,), x.dtype),
    )
    if num_tokens == 0:
        return
    wide = width * x.itemsize % 16 == 0
    vector = 16 // x.itemsize if wide else 1
    vectors = width // vector
    counts = _COUNTS[wide]
    count = next((n for n in counts if vectors <= n * _MAX_THREADS // 2), counts[-1])
    threads = -(-vectors // (32 * count)) * 32
    if threads > _MAX_THREADS:
        raise ValueError(
            f"rows of {width} elements: at most {_MAX_THREADS * count * vector} are supported"
        )
    flags = f"{str(centered).lower()}, {str(residual is not None).lower()}"
    name = f"norm<{NAMES[x.dtype]}, {vector}, {count}, {flags}>"
    arguments = (out, residual, x, weight, bias, np.int32(width), np.float32(eps))
    launcher.kernel(PROGRAM, name)((num_tokens,), (threads,), arguments)
