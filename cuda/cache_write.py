"""Rotation of queries and keys, with QK norm, fused with the write of keys and values to pages.

On a GPU a page of keys is token-major in memory, as one of values is: `[P, K, B, D]`. A pool that
shows its keys as `[P, K, D, B]` (as the reference does) shows a transposed view of that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda.launch import NAMES, Argument, Launcher, Program, check_tensors, ints

HEAD_DIMS = (32, 64, 80, 96, 128, 256)
FP8 = torch.float8_e4m3fn
CACHES = ("", ", __nv_fp8_e4m3")  # a kernel's last argument: pages of the tensors' dtype, or FP8
_THREADS = 128
PROGRAM = Program(
    "cache_write.cu",
    (
        "locate_tokens",
        *(
            f"rope_and_write<{name}, {head_dim}, {width}{cache}>"
            for dtype, name in NAMES.items()
            for head_dim in HEAD_DIMS
            for width in (16 // dtype.itemsize, 1)
            for cache in CACHES
        ),
    ),
)


class Cache(NamedTuple):
    """The dtype of pages, and what it adds to a kernel's template arguments."""

    dtype: torch.dtype
    argument: str


def check_cache(dtype: torch.dtype, pages: Tensor, scales: Tensor | None) -> Cache:
    """Of the pages of a call on tensors of `dtype`. ValueError where the pages are of another."""
    if (pages.dtype is FP8) != (scales is not None):
        wanted = "need cache_scales" if scales is None else f"have cache_scales, expected {FP8}"
        raise ValueError(f"pages of {pages.dtype} {wanted}")
    return Cache(dtype, CACHES[0]) if scales is None else Cache(FP8, CACHES[1])


def row_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Of a token's head in shared memory, as ROW in the .cu: an odd number of 16 bytes."""
    size = head_dim * dtype.itemsize
    return size if size // 16 % 2 else size + 16


def locate_tokens(
    launcher: Launcher,
    places: Tensor,
    row_starts: Tensor,
    kv_lengths: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    tokens_per_block: int,
) -> None:
    """`places[t] = block * tokens_per_block + offset` of token t: once a step, for all layers.

    Row r owns the tokens `row_starts[r]:row_starts[r + 1]`, the last of its `kv_lengths[r]`
    positions; tokens behind the last row, as a graph's padding, get -1. All int32: `places` `[T]`,
    `row_starts` `[R + 1]`, `kv_lengths` and `slots` `[R]`, `block_tables` `[slots, blocks]`.
    """
    num_tokens, num_rows = len(places), len(kv_lengths)
    check_tensors(
        places=(places, (num_tokens,), torch.int32),
        row_starts=(row_starts, (num_rows + 1,), torch.int32),
        kv_lengths=(kv_lengths, (num_rows,), torch.int32),
        slots=(slots, (num_rows,), torch.int32),
        block_tables=(block_tables, (None, None), torch.int32),
    )
    if num_tokens == 0:
        return
    sizes = (num_tokens, num_rows, block_tables.shape[1], tokens_per_block)
    arguments: tuple[Argument, ...] = (
        places,
        row_starts,
        kv_lengths,
        slots,
        block_tables,
        *ints(*sizes),
    )
    blocks = -(-num_tokens // _THREADS)
    launcher.kernel(PROGRAM, "locate_tokens")((blocks,), (_THREADS,), arguments)


def rope_and_write(
    launcher: Launcher,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    qkv: Tensor,
    positions: Tensor,
    places: Tensor,
    *,
    cos_sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    cache_scales: Tensor | None = None,
) -> None:
    """Write the rotated queries to `queries`, rotated keys and values to their places in the pages.

    `queries` `[T, H, D]`; `keys`, `values` `[P, K, B, D]`, one layer's; `qkv` `[T, (H + 2K) * D]`:
    query heads, key heads, value heads; `q_norm`, `k_norm` `[D]`: weights of an RMSNorm with `eps`
    of each head, before the rotation; all of one dtype of float32, float16, bfloat16.
    `positions` `[T]` int64 index `cos_sin` `[max_pos, N]` float32: cosines of N / 2 frequencies,
    then their sines; dimension i < N / 2 of a head turns with i + N / 2, those from N on stay.
    `places` `[T]` int32: of `locate_tokens`; keys and values of a negative one are not written.
    D is one of HEAD_DIMS. With `cache_scales` `[2, K]` float32, of keys, then of values, `keys` and
    `values` are float8_e4m3fn: value / scale is written, to the nearest (ties to even), beyond 448
    as 448, NaN as NaN. ValueError for other tensors.
    """
    num_tokens, num_heads, head_dim = queries.shape
    num_kv_heads, tokens_per_block = keys.shape[1:3]
    pages = (len(keys), num_kv_heads, tokens_per_block, head_dim)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    dtype = queries.dtype
    cache = check_cache(dtype, keys, cache_scales)
    check_tensors(
        queries=(queries, (num_tokens, num_heads, head_dim), dtype),
        keys=(keys, pages, cache.dtype),
        values=(values, pages, cache.dtype),
        qkv=(qkv, (num_tokens, width), dtype),
        positions=(positions, (num_tokens,), torch.int64),
        places=(places, (num_tokens,), torch.int32),
        cos_sin=(cos_sin, (None, None), torch.float32),
        q_norm=(q_norm, (head_dim,), dtype),
        k_norm=(k_norm, (head_dim,), dtype),
        cache_scales=(cache_scales, (2, num_kv_heads), torch.float32),
    )
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"a head dimension of {head_dim} is not among {HEAD_DIMS}")
    if num_tokens == 0:
        return
    rotary = 0 if cos_sin is None else cos_sin.shape[1]
    wide = 16 // queries.itemsize
    vector = wide if rotary % (2 * wide) == 0 else 1
    vectors = head_dim // vector
    lanes = next((n for n in (4, 8, 16) if vectors <= n), 32)  # lanes_of in the .cu
    groups = num_tokens * (num_heads + 2 * num_kv_heads)
    sizes = (num_tokens, num_heads, num_kv_heads, rotary, tokens_per_block)
    arguments: tuple[Argument, ...] = (
        *(queries, keys, values, qkv, positions, cos_sin, q_norm, k_norm, places, cache_scales),
        *ints(*sizes),
        np.float32(eps),
    )
    name = f"rope_and_write<{NAMES[dtype]}, {head_dim}, {vector}{cache.argument}>"
    blocks = -(-groups * lanes // _THREADS)
    launcher.kernel(PROGRAM, name)((blocks,), (_THREADS,), arguments)
