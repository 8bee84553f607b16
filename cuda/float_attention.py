"""Attention of both phases in float32: what `generation_attention` and `context_attention` launch.

Their contracts are those of these two.
"""

from __future__ import annotations

from gptmanager.cuda.launch import Program
from gptmanager.cuda.paged_kernels import CACHES, HEAD_DIMS

PROGRAM = Program(
    "float_attention.cu",
    tuple(
        f"{phase}_attention_float<{head_dim}{cache}>"
        for phase in ("generation", "context")
        for head_dim in HEAD_DIMS
        for cache in CACHES
    ),
    dependent=True,
)
