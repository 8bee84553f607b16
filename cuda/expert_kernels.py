"""`ExpertKernels`: the experts of `CudaKernels`. No operation waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.cuda import moe
from gptmanager.cuda.device.launch import NAMES, Launcher
from gptmanager.errors import ConfigError
from gptmanager.kernels.experts.mixture import ExpertMatrices
from gptmanager.kernels.experts.routing import Routing
from gptmanager.kernels.gemm.packed_matrix import Matrix, Quantized
from gptmanager.kernels.reference import Kernels


class ExpertKernels(Kernels):
    """The experts of a layer on the launcher's device."""

    plans_experts = True
    expert_kinds: tuple[Quantized, ...] = ("int8",)

    def __init__(self, launcher: Launcher, deterministic: bool = False) -> None:
        super().__init__(deterministic)
        self._launcher = launcher
        if launcher.has_fp8:
            self.expert_kinds = (*self.expert_kinds, "fp8")

    def check_routing(self, num_experts: int, routing: Routing) -> None:
        if num_experts > moe.MAX_EXPERTS or routing.per_token > moe.MAX_PER_TOKEN:
            raise ConfigError(
                f"{routing.per_token} of {num_experts} experts for a token: CUDA kernels support "
                f"at most {moe.MAX_PER_TOKEN} of {moe.MAX_EXPERTS}"
            )

    def new_expert_matrix(
        self,
        count: int,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        quantized: Quantized | None = None,
        device: torch.device | str = "cpu",
    ) -> Matrix | None:
        if count > moe.MAX_EXPERTS or dtype not in NAMES:
            return None
        if quantized is None:
            return torch.empty(count * rows, columns, dtype=dtype, device=device)
        return self.new_matrix(count * rows, columns, dtype, quantized, device)

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        correction: Tensor | None,
        routing: Routing,
        experts: ExpertMatrices,
    ) -> Tensor:
        if routing.score not in moe.SCORES:
            return super().experts(x, logits, correction, routing, experts)
        return moe.experts(self._launcher, x, logits, correction, routing, experts)

    def mix_experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertMatrices
    ) -> Tensor:
        return moe.mix_experts(self._launcher, x, chosen, weights, experts)
