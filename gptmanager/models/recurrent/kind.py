"""`RecurrentKind`: the interface of the kinds of recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.reference import Kernels
from gptmanager.memory.slot_states import StateShape
from gptmanager.memory.weights import Weights

Shape = tuple[int, ...]


class RecurrentKind(Protocol):
    """A kind of recurrent layer, with the sizes of a layer. An object is frozen and hashable.

    `name`: the name of the kind in `Kernels.warm_up_layers`, with which the names of its parameters
    begin. `inputs`: the matrices that project the layer's input. The matrix `NAME_out` projects its
    output of `out_width` elements for each token. `wide`: the parameters that are kept in float32
    at least, because their errors would add up over all tokens of a sequence.
    """

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def wide(self) -> tuple[str, ...]: ...
    @property
    def out_width(self) -> int: ...

    def states(self, dtype: torch.dtype) -> tuple[StateShape, ...]:
        """Return the states of a sequence, for a model with weights of `dtype`."""

    def parameters(self, hidden_size: int) -> dict[str, Shape]:
        """Return name -> shape of the parameters. The filter of a convolution is `NAME_conv`."""

    def modules(self, is_joined: bool) -> Iterator[tuple[str, str, range]]:
        """Yield the modules that adapters may change, as (name, matrix, output columns).

        `is_joined`: in the checkpoint, each matrix of `inputs` is one module.
        """

    def is_captured(self, kernels: Kernels) -> bool:
        """Return whether CUDA graphs can contain `attend`: it then never waits for the device."""

    def tensors(self, weights: Weights, prefix: str) -> Any:
        """Return the parameters of the layer `prefix` apart from its projections, for `attend`."""

    def attend(
        self,
        kernels: Kernels,
        projected: Sequence[Tensor],
        tensors: Any,
        states: Sequence[Tensor],
        eps: float,
        rows: RowSpans,
    ) -> Tensor:
        """Update the states of `rows`; return the output `[T, out_width]` of their tokens.

        `projected`: the results of the matrices `inputs`, which may be changed. `states`: a tensor
        `[slots, ...]` for each of `self.states`. `eps`: that of the network's norms.
        """
