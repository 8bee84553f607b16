"""The activations of MLPs by name, in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"]

# For "clamped_swiglu": the limit of gate and up values, and the factor within the sigmoid.
SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702

_PLAIN: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return the activation of each element of `x`. `activation` must not be "clamped_swiglu"."""
    return _PLAIN[activation](x)


def activate_gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return `activation(gate) * up`; for "clamped_swiglu", the clamped SwiGLU of gpt-oss."""
    if activation != "clamped_swiglu":
        return activate(gate, activation) * up
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * gate * (SWIGLU_SLOPE * gate).sigmoid()
