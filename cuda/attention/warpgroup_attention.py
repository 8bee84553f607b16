"""Context attention by warpgroup matmuls (wgmma, Hopper), launched by `context_attention`."""

from __future__ import annotations

import torch

from gptmanager.cuda.attention.paged_kernels import NARROW
from gptmanager.cuda.device.launch import NAMES, Launcher, Program
from gptmanager.kernels.attention.attention_arguments import AttentionShape

_HEAD_DIMS = (64, 128)
_TOKENS = 128  # tokens in a tile of keys or values; TOKENS in warpgroup_attention.cu
_ALIGNMENT = 1024  # bytes; tiles in shared memory are aligned to this


def warpgroup_kernel(kind: str, dtype: torch.dtype, sinks: bool) -> str:
    """Return the name of a kernel. `kind`: the first template arguments, joined by commas.

    If `sinks`, the last template argument is the type of the pointer to the sinks.
    """
    return f"warpgroup_attention<{kind}{f', const {NAMES[dtype]}*' if sinks else ''}>"


PROGRAM = Program(
    "attention/warpgroup_attention.cu",
    tuple(
        warpgroup_kernel(f"{NAMES[dtype]}, {head_dim}, {softcap}, {sink}", dtype, sinks)
        for sinks in (False, True)
        for dtype in NARROW
        for head_dim in _HEAD_DIMS
        for softcap in ("false", "true")
        for sink in ("false", "true")
        if not (sinks and softcap == "true")
    ),
    architectures=("sm_90a",),
    dependent=True,
    at_once=1,  # a kernel takes long to compile, and a model needs few of them
)


def takes(launcher: Launcher, shape: AttentionShape, dtype: torch.dtype) -> bool:
    """Return whether to use the warpgroup kernel for attention of `shape` on queries of `dtype`."""
    fits = dtype in NARROW and shape.head_dim in _HEAD_DIMS and not shape.fp8
    return launcher.has_warpgroups and fits


def shared_memory(num_queries: int, head_dim: int) -> int:
    """Return the shared memory of a block, in bytes: queries, two tiles of keys, two of values.

    `num_queries` is the number of packed queries of a work item (see `plan_context`).
    """
    rows = num_queries + 4 * _TOKENS
    return rows * head_dim * 2 + _ALIGNMENT - 16  # the memory is aligned to 16 bytes at least
