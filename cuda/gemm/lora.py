"""LoRA matmuls on packed tokens: any mix of adapters and ranks in one call.

`shrink` computes A x for each token and module; `expand` adds B (A x) to the result. The choice of
adapters is data on the device, so a CUDA graph can be replayed with other adapters. Consecutive
tokens of one adapter share the reads of its weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda.device.launch import NAMES, Argument, Launcher, Program, check_tensors, ints
from gptmanager.kernels.lora.adapter_arguments import AdapterModule, StepAdapters

MAX_MODULES = 4  # for one matrix: attn_q, attn_k, attn_v, and attn_qkv for all of it
_MAX_COLUMNS = 1 << 24  # columns of a matrix fit into 24 bits, see `_pack`
# Per block: threads of `shrink`, columns of `expand`, and ranks of `shrink`.
_SHRINK_THREADS, _COLUMNS, _RANKS = 256, 128, 16
# Each block has a group of adjacent tokens. Groups are small if a call has at most _FEW_TOKENS
# tokens, because an adapter may then have few tokens.
_FEW_TOKENS = 1024
_FEW, _TILE = 4, {4: 8, 2: 16}  # tokens in a small group; itemsize -> tokens in a large group
_VECTOR_BYTES = 16

PROGRAM = Program(
    "gemm/lora.cu",
    tuple(f"{kernel}<{name}>" for kernel in ("shrink", "expand") for name in NAMES.values()),
    dependent=True,
)


def covers(
    result: Tensor, x: Tensor, adapters: StepAdapters, modules: Sequence[AdapterModule]
) -> bool:
    """Return whether `add_adapters` supports the arguments.

    All tensors must have one dtype. `x` must be aligned to 16 bytes, with rows of a multiple of 16
    bytes. The numbers of modules and of columns are limited.
    """
    return (
        x.dtype in NAMES
        and result.dtype is x.dtype
        and adapters.pool.dtype is x.dtype
        and x.shape[1] * x.itemsize % _VECTOR_BYTES == 0
        and x.is_contiguous()
        and x.data_ptr() % _VECTOR_BYTES == 0
        and len(modules) <= MAX_MODULES
        and result.shape[1] < _MAX_COLUMNS
    )


def add_adapters(
    launcher: Launcher,
    result: Tensor,
    x: Tensor,
    adapters: StepAdapters,
    layer: int,
    modules: Sequence[AdapterModule],
) -> None:
    """Add `B (A x[t])` to `result[t, columns]` for each of `modules` that token t's adapter has.

    `result` is `[T, O]`, `x` `[T, I]`; `StepAdapters` describes the other arguments. Sums are
    float32, and an element is rounded once. A row is bitwise independent of the other rows and of
    their number. Raises ValueError for tensors that do not fit together or that `covers` rejects.
    """
    (num_tokens, width), columns, dtype = x.shape, result.shape[1], x.dtype
    table, rows, max_rank = adapters.table, adapters.rows, adapters.max_rank
    check_tensors(
        result=(result, (num_tokens, columns), dtype),
        x=(x, (num_tokens, width), dtype),
        pool=(adapters.pool, (None,), dtype),
        rows=(rows, (num_tokens,), torch.int32),
        table=(table, (None, None, None, 2), torch.int64),
    )
    if not covers(result, x, adapters, modules):
        raise ValueError(f"{len(modules)} modules over rows of {width} {dtype} are not covered")
    if num_tokens == 0 or not modules:
        return
    group = _FEW if num_tokens <= _FEW_TOKENS else _TILE[dtype.itemsize]
    groups = -(-num_tokens // group)
    h = torch.empty(num_tokens, len(modules), max_rank, dtype=torch.float32, device=x.device)
    packed = [_pack(it) for it in modules] + [np.uint64(0)] * (MAX_MODULES - len(modules))
    shared: tuple[Argument, ...] = (adapters.pool, rows, table, *packed)
    places = table.stride(0), layer * table.stride(1), len(modules), max_rank, group
    launcher.kernel(PROGRAM, f"shrink<{NAMES[dtype]}>")(
        (groups, len(modules) * -(-max_rank // _RANKS)),
        (_SHRINK_THREADS,),
        (h, x, *shared, *ints(num_tokens, width, *places)),
    )
    launcher.kernel(PROGRAM, f"expand<{NAMES[dtype]}>")(
        (groups, -(-columns // _COLUMNS)),
        (_COLUMNS,),
        (result, h, *shared, *ints(num_tokens, columns, width, *places)),
    )


def _pack(module: AdapterModule) -> np.uint64:
    """Pack a module into the 64 bits that the kernels unpack."""
    return np.uint64(module.number << 48 | module.first_column << 24 | module.num_columns)
