"""Launchers of the activations: SiLU times up, and GELU."""

from __future__ import annotations

from typing import Literal

import numpy as np
from torch import Tensor

from gptmanager.cuda.device.launch import NAMES, Launcher, Program, check_tensors

_THREADS = 128
_WIDTHS = [(name, width) for dtype, name in NAMES.items() for width in (16 // dtype.itemsize, 1)]
PROGRAM = Program(
    "activations.cu",
    (
        *(f"silu_mul<{name}, {width}>" for name, width in _WIDTHS),
        *(f"gelu<{name}, {width}, false>" for name, width in _WIDTHS),
        *(f"gelu<{name}, {width}, true>" for name, width in _WIDTHS),
    ),
    dependent=True,
)


def silu_mul(launcher: Launcher, out: Tensor, gate_up: Tensor) -> None:
    """Compute `out = silu(gate) * up`.

    `gate_up` `[T, 2F]`: gate, then up; `out` `[T, F]` in other memory; one dtype of float32,
    float16, bfloat16. ValueError for other tensors.
    """
    num_tokens, width = out.shape
    check_tensors(
        out=(out, (num_tokens, width), out.dtype),
        gate_up=(gate_up, (num_tokens, 2 * width), out.dtype),
    )
    if out.numel() == 0:
        return
    vector = _vector(out, width)
    blocks = -(-width // (vector * _THREADS))
    name = f"silu_mul<{NAMES[out.dtype]}, {vector}>"
    arguments = (out, gate_up, np.int32(width))
    launcher.kernel(PROGRAM, name)((num_tokens, blocks), (_THREADS,), arguments)


def gelu(
    launcher: Launcher, out: Tensor, x: Tensor, approximate: Literal["none", "tanh"] = "none"
) -> None:
    """Compute `out = x * Phi(x)`, by erf or by tanh.

    Same shape; dtypes as in `silu_mul`; `out` may be `x`. ValueError for other tensors.
    """
    shape = tuple(x.shape)
    check_tensors(x=(x, shape, x.dtype), out=(out, shape, x.dtype))
    if x.numel() == 0:
        return
    vector = _vector(x, x.numel())
    blocks = -(-x.numel() // (vector * _THREADS))
    name = f"gelu<{NAMES[x.dtype]}, {vector}, {str(approximate == 'tanh').lower()}>"
    launcher.kernel(PROGRAM, name)((blocks,), (_THREADS,), (out, x, np.uint64(x.numel())))


def _vector(tensor: Tensor, width: int) -> int:
    return 16 // tensor.itemsize if width * tensor.itemsize % 16 == 0 else 1
