"""`DeltaRule`: linear attention with the gated delta rule (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.recurrent.delta_formulas import DeltaShape, DeltaState, DeltaTensors
from gptmanager.kernels.reference import Kernels
from gptmanager.memory.slot_states import StateShape
from gptmanager.memory.weights import Weights
from gptmanager.models.recurrent.kind import Shape


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The `RecurrentKind` of the gated delta rule.

    Its states are the last inputs of the convolution, and the memories of the heads.
    """

    shape: DeltaShape
    name: ClassVar[str] = "delta"
    inputs: ClassVar[tuple[str, ...]] = ("delta_in", "delta_gates")
    wide: ClassVar[tuple[str, ...]] = ("delta_gates.weight", "delta_decay", "delta_step")

    @property
    def out_width(self) -> int:
        return self.shape.values

    def states(self, dtype: torch.dtype) -> tuple[StateShape, ...]:
        own, wide = self.shape, torch.promote_types(dtype, torch.float32)
        return (
            StateShape((own.width - 1, own.channels), dtype),
            StateShape((own.value_heads, own.key_dim, own.value_dim), wide),
        )

    def parameters(self, hidden_size: int) -> dict[str, Shape]:
        own, heads = self.shape, self.shape.value_heads
        return {
            "delta_in.weight": (own.channels + own.values, hidden_size),
            "delta_gates.weight": (2 * heads, hidden_size),
            "delta_conv.weight": (own.width, own.channels),
            "delta_decay": (heads,),
            "delta_step": (heads,),
            "delta_norm.weight": (own.value_dim,),
            "delta_out.weight": (hidden_size, own.values),
        }

    def modules(self, is_joined: bool) -> Iterator[tuple[str, str, range]]:
        heads, channels = self.shape.value_heads, self.shape.channels
        everything = range(channels + self.shape.values)
        yield "attn_qkv", "delta_in", everything if is_joined else everything[:channels]
        if is_joined:
            yield "linear_attn_ba", "delta_gates", range(2 * heads)
            return
        yield "linear_attn_z", "delta_in", everything[channels:]
        yield "linear_attn_b", "delta_gates", range(heads)
        yield "linear_attn_a", "delta_gates", range(heads, 2 * heads)

    def is_captured(self, kernels: Kernels) -> bool:
        return kernels.captures_delta(self.shape)

    def tensors(self, weights: Weights, prefix: str) -> DeltaTensors:
        names = "delta_conv.weight", "delta_decay", "delta_step", "delta_norm.weight"
        return DeltaTensors(*(weights.tensor(f"{prefix}.{name}") for name in names))

    def attend(
        self,
        kernels: Kernels,
        projected: Sequence[Tensor],
        tensors: DeltaTensors,
        states: Sequence[Tensor],
        eps: float,
        rows: RowSpans,
    ) -> Tensor:
        inputs, gates = projected
        return kernels.gated_delta(
            inputs, gates, self.shape, tensors, eps, DeltaState(*states), rows
        )
