"""`ShortConvolution`: a gated convolution over a few tokens (LFM2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.recurrent.convolution import Filter
from gptmanager.kernels.reference import Kernels
from gptmanager.memory.slot_states import StateShape
from gptmanager.memory.weights import Weights
from gptmanager.models.recurrent.kind import Shape


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """The `RecurrentKind` of a convolution that reads `width` tokens of each of its `channels`.

    Its state is the last inputs of the convolution. `biased`: the convolution and both projections
    have biases.
    """

    channels: int
    width: int
    biased: bool = False
    name: ClassVar[str] = "short"
    inputs: ClassVar[tuple[str, ...]] = ("short_in",)
    wide: ClassVar[tuple[str, ...]] = ()

    @property
    def out_width(self) -> int:
        return self.channels

    def states(self, dtype: torch.dtype) -> tuple[StateShape, ...]:
        return (StateShape((self.width - 1, self.channels), dtype),)

    def parameters(self, hidden_size: int) -> dict[str, Shape]:
        found: dict[str, Shape] = {
            "short_in.weight": (3 * self.channels, hidden_size),
            "short_conv.weight": (self.width, self.channels),
            "short_out.weight": (hidden_size, self.channels),
        }
        if self.biased:
            found["short_in.bias"] = (3 * self.channels,)
            found["short_conv.bias"] = (self.channels,)
            found["short_out.bias"] = (hidden_size,)
        return found

    def modules(self, is_joined: bool) -> Iterator[tuple[str, str, range]]:
        yield "attn_qkv", "short_in", range(3 * self.channels)

    def is_captured(self, kernels: Kernels) -> bool:
        return True

    def tensors(self, weights: Weights, prefix: str) -> Filter:
        bias = weights.tensor(f"{prefix}.short_conv.bias") if self.biased else None
        return Filter(weights.tensor(f"{prefix}.short_conv.weight"), bias)

    def attend(
        self,
        kernels: Kernels,
        projected: Sequence[Tensor],
        tensors: Filter,
        states: Sequence[Tensor],
        eps: float,
        rows: RowSpans,
    ) -> Tensor:
        return kernels.short_convolution(projected[0], tensors, states[0], rows)
