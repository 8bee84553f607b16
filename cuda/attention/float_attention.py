"""Float32 kernels of both phases, launched by `generation_attention` and `context_attention`."""

from __future__ import annotations

from gptmanager.cuda.attention.paged_kernels import CACHES, HEAD_DIMS
from gptmanager.cuda.device.launch import Program

PROGRAM = Program(
    "attention/float_attention.cu",
    tuple(
        f"{phase}_attention_float<{head_dim}{cache}>"
        for phase in ("generation", "context")
        for head_dim in HEAD_DIMS
        for cache in CACHES
    ),
    dependent=True,
)
