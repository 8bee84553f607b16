"""Launchers of activation kernels: `activation(x)`, and `activation(gate) * up` for gated MLPs."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gptmanager.cuda.device.launch import NAMES, Launcher, Program, check_tensors
from gptmanager.kernels.activations.activation_kinds import Activation

_THREADS = 128
_WIDTHS = [(name, width) for dtype, name in NAMES.items() for width in (16 // dtype.itemsize, 1)]
_PLAIN: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
_GATED: tuple[Activation, ...] = (*_PLAIN, "clamped_swiglu")
PROGRAM = Program(
    "activations.cu",
    (
        *(
            f"activate_gated<{name}, {width}, {kind.upper()}>"
            for kind in _GATED
            for name, width in _WIDTHS
        ),
        *(
            f"activate<{name}, {width}, {kind.upper()}>"
            for kind in _PLAIN
            for name, width in _WIDTHS
        ),
    ),
    dependent=True,
)


def activate_gated(
    launcher: Launcher, out: Tensor, gate_up: Tensor, activation: Activation = "silu"
) -> None:
    """Compute `out = activation(gate) * up`. For "clamped_swiglu" see `activation_kinds`.

    `gate_up` `[T, 2F]` has the columns of the gate, then the columns of up. `out` `[T, F]` must not
    overlap `gate_up`. Both have the same dtype: float32, float16 or bfloat16. Raises ValueError for
    other tensors.
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
    name = f"activate_gated<{NAMES[out.dtype]}, {vector}, {activation.upper()}>"
    arguments = (out, gate_up, np.int32(width))
    launcher.kernel(PROGRAM, name)((num_tokens, blocks), (_THREADS,), arguments)


def activate(launcher: Launcher, out: Tensor, x: Tensor, activation: Activation) -> None:
    """Compute `out = activation(x)` elementwise. "clamped_swiglu" is not allowed: it needs a gate.

    `out` may be `x`. Both have the same shape and dtype: float32, float16 or bfloat16. Raises
    ValueError for other tensors.
    """
    shape = tuple(x.shape)
    check_tensors(x=(x, shape, x.dtype), out=(out, shape, x.dtype))
    if x.numel() == 0:
        return
    vector = _vector(x, x.numel())
    blocks = -(-x.numel() // (vector * _THREADS))
    name = f"activate<{NAMES[x.dtype]}, {vector}, {activation.upper()}>"
    launcher.kernel(PROGRAM, name)((blocks,), (_THREADS,), (out, x, np.uint64(x.numel())))


def _vector(tensor: Tensor, width: int) -> int:
    return 16 // tensor.itemsize if width * tensor.itemsize % 16 == 0 else 1
