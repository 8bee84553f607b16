"""The compiled bodies that a model needs on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gptmanager.kernels import token_loops
from gptmanager.kernels.attention import paged_attention
from gptmanager.kernels.gemm.matmul_plan import can_be_packed, matmul_bodies
from gptmanager.kernels.lora.adapter_plan import plan_runs
from gptmanager.kernels.lora.adapters import add as add_adapters
from gptmanager.kernels.simd.machine_code import Body


def bodies_of_model(
    dtype: torch.dtype | None, quantized: bool, deterministic: bool
) -> Sequence[Body]:
    """Return the bodies in descending order of compile time. `dtype` None: no matrices.

    float64 is computed by torch.
    """
    if dtype is torch.float64:
        return []
    matmuls: Sequence[Body] = ()
    if dtype is not None and can_be_packed(dtype, quantized):
        matmuls = matmul_bodies(torch.int8 if quantized else dtype, deterministic)
    return [
        paged_attention.attention,
        add_adapters,
        *matmuls,
        token_loops.rope_and_write,
        plan_runs,
        token_loops.normalize,
        token_loops.activate,
        token_loops.embed,
        token_loops.convert,
    ]
