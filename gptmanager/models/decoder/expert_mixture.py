"""Computes a layer's experts, and adds the output of its shared MLP."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gptmanager.kernels.reference import Kernels
from gptmanager.models.decoder.layer_tensors import ExpertLayer, ExpertNorms


def mix_experts(
    kernels: Kernels, own: ExpertLayer, hidden: Tensor, shared: Tensor | None
) -> Tensor:
    """Return the outputs `[T, C]` of the experts for `hidden [T, C]`, plus `shared`.

    `shared [T, C]`: the output of the layer's shared MLP, or None. If the layer has a gate for the
    shared MLP, `shared` is multiplied by the sigmoid of the gate's output before the addition. The
    sum is halved if the layer has the mean of both.
    """
    logits = kernels.linear(hidden, *own.router)
    rows = hidden if own.latents is None else kernels.linear(hidden, *own.latents[0])
    mixed = kernels.experts(rows, logits, own.correction, own.routing, own.experts)
    if own.latents is not None:
        mixed = kernels.linear(mixed, *own.latents[1])
    if shared is None:
        return mixed
    if own.shared_gate is not None:
        shared = kernels.gated(shared, kernels.linear(hidden, own.shared_gate))
    kernels.add_to(mixed, shared)
    return kernels.scaled(mixed, 0.5) if own.averaged else mixed


def mix_apart(
    kernels: Kernels,
    own: ExpertLayer,
    norms: ExpertNorms,
    residual: Tensor,
    shared: Tensor,
    eps: float,
    sum_of_ranks: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the outputs `[T, C]` of experts that read the residual `[T, C]`, plus `shared`.

    `shared [T, C]`: the output of the layer's shared MLP. Both outputs are normalized before the
    addition. `sum_of_ranks` sums the experts' outputs over the ranks. See `Experts.apart`.
    """
    logits = kernels.linear(kernels.rms_norm(residual, norms.router, eps), *own.router)
    logits = kernels.scaled(logits, residual.shape[1] ** -0.5)
    rows = kernels.rms_norm(residual, norms.experts, eps)
    mixed = kernels.experts(rows, logits, own.correction, own.routing, own.experts)
    mixed = kernels.rms_norm(sum_of_ranks(mixed), norms.experts_out, eps)
    kernels.add_to(mixed, kernels.rms_norm(shared, norms.shared_out, eps))
    return mixed
