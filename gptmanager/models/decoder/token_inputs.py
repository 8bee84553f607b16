"""`TokenInputTensors`: computes each layer's second input, which `spec.TokenInputs` describes."""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.kernels.reference import Kernels
from gptmanager.memory.weights import Weights
from gptmanager.models.batch import Batch
from gptmanager.models.decoder.layer_tensors import LayerTensors
from gptmanager.models.spec import ModelSpec, TokenInputs


class TokenInputTensors:
    """Computes the inputs of all layers once a step, and adds a layer's input to the residual."""

    def __init__(
        self, spec: ModelSpec, given: TokenInputs, weights: Weights, kernels: Kernels
    ) -> None:
        self._given, self._kernels = given, kernels
        self._hidden_size, self._eps = spec.hidden_size, spec.norms.eps
        self._plus_one = spec.norms.plus_one
        mlps = (layer.mlp for layer in spec.layers)
        self._activations = [mlp.activation for mlp in mlps if mlp is not None]
        self._embedding = weights["token_embedding.weight"]
        self._projection = weights["token_projection.weight"]
        self._norm = weights.tensor("token_norm.weight")

    def of_batch(self, batch: Batch, residual: Tensor) -> Tensor:
        """Return the inputs `[T, layers, width]` of all tokens of a step.

        `residual` `[T, hidden_size]` is the residual before the first layer.
        """
        width, kernels, ids = self._given.width, self._kernels, batch.token_ids
        if batch.prompt_index is not None:
            ids = ids.index_fill(0, batch.prompt_index, self._given.padding_id)
        embedded = kernels.scaled(kernels.embedding(ids, self._embedding), width**0.5)
        projected = kernels.linear(residual, self._projection)
        projected = kernels.scaled(projected, self._hidden_size**-0.5)
        normed = kernels.rms_norm(
            projected.view(-1, width), self._norm, self._eps, self._plus_one
        ).view_as(embedded)
        kernels.add_to(normed, embedded)
        return kernels.scaled(normed, 0.5**0.5).view(len(ids), -1, width)

    def add(self, layer: LayerTensors, residual: Tensor, inputs: Tensor) -> None:
        """Gate, project and normalize a layer's part of `inputs`; add the result to `residual`.

        `inputs` is `[T, layers, width]`, and `residual` is changed in place.
        """
        assert layer.end is not None and layer.end.token_input is not None
        own, activation = layer.end.token_input, self._activations[layer.number]
        gate = self._kernels.linear(residual, own.gate)
        gated = self._kernels.activate_times(gate, activation, inputs[:, layer.number])
        out = self._kernels.linear(gated, own.out)
        out = self._kernels.rms_norm(out, own.norm.weight, self._eps, self._plus_one)
        self._kernels.add_to(residual, out)


def of_sampled(inputs: Tensor | None, index: Tensor) -> Tensor | None:
    """Return the inputs of the tokens with the indices `index`; None if `inputs` is None."""
    return None if inputs is None else torch.index_select(inputs, 0, index)
