"""`RecurrentKernels`: the recurrent layers of `CudaKernels`."""

from __future__ import annotations

from torch import Tensor

from gptmanager.cuda import delta_rule, state_space
from gptmanager.cuda.expert_kernels import ExpertKernels
from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.recurrent.delta_formulas import DeltaShape, DeltaState, DeltaTensors
from gptmanager.kernels.recurrent.state_space_formulas import (
    StateSpaceShape,
    StateSpaceState,
    StateSpaceTensors,
)


class RecurrentKernels(ExpertKernels):
    """The recurrent layers on the launcher's device. The reference computes other sizes."""

    def captures_delta(self, shape: DeltaShape) -> bool:
        return delta_rule.covers(shape)

    def gated_delta(
        self,
        projected: Tensor,
        gates: Tensor,
        shape: DeltaShape,
        tensors: DeltaTensors,
        eps: float,
        state: DeltaState,
        rows: RowSpans,
    ) -> Tensor:
        given = projected, gates, shape, tensors, eps, state, rows
        if not delta_rule.covers(shape):
            return super().gated_delta(*given)
        out = projected.new_empty(len(projected), shape.values)
        delta_rule.gated_delta(self._launcher, out, *given)
        return out

    def captures_state_space(self, shape: StateSpaceShape) -> bool:
        return state_space.covers(shape)

    def state_space(
        self,
        projected: Tensor,
        shape: StateSpaceShape,
        tensors: StateSpaceTensors,
        eps: float,
        state: StateSpaceState,
        rows: RowSpans,
    ) -> Tensor:
        given = projected, shape, tensors, eps, state, rows
        if not state_space.covers(shape):
            return super().state_space(*given)
        out = projected.new_empty(len(projected), shape.inner)
        state_space.state_space(self._launcher, out, *given)
        return out
