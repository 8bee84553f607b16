"""The compiled bodies that a model and its adapters need on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

import torch

from gptmanager.kernels import per_token_kernels
from gptmanager.kernels.activations.activation_loops import activate
from gptmanager.kernels.attention import paged_attention
from gptmanager.kernels.attention.head_matmul import multiply_heads
from gptmanager.kernels.capture.task_list import run_tasks
from gptmanager.kernels.compilation import compile_all
from gptmanager.kernels.embedding_lookup import embed
from gptmanager.kernels.experts import routing_loops
from gptmanager.kernels.gemm.grouped_matmul import multiply_group
from gptmanager.kernels.gemm.int4_groups import CODEBOOKS
from gptmanager.kernels.gemm.int4_matrix import INT4
from gptmanager.kernels.gemm.matmul_plan import can_be_packed, matmul_bodies
from gptmanager.kernels.gemm.packed_matrix import Quantized
from gptmanager.kernels.lora.adapter_plan import plan_runs
from gptmanager.kernels.lora.adapters import add as add_adapters
from gptmanager.kernels.recurrent import convolution_loops, delta_loops, state_space_loops
from gptmanager.kernels.simd.machine_code import Body

_STORED = {"int8": torch.int8, "int4": INT4, "e2m1": INT4, "iq4": INT4}
_OF_LAYERS: Mapping[str, tuple[Body, ...]] = {
    "experts": (multiply_group, *routing_loops.BODIES),
    "latents": (multiply_heads,),
    "delta": delta_loops.BODIES,
    "short": convolution_loops.BODIES,
    "space": state_space_loops.BODIES,
}


def bodies_of_model(
    dtype: torch.dtype | None, quantized: Collection[Quantized], deterministic: bool
) -> Sequence[Body]:
    """Return the bodies that a model needs without adapters, in descending order of compile time.

    `dtype` is the dtype of the model's matrices, or None if the model has no matrices. `quantized`
    holds the kinds of quantization of the matrices; if it is empty, they are stored in `dtype`. For
    float64 the result is empty, because torch computes everything.
    """
    if dtype is torch.float64:
        return []
    matmuls: Sequence[Body] = ()
    if dtype is not None:
        kinds = [kind for kind in quantized if can_be_packed(dtype, kind)]
        stored = {(_STORED[kind], kind in CODEBOOKS) for kind in kinds}
        if not quantized and can_be_packed(dtype):
            stored = {(dtype, False)}
        matmuls = [
            body
            for kind, has_codebook in stored
            for body in matmul_bodies(kind, deterministic, has_codebook)
        ]
    return [
        paged_attention.attention,
        *matmuls,
        per_token_kernels.rope_and_write,
        per_token_kernels.normalize,
        activate,
        embed,
        per_token_kernels.convert,
        run_tasks,
    ]


def compile_for_layers(kinds: Collection[str]) -> None:
    """Compile or load the bodies that these kinds of layers need; see `Kernels.warm_up_layers`."""
    compile_all([*chain.from_iterable(_OF_LAYERS[kind] for kind in kinds)])


@functools.cache
def compile_for_adapters() -> None:
    """Compile or load, once in a process, the bodies that a step with adapters needs."""
    compile_all([add_adapters, plan_runs])
