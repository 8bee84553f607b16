"""Float32 kernels of both phases, launched by `generation_attention` and `context_attention`."""

from __future__ import annotations

import torch

from gptmanager.cuda.attention.paged_kernels import CACHES, HEAD_DIMS, sinks_arguments
from gptmanager.cuda.device.launch import Program


def float_kernel(phase: str, head_dim: int, cache: str, sinks: bool) -> str:
    """Return the name of the kernel of a phase, "generation" or "context"."""
    last = sinks_arguments(torch.float32, cache) if sinks else cache
    return f"{phase}_attention_float<{head_dim}{last}>"


PROGRAM = Program(
    "attention/float_attention.cu",
    tuple(
        float_kernel(phase, head_dim, cache, sinks)
        for sinks in (False, True)
        for phase in ("generation", "context")
        for head_dim in HEAD_DIMS
        for cache in CACHES
    ),
    dependent=True,
    at_once=1,  # a model needs few of them
)
