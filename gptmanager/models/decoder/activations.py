"""The activation of a dense MLP: one of `Kernels.activate`, or xIELU with learned numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmanager.kernels.attention.paged_formulas import widened
from gptmanager.kernels.reference import Kernels
from gptmanager.models.decoder.layer_tensors import DenseLayer

_BETA, _EPS = 0.5, -1e-6


def activate_mlp(kernels: Kernels, up: Tensor, own: DenseLayer) -> Tensor:
    """Return the activation of `up [T, F]`, or of its halves if the MLP is gated."""
    if own.xielu is None:
        return kernels.activate(up, own.mlp.activation, own.mlp.gated)
    return _xielu(widened(up), widened(own.xielu)).to(up.dtype)


def _xielu(x: Tensor, numbers: Tensor) -> Tensor:
    """Return xIELU (arXiv:2411.13010) of each element. `numbers [2]` follow from its two slopes."""
    positive, negative = F.softplus(numbers)
    right = positive * x * x
    left = (torch.expm1(x.clamp(max=_EPS)) - x) * (negative + _BETA)
    return torch.where(x > 0, right, left) + _BETA * x
