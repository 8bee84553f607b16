"""The activations of MLPs by name, and xIELU, in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"]

# For "clamped_swiglu": the limit of gate and up values, and the factor within the sigmoid.
SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702
XIELU_BETA, XIELU_EPS = 0.5, -1e-6

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


def xielu(x: Tensor, numbers: Tensor) -> Tensor:
    """Return xIELU (arXiv:2411.13010) of each element. `numbers [2]` follow from its two slopes."""
    positive, negative = F.softplus(numbers)
    right = positive * x * x
    left = (torch.expm1(x.clamp(max=XIELU_EPS)) - x) * (negative + XIELU_BETA)
    return torch.where(x > 0, right, left) + XIELU_BETA * x
