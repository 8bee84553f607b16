"""`ElementwiseOps`: activations, and other ops on single elements in torch.

All kernels inherit them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from gptmanager.kernels.activations.activation_kinds import (
    Activation,
    activate,
    activate_gated,
    xielu,
)
from gptmanager.kernels.attention.paged_formulas import widened


class ElementwiseOps:
    """Ops on single elements. `deterministic` is as in `Kernels`."""

    deterministic: bool

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """`total [T, C] += x [T, C]`, in place."""
        total += x

    def gated(self, x: Tensor, gates: Tensor) -> Tensor:
        """`x * sigmoid(gates)`, in x's dtype. x is `[T, N]`, gates are `[T, N]` or `[T, 1]`."""
        return (widened(x) * self.elementwise(torch.sigmoid, widened(gates))).to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` -> `[T, F]`, where `gate_up [T, 2F]` has the gate, then up."""
        return self.activate(gate_up, "silu", gated=True)

    def gelu(self, x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
        """`x * Phi(x)` by erf ("none", BERT and GPT-J) or by tanh ("tanh", GPT-2)."""
        return self.activate(x, "gelu_tanh" if approximate == "tanh" else "gelu", gated=False)

    def activate(self, x: Tensor, activation: Activation, gated: bool) -> Tensor:
        """`activation(x)`, or `activate_gated` of the two halves (gate, up) of each row of x."""

        def activated(own: Tensor) -> Tensor:
            if gated:
                gate, up = own.chunk(2, dim=-1)
                return activate_gated(gate, up, activation)
            return activate(own, activation)

        return self._each(activated, widened(x)).to(x.dtype)

    def scaled(self, x: Tensor, factor: float, softcap: float = 0.0) -> Tensor:
        """`x * factor` in x's dtype; with `softcap`, `softcap * tanh(x * factor / softcap)`."""
        result = widened(x) * factor
        if softcap:
            result = softcap * self._each(torch.tanh, result / softcap)
        return result.to(x.dtype)

    def activate_times(self, x: Tensor, activation: Activation, factors: Tensor) -> Tensor:
        """`activation(x [T, N]) * factors [T, N]`, in x's dtype."""
        activated = self.elementwise(lambda it: activate(it, activation), widened(x))
        return (activated * factors).to(x.dtype)

    def xielu(self, x: Tensor, numbers: Tensor) -> Tensor:
        """xIELU of `x [T, N]` in x's dtype; `activation_kinds.xielu` explains `numbers [2]`."""
        own = widened(numbers)
        return self.elementwise(lambda it: xielu(it, own), widened(x)).to(x.dtype)

    def scale_rows(self, x: Tensor, factors: Tensor) -> None:
        """`x [T, N] *= factors`, in place. `factors` is `[T, 1]`, or `[1]` for all tokens."""
        x.mul_(factors)  # torch multiplies in the wider dtype

    def clamp(self, x: Tensor, limit: float) -> None:
        """Limit the magnitude of each element of x to `limit`, in place; NaN stays NaN."""
        x.clamp_(-limit, limit)

    def _each(self, op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `op(x [T, ...])`, computed token by token if deterministic."""
        if not self.deterministic or len(x) < 2:
            return op(x)
        return torch.cat([op(own) for own in torch.split(x, 1)])

    def elementwise(self, op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `op(x [T, ...])` for an elementwise `op`. On the CPU, `_each` computes it.

        On the CPU, torch computes the last elements of each thread's share without SIMD, so their
        bits would depend on their place.
        """
        return self._each(op, x) if x.device.type == "cpu" else op(x)
