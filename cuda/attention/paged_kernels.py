"""Head dimensions, dtypes and checks shared by the launchers of kernels that access pages.

On a GPU, pages of keys are token-major in memory, like pages of values: `[pages, KV heads, tokens,
head dim]`. The keys of `Pages` are a view with the last two dimensions swapped, because the
reference expects this shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gptmanager.cuda.device.launch import NAMES, Expected, check_tensors
from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages, RowSpans

HEAD_DIMS = (32, 64, 80, 96, 128, 256)
MAX_GROUP = 16
FP8 = torch.float8_e4m3fn
CACHES = ("", ", __nv_fp8_e4m3")  # a template argument: pages of the tensors' dtype, or FP8
NARROW = (torch.float16, torch.bfloat16)  # for tensor cores; float32 has separate kernels


class Cache(NamedTuple):
    """Token-major keys, the dtype that pages must have, and the template argument for it."""

    keys: Tensor
    dtype: torch.dtype
    argument: str


def check_cache(dtype: torch.dtype, pages: Pages) -> Cache:
    """Return the keys of `pages` and the dtype that they must have for tensors of `dtype`.

    Raises ValueError for pages of float8_e4m3fn without `cache_scales`, and for pages of another
    dtype with `cache_scales`.
    """
    keys, _, scales = pages[:3]
    if (keys.dtype is FP8) != (scales is not None):
        wanted = "need cache_scales" if scales is None else f"have cache_scales, expected {FP8}"
        raise ValueError(f"pages of {keys.dtype} {wanted}")
    return Cache(keys.mT, dtype, CACHES[0]) if scales is None else Cache(keys.mT, FP8, CACHES[1])


def check_attention(
    out: Tensor,
    queries: Tensor,
    pages: Pages,
    rows: RowSpans,
    shape: AttentionShape,
    sinks: Tensor | None,
    **others: Expected,
) -> Cache:
    """Return the cache; raise ValueError if no kernel computes attention of these tensors.

    `others` are further tensors to check, as in `check_tensors`.
    """
    num_heads, num_kv_heads, head_dim = shape[:3]
    num_rows, dtype = rows.slots.shape[0], queries.dtype
    num_blocks, _, tokens_per_block, _ = pages.values.shape
    blocks = (num_blocks, num_kv_heads, tokens_per_block, head_dim)
    cache = check_cache(dtype, pages)
    check_tensors(
        out=(out, (queries.shape[0], num_heads, head_dim), dtype),
        queries=(queries, (None, num_heads, head_dim), dtype),
        keys=(cache.keys, blocks, cache.dtype),
        values=(pages.values, blocks, cache.dtype),
        row_starts=(rows.row_starts, (num_rows + 1,), torch.int32),
        slots=(rows.slots, (num_rows,), torch.int32),
        block_tables=(rows.block_tables, (None, None), torch.int32),
        cache_scales=(pages.cache_scales, (2, num_kv_heads), torch.float32),
        sinks=(sinks, (num_heads,), dtype),
        **others,
    )
    if shape.sinks != (sinks is not None):
        given = "no sinks are" if sinks is None else "sinks are"
        raise ValueError(f"{given} given, which does not match sinks = {shape.sinks} in {shape}")
    if shape.fp8 != (cache.dtype is FP8):
        raise ValueError(f"pages of {pages.keys.dtype} do not match fp8 = {shape.fp8} in {shape}")
    if (why := refusal(shape)) is not None:
        raise ValueError(why)
    return cache


def check_head_dim(head_dim: int) -> None:
    """Raise ValueError if there is no kernel for `head_dim`."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head dimension {head_dim} must be one of {HEAD_DIMS}")


def refusal(shape: AttentionShape) -> str | None:
    """Return the reason why no kernel computes this attention, or None if one does."""
    if shape.is_once:
        return "keys that are also values (latents) are not supported"
    if shape.head_dim not in HEAD_DIMS:
        return f"head dimension {shape.head_dim} must be one of {HEAD_DIMS}"
    group, rest = divmod(shape.num_heads, shape.num_kv_heads)
    if rest or group > MAX_GROUP:
        return (
            f"{shape.num_heads} query heads do not divide into groups of up to {MAX_GROUP} for "
            f"{shape.num_kv_heads} KV heads"
        )
    if shape.sinks and shape.softcap:
        return "heads with sinks and a softcap are not supported"
    if shape.chunked and shape.window is not None and shape.window.bit_count() != 1:
        return f"chunks of {shape.window} tokens must be a power of two"
    if shape.late_norm and shape.plus_one:
        return "norms after the rotation, of weights that are stored minus 1, are not supported"
    return None


def sinks_arguments(dtype: torch.dtype, cache: str, *others: str) -> str:
    """Return the last template arguments of a kernel for heads with sinks.

    `cache` is one of CACHES, and `others` are the template arguments after it. All arguments are
    listed, even if they equal their defaults, because the argument for the sinks is the last one.
    """
    element = NAMES[dtype]
    others = tuple(f", {other}" for other in others)
    return "".join((cache or f", {element}", *others, f", const {element}*"))


def row_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Return the stride in bytes of token rows in shared memory: an odd multiple of 16.

    ROW in pages.cuh is the same stride in elements.
    """
    size = head_dim * dtype.itemsize
    return size if size // 16 % 2 else size + 16
