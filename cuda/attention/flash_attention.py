"""`FlashAttention`: the attention of the library flash-attn (version 2) on our pages."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmanager.cuda.attention.paged_kernels import NARROW
from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages
from gptmanager.kernels.providers import AttentionRows

_BLOCK_TOKENS = 256  # flash-attn's pages have a multiple of this number of tokens
_MAX_HEAD_DIM = 256


class FlashAttention:
    """An `AttentionProvider` that calls `library`, the imported module `flash_attn`.

    The library accepts views of our pages as `[P, B, K, D]` (pages, tokens, KV heads, head size).
    """

    name, capturable = "flash_attn", True

    def __init__(self, library: Any) -> None:
        self._library = library

    def refusal(
        self, shape: AttentionShape, dtype: torch.dtype, tokens_per_block: int
    ) -> str | None:
        if tokens_per_block % _BLOCK_TOKENS:
            return (
                f"KvCacheConfig.tokens_per_block = {tokens_per_block} must be a multiple of "
                f"{_BLOCK_TOKENS} for it"
            )
        if shape.head_dim > _MAX_HEAD_DIM or shape.head_dim % 8:
            return f"head_dim = {shape.head_dim} must be a multiple of 8, up to {_MAX_HEAD_DIM}"
        return why_special(shape, dtype)

    def attend_generation(
        self,
        queries: Tensor,
        pages: Pages,
        rows: AttentionRows,
        shape: AttentionShape,
        sinks: Tensor | None,
    ) -> Tensor:
        found: Tensor = self._library.flash_attn_with_kvcache(
            queries.unsqueeze(1),
            *_pages(pages),
            cache_seqlens=rows.kv_lengths,
            block_table=rows.block_tables,
            **_options(shape),
        )
        return found.squeeze(1)

    def attend_context(
        self,
        queries: Tensor,
        pages: Pages,
        rows: AttentionRows,
        shape: AttentionShape,
        sinks: Tensor | None,
    ) -> Tensor:
        assert rows.lengths is not None
        if "kv_starts" not in rows.memo:
            kv_starts = F.pad(rows.kv_lengths.cumsum(0, dtype=torch.int32), (1, 0))
            rows.memo["kv_starts"] = kv_starts
        starts, lengths = rows.lengths
        found: Tensor = self._library.flash_attn_varlen_func(
            queries,
            *_pages(pages),
            cu_seqlens_q=rows.query_starts,
            cu_seqlens_k=rows.memo["kv_starts"],
            max_seqlen_q=int((starts[1:] - starts[:-1]).max()),
            max_seqlen_k=int(lengths.max()),
            block_table=rows.block_tables,
            **_options(shape),
        )
        return found


def why_special(shape: AttentionShape, dtype: torch.dtype) -> str | None:
    """Return why a library cannot compute this attention, or None if it can.

    The dtype must have 16 bits. The only special features supported are windows and soft caps.
    """
    if dtype not in NARROW:
        return f"{dtype} must be torch.float16 or torch.bfloat16"
    others = shape.features - {"window", "softcap"}
    return f"it has no attention with {', '.join(sorted(others))}" if others else None


def _pages(pages: Pages) -> tuple[Tensor, Tensor]:
    return pages.keys.mT.transpose(1, 2), pages.values.transpose(1, 2)


def _options(shape: AttentionShape) -> dict[str, Any]:
    left, right = (-1, -1) if shape.window is None else (shape.window - 1, 0)
    return {
        "softmax_scale": shape.scale,
        "causal": True,
        "window_size": (left, right),
        "softcap": shape.softcap,
    }
