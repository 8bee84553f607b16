"""`StateSpace`: Mamba-2 (Granite 4.0-H, Bamba)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.recurrent.convolution import Filter
from gptmanager.kernels.recurrent.state_space_formulas import (
    StateSpaceShape,
    StateSpaceState,
    StateSpaceTensors,
)
from gptmanager.kernels.reference import Kernels
from gptmanager.memory.slot_states import StateShape
from gptmanager.memory.weights import Weights
from gptmanager.models.recurrent.kind import Shape


@dataclass(frozen=True, slots=True)
class StateSpace:
    """The `RecurrentKind` of Mamba-2.

    Its states are the last inputs of the convolution, and the memories of the heads. `biased`: both
    projections have biases. `conv_biased`: the convolution has a bias.
    """

    shape: StateSpaceShape
    biased: bool = False
    conv_biased: bool = True
    name: ClassVar[str] = "space"
    inputs: ClassVar[tuple[str, ...]] = ("space_in",)
    wide: ClassVar[tuple[str, ...]] = ("space_decay", "space_step", "space_skip")

    @property
    def out_width(self) -> int:
        return self.shape.inner

    def states(self, dtype: torch.dtype) -> tuple[StateShape, ...]:
        own, wide = self.shape, torch.promote_types(dtype, torch.float32)
        return (
            StateShape((own.width - 1, own.channels), dtype),
            StateShape((own.heads, own.state, own.head_dim), wide),
        )

    def parameters(self, hidden_size: int) -> dict[str, Shape]:
        own = self.shape
        found: dict[str, Shape] = {
            "space_in.weight": (own.projected, hidden_size),
            "space_conv.weight": (own.width, own.channels),
            **dict.fromkeys(("space_decay", "space_step", "space_skip"), (own.heads,)),
            "space_norm.weight": (own.inner,),
            "space_out.weight": (hidden_size, own.inner),
        }
        if self.biased:
            found |= {"space_in.bias": (own.projected,), "space_out.bias": (hidden_size,)}
        return found | ({"space_conv.bias": (own.channels,)} if self.conv_biased else {})

    def modules(self, is_joined: bool) -> Iterator[tuple[str, str, range]]:
        yield "attn_qkv", "space_in", range(self.shape.projected)

    def is_captured(self, kernels: Kernels) -> bool:
        return kernels.captures_state_space(self.shape)

    def tensors(self, weights: Weights, prefix: str) -> StateSpaceTensors:
        bias = weights.tensor(f"{prefix}.space_conv.bias") if self.conv_biased else None
        names = "space_decay", "space_step", "space_skip", "space_norm.weight"
        return StateSpaceTensors(
            Filter(weights.tensor(f"{prefix}.space_conv.weight"), bias),
            *(weights.tensor(f"{prefix}.{name}") for name in names),
        )

    def attend(
        self,
        kernels: Kernels,
        projected: Sequence[Tensor],
        tensors: StateSpaceTensors,
        states: Sequence[Tensor],
        eps: float,
        rows: RowSpans,
    ) -> Tensor:
        own = projected[0], self.shape, tensors, eps, StateSpaceState(*states), rows
        return kernels.state_space(*own)
