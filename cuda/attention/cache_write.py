"""RoPE and QK norm of queries and keys, fused with the write of keys and values to pages."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda.attention.paged_kernels import CACHES, HEAD_DIMS, check_cache, check_head_dim
from gptmanager.cuda.device.launch import NAMES, Argument, Launcher, Program, check_tensors, ints
from gptmanager.kernels.attention.attention_arguments import Pages, RowSpans

_THREADS = 128


def _name(dtype: torch.dtype, kind: str, cache: str, late: bool, plus_one: bool) -> str:
    if late and plus_one:
        raise ValueError(
            "a norm after the rotation has no kernel for weights that are stored minus 1"
        )
    if late or plus_one:
        cache = cache or f", {NAMES[dtype]}"
        cache += f", {str(late).lower()}, {str(plus_one).lower()}"
    return f"rope_and_write<{NAMES[dtype]}, {kind}{cache}>"


PROGRAM = Program(
    "attention/cache_write.cu",
    (
        "locate_tokens",
        *(
            _name(dtype, f"{head_dim}, {width}", cache, late, plus_one)
            for late, plus_one in ((False, False), (True, False), (False, True))
            for dtype in NAMES
            for head_dim in HEAD_DIMS
            for width in (16 // dtype.itemsize, 1)
            for cache in CACHES
        ),
    ),
    dependent=True,
    at_once=1,  # kernels take long to compile, and a model needs few of them
)


def locate_tokens(launcher: Launcher, cells: Tensor, rows: RowSpans, tokens_per_block: int) -> None:
    """Write `cells[t] = block * tokens_per_block + offset` of token t, once a step for all layers.

    Tokens after the last row (padding of a CUDA graph) get -1. `cells` is int32 `[T]`. Raises
    ValueError for other tensors.
    """
    num_tokens, num_rows = len(cells), len(rows.kv_lengths)
    check_tensors(
        cells=(cells, (num_tokens,), torch.int32),
        row_starts=(rows.row_starts, (num_rows + 1,), torch.int32),
        kv_lengths=(rows.kv_lengths, (num_rows,), torch.int32),
        slots=(rows.slots, (num_rows,), torch.int32),
        block_tables=(rows.block_tables, (None, None), torch.int32),
    )
    if num_tokens == 0:
        return
    sizes = (num_tokens, num_rows, rows.block_tables.shape[1], tokens_per_block)
    arguments: tuple[Argument, ...] = (cells, *rows[:4], *ints(*sizes))
    blocks = -(-num_tokens // _THREADS)
    launcher.kernel(PROGRAM, "locate_tokens")((blocks,), (_THREADS,), arguments)


def rope_and_write(
    launcher: Launcher,
    queries: Tensor,
    qkv: Tensor,
    positions: Tensor,
    cells: Tensor,
    pages: Pages,
    *,
    cos_sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    late: bool = False,
    plus_one: bool = False,
) -> None:
    """Write rotated queries to `queries`, and rotated keys and unchanged values to `pages`.

    `queries` is `[T, H, D]`. `qkv` `[T, (H + 2K) * D]` has query heads, key heads and value heads.
    `q_norm` and `k_norm` `[D]` are the weights of a per-head RMSNorm with `eps`, before the
    rotation, or after it if `late`. With `plus_one` the weights are stored minus 1. `late` and
    `plus_one` cannot be combined. `queries`, `qkv` and the norm weights share one dtype: float32,
    float16 or bfloat16. Pages have the same dtype, or float8_e4m3fn, for which keys and values are
    divided by `pages.cache_scales`. `positions` `[T]` int64 are rows of `cos_sin` `[max_pos, N]`
    float32, which has the cosines of N / 2 frequencies, then their sines. Dimensions i < N / 2 and
    i + N / 2 of a head are rotated together; dimensions from N on are unchanged. If
    `cos_sin` is None, nothing is rotated. `cells` `[T]` int32 is from `locate_tokens`; tokens with
    a negative cell are not written to pages. D is one of HEAD_DIMS. Results are rounded to nearest,
    ties to even; NaN stays NaN; float8_e4m3fn saturates. Raises ValueError for other tensors.
    """
    num_tokens, num_heads, head_dim = queries.shape
    num_blocks, num_kv_heads, tokens_per_block, _ = pages.values.shape
    shape, dtype = (num_blocks, num_kv_heads, tokens_per_block, head_dim), queries.dtype
    num_all = num_heads + 2 * num_kv_heads
    cache = check_cache(dtype, pages)
    check_tensors(
        queries=(queries, (num_tokens, num_heads, head_dim), dtype),
        keys=(cache.keys, shape, cache.dtype),
        values=(pages.values, shape, cache.dtype),
        qkv=(qkv, (num_tokens, num_all * head_dim), dtype),
        positions=(positions, (num_tokens,), torch.int64),
        cells=(cells, (num_tokens,), torch.int32),
        cos_sin=(cos_sin, (None, None), torch.float32),
        q_norm=(q_norm, (head_dim,), dtype),
        k_norm=(k_norm, (head_dim,), dtype),
        cache_scales=(pages.cache_scales, (2, num_kv_heads), torch.float32),
    )
    check_head_dim(head_dim)
    if num_tokens == 0:
        return
    rotary = 0 if cos_sin is None else cos_sin.shape[1]
    vector, lanes = _vector_and_lanes(head_dim, rotary, queries.itemsize)
    arguments: tuple[Argument, ...] = (
        *(queries, cache.keys, pages.values, qkv, positions, cos_sin, q_norm, k_norm, cells),
        pages.cache_scales,
        *ints(num_tokens, num_heads, num_kv_heads, rotary, tokens_per_block),
        np.float32(eps),
    )
    name = _name(dtype, f"{head_dim}, {vector}", cache.argument, late, plus_one)
    blocks = -(-num_tokens * num_all * lanes // _THREADS)
    launcher.kernel(PROGRAM, name)((blocks,), (_THREADS,), arguments)


def _vector_and_lanes(head_dim: int, rotary: int, itemsize: int) -> tuple[int, int]:
    """Return two counts: elements that a thread reads at once, and threads per head.

    Both must match the .cu file.
    """
    wide = 16 // itemsize
    vector = wide if rotary % (2 * wide) == 0 else 1
    return vector, next((n for n in (4, 8, 16) if head_dim // vector <= n), 32)
