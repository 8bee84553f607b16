"""`PagedRows`: sequences with pages of random keys and values, for attention cases.

This module does not depend on kernels. Pages have the memory layout of a device's pool,
`[P, K, B, D]`: P pages, K KV heads, B tokens per page, D numbers per head. The pages of a sequence
are in random order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gptmanager.bench.kernels.cases import Rig
from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages, RowSpans

_QUERIES = 512  # most queries per call of the reference attention


@dataclass(frozen=True, eq=False)
class PagedRows:
    """The rows of a step, and one layer's pages.

    Row r has `lengths[r]` tokens, the last `num_new[r]` of which are new. `queries` is `[T, H, D]`:
    T new tokens of all rows, H query heads. `pages.keys` is a transposed view, `[P, K, D, B]`. Row
    r uses row r of the block tables. Pages of float8_e4m3fn have the scale 1.
    """

    num_new: np.ndarray
    lengths: np.ndarray
    queries: Tensor
    pages: Pages
    spans: RowSpans

    @property
    def shape(self) -> AttentionShape:
        """The shape of attention over these pages."""
        _, num_heads, head_dim = self.queries.shape
        fp8 = self.pages.cache_scales is not None
        return AttentionShape(
            num_heads, self.pages.values.shape[1], head_dim, scale=head_dim**-0.5, fp8=fp8
        )

    @property
    def token_major(self) -> tuple[Tensor, Tensor]:
        """Keys and values, `[P, K, B, D]`."""
        return self.pages.keys.mT, self.pages.values

    @property
    def tokens_per_block(self) -> int:
        return self.pages.values.shape[2]

    def history(self, row: int) -> tuple[Tensor, Tensor]:
        """Return a row's keys and values, `[length, K, D]`, in the queries' dtype."""
        length = int(self.lengths[row])
        blocks = self.spans.block_tables[row, : -(-length // self.tokens_per_block)].long()
        keys, values = (
            _index(pages, blocks).to(self.queries.dtype).transpose(1, 2).flatten(0, 1)[:length]
            for pages in self.token_major
        )
        return keys, values

    def expected(self) -> Tensor:
        """Return the correct result of attention for all rows in float32, `[T, H, D]`."""
        result = torch.empty(self.queries.shape, dtype=torch.float32, device=self.queries.device)
        start = 0
        for row, (new, length) in enumerate(zip(self.num_new, self.lengths, strict=True)):
            keys, values = (it.float().transpose(0, 1)[None] for it in self.history(row))
            for first in range(0, int(new), _QUERIES):
                after = min(first + _QUERIES, int(new))
                at = slice(start + first, start + after)
                queries = self.queries[at].float().transpose(0, 1)[None]
                position = torch.arange(length - new + first, length - new + after)[:, None]
                seen = (torch.arange(length)[None] <= position).to(queries.device)
                attended = F.scaled_dot_product_attention(
                    queries, keys, values, seen, scale=self.shape.scale, enable_gqa=True
                )
                result[at] = attended[0].transpose(0, 1)
            start += int(new)
        return result


def _index(pages: Tensor, blocks: Tensor) -> Tensor:
    """Return `pages[blocks]`. torch cannot index 8-bit floats, but it can index their bytes."""
    if pages.itemsize > 1:
        return pages[blocks]
    return pages.view(torch.uint8)[blocks].view(pages.dtype)


def paged_rows(
    rig: Rig,
    rows: Sequence[tuple[int, int]],
    tokens_per_block: int,
    number: int,
    dtype: torch.dtype | None = None,
) -> PagedRows:
    """Return `PagedRows` for `rows` of (number of new tokens, length), with random pages.

    `number` is the seed of the order of pages. `dtype` of the pages is by default
    `rig.sizes.dtype`.
    """
    sizes = rig.sizes
    is_fp8 = dtype is torch.float8_e4m3fn
    num_new, lengths = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    counts = -(-lengths.astype(np.int64) // tokens_per_block)
    order = np.random.default_rng(number).permutation(int(counts.sum()))
    tables = np.zeros((len(rows), int(counts.max())), dtype=np.int32)
    for row, end in enumerate(np.cumsum(counts)):
        tables[row, : counts[row]] = order[end - counts[row] : end]
    blocks = (len(order), sizes.num_kv_heads, tokens_per_block, sizes.head_dim)
    starts = np.concatenate([[0], np.cumsum(num_new)])
    return PagedRows(
        num_new=num_new,
        lengths=lengths,
        queries=rig.randn(int(num_new.sum()), sizes.num_heads, sizes.head_dim),
        pages=Pages(
            rig.randn(*blocks, dtype=dtype).mT,
            rig.randn(*blocks, dtype=dtype),
            torch.ones(2, blocks[1], device=rig.device) if is_fp8 else None,
        ),
        spans=RowSpans(
            *(rig.ints(starts), rig.ints(lengths), rig.ints(np.arange(len(rows)))),
            rig.ints(tables),
        ),
    )


def attention_flops(num_heads: int, head_dim: int, rows: Sequence[tuple[int, int]]) -> int:
    """Return the FLOPs of attention for `rows` of (number of new tokens, length)."""
    pairs = sum(new * (length - new) + new * (new + 1) // 2 for new, length in rows)
    return 4 * num_heads * head_dim * pairs
