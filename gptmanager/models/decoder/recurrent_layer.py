"""`RecurrentLayer`: the tensors of a recurrent layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.reference import Kernels
from gptmanager.memory.kv_pool import KvPool
from gptmanager.memory.weights import Weights
from gptmanager.models.decoder.layer_tensors import Affine, affine
from gptmanager.models.parameters import matrix_names
from gptmanager.models.recurrent.kind import RecurrentKind
from gptmanager.models.spec import ModelSpec


class RecurrentLayer(NamedTuple):
    """The tensors of a recurrent layer.

    `matrices`: the projections of the layer's input, each with its name from `matrix_names`.
    `tensors`: the other parameters but for the output projection. `states`: the places of the
    layer's states in `KvPool.states.tensors`.
    """

    kind: RecurrentKind
    matrices: tuple[tuple[Affine, str], ...]
    tensors: Any
    eps: float
    states: slice

    def attend(
        self, kernels: Kernels, projected: Sequence[Tensor], kv_pool: KvPool, rows: RowSpans
    ) -> Tensor:
        """Update the states of `rows`, and return the input of the output projection.

        `projected`: the results of `matrices`.
        """
        states = kv_pool.states.tensors[self.states]
        return self.kind.attend(kernels, projected, self.tensors, states, self.eps, rows)


def recurrent_layer(spec: ModelSpec, weights: Weights, index: int) -> RecurrentLayer | None:
    """Return the tensors of layer `index`, or None if the layer has attention."""
    kind, prefix = spec.layers[index].attention.recurrent, f"layers.{index}"
    if kind is None:
        return None
    names = matrix_names(spec, index)
    before = (layer.attention.recurrent for layer in spec.layers[:index])
    first = sum(len(it.states(spec.dtype)) for it in before if it is not None)
    return RecurrentLayer(
        kind,
        tuple((affine(weights, f"{prefix}.{it}"), names[it]) for it in kind.inputs),
        kind.tensors(weights, prefix),
        spec.norms.eps,
        slice(first, first + len(kind.states(spec.dtype))),
    )
