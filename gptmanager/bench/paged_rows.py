"""Sequences over pages of random keys and values, for attention cases, and what is right for them.

Knows nothing of kernels. Pages lie as they do on a device: `[P, K, B, D]`, those of a sequence in a
random order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gptmanager.bench.cases import Bed

_QUERIES = 512  # that the reference takes at a time


@dataclass(frozen=True, eq=False)
class PagedRows:
    """`num_new[r]` tokens of row r are the last of its `lengths[r]`; one layer's pages.

    `queries` `[T, H, D]`; `block_tables` int32 `[R, blocks]`, of row r its line r. `cache_scales`
    `[2, K]`: pages are float8_e4m3fn; they are 1.
    """

    num_new: np.ndarray
    lengths: np.ndarray
    queries: Tensor
    keys: Tensor
    values: Tensor
    block_tables: Tensor
    row_starts: Tensor
    kv_lengths: Tensor
    slots: Tensor
    cache_scales: Tensor | None = None

    @property
    def scale(self) -> float:
        return float(self.queries.shape[-1] ** -0.5)

    @property
    def tokens_per_block(self) -> int:
        return self.keys.shape[2]

    def history(self, row: int) -> tuple[Tensor, Tensor]:
        """Its keys and values, `[length, K, D]`, in the queries' dtype."""
        length = int(self.lengths[row])
        blocks = self.block_tables[row, : -(-length // self.tokens_per_block)].long()
        keys, values = (
            _taken(pages, blocks).to(self.queries.dtype).transpose(1, 2).flatten(0, 1)[:length]
            for pages in (self.keys, self.values)
        )
        return keys, values

    def expected(self) -> Tensor:
        """Attention in float32, `[T, H, D]`."""
        group = self.queries.shape[1] // self.keys.shape[1]
        result = torch.empty(self.queries.shape, dtype=torch.float32, device=self.queries.device)
        start = 0
        for row, (new, length) in enumerate(zip(self.num_new, self.lengths, strict=True)):
            keys, values = (it.float() for it in self.history(row))
            for first in range(0, int(new), _QUERIES):
                after = min(first + _QUERIES, int(new))
                at = slice(start + first, start + after)
                tokens = self.queries[at].float()
                queries = tokens.view(len(tokens), -1, group, tokens.shape[-1])
                scores = torch.einsum("qkgd,lkd->kgql", queries, keys) * self.scale
                position = torch.arange(length - new + first, length - new + after)[:, None]
                seen = torch.arange(length)[None] <= position
                scores = scores.masked_fill(~seen.to(scores.device), -torch.inf).softmax(-1)
                result[at] = torch.einsum("kgql,lkd->qkgd", scores, values).flatten(1, 2)
            start += int(new)
        return result


def _taken(pages: Tensor, blocks: Tensor) -> Tensor:
    """torch indexes no 8-bit floats, but their bits."""
    if pages.itemsize > 1:
        return pages[blocks]
    return pages.view(torch.uint8)[blocks].view(pages.dtype)


def paged_rows(
    bed: Bed,
    rows: Sequence[tuple[int, int]],
    tokens_per_block: int,
    number: int,
    dtype: torch.dtype | None = None,
) -> PagedRows:
    """Rows of (new tokens, length); each `number` has another order of pages, of `dtype`."""
    sizes = bed.sizes
    is_fp8 = dtype is torch.float8_e4m3fn
    num_new, lengths = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    counts = -(-lengths.astype(np.int64) // tokens_per_block)
    order = np.random.default_rng(number).permutation(int(counts.sum()))
    tables = np.zeros((len(rows), int(counts.max())), dtype=np.int32)
    for row, end in enumerate(np.cumsum(counts)):
        tables[row, : counts[row]] = order[end - counts[row] : end]
    pages = (len(order), sizes.num_kv_heads, tokens_per_block, sizes.head_dim)
    return PagedRows(
        num_new=num_new,
        lengths=lengths,
        queries=bed.randn(int(num_new.sum()), sizes.num_heads, sizes.head_dim),
        keys=bed.randn(*pages, dtype=dtype),
        values=bed.randn(*pages, dtype=dtype),
        block_tables=bed.ints(tables),
        row_starts=bed.ints(np.concatenate([[0], np.cumsum(num_new)])),
        kv_lengths=bed.ints(lengths),
        slots=bed.ints(np.arange(len(rows))),
        cache_scales=torch.ones(2, pages[1], device=bed.device) if is_fp8 else None,
    )


def kv_bytes(bed_sizes: tuple[int, int, int], rows: Sequence[tuple[int, int]]) -> int:
    """Keys and values of all rows; sizes: KV heads, head dimension, bytes of a number."""
    num_kv_heads, head_dim, itemsize = bed_sizes
    return 2 * num_kv_heads * head_dim * itemsize * sum(length for _, length in rows)


def attention_flops(num_heads: int, head_dim: int, rows: Sequence[tuple[int, int]]) -> int:
    """Of the pairs of a token and a position that it sees."""
    pairs = sum(new * (length - new) + new * (new + 1) // 2 for new, length in rows)
    return 4 * num_heads * head_dim * pairs
