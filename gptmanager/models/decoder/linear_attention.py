"""`DeltaLayer`: the tensors of a layer with linear attention (the gated delta rule)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.recurrent.delta_formulas import DeltaShape, DeltaState, DeltaTensors
from gptmanager.kernels.reference import Kernels
from gptmanager.memory.kv_pool import KvPool
from gptmanager.memory.weights import Weights
from gptmanager.models.decoder.layer_tensors import Affine, affine
from gptmanager.models.parameters import matrix_names
from gptmanager.models.spec import ModelSpec


class DeltaLayer(NamedTuple):
    """The tensors of a layer with the gated delta rule.

    `matrices`: the projections that compute `projected` and `gates` (see `attend`), each with its
    name from `matrix_names`. `state`: the index of the first of the layer's two tensors in
    `KvPool.states.tensors`.
    """

    shape: DeltaShape
    matrices: tuple[tuple[Affine, str], ...]
    tensors: DeltaTensors
    eps: float
    state: int

    def attend(
        self, kernels: Kernels, projected: Tensor, gates: Tensor, kv_pool: KvPool, rows: RowSpans
    ) -> Tensor:
        """Update the states of `rows`, and return the input of the output projection.

        The result is `[T, H * V]`: T tokens, H value heads, V elements of a value.
        """
        inputs, memory = kv_pool.states.tensors[self.state : self.state + 2]
        own = self.shape, self.tensors, self.eps, DeltaState(inputs, memory)
        return kernels.gated_delta(projected, gates, *own, rows)


def delta_layer(spec: ModelSpec, weights: Weights, index: int) -> DeltaLayer | None:
    """Return the tensors of layer `index`, or None if it does not use the gated delta rule."""
    shape, prefix = spec.layers[index].attention.delta, f"layers.{index}"
    if shape is None:
        return None
    names = matrix_names(spec, index)
    before = spec.layers[:index]
    return DeltaLayer(
        shape,
        tuple((affine(weights, f"{prefix}.{it}"), names[it]) for it in ("delta_in", "delta_gates")),
        DeltaTensors(
            weights.tensor(f"{prefix}.delta_conv.weight"),
            weights.tensor(f"{prefix}.delta_decay"),
            weights.tensor(f"{prefix}.delta_step"),
            weights.tensor(f"{prefix}.delta_norm.weight"),
        ),
        spec.norms.eps,
        2 * sum(layer.attention.delta is not None for layer in before),
    )
