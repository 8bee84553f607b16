"""Rows over a paged KV cache, and attention to them in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from kernel_values import DTYPES, randn

from gptmanager.cuda.attention.paged_kernels import HEAD_DIMS, MAX_GROUP
from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages, RowSpans


def int32(values):
    return torch.tensor(np.asarray(values), dtype=torch.int32)


def crossings(rows, seed, count):
    """Return `count` random combinations of `PagedRows` of these rows and of their options."""
    draw = np.random.default_rng(seed)
    for _ in range(count):
        kv_heads = int(draw.choice([1, 2]))
        scales = torch.from_numpy(draw.uniform(0.25, 4, (2, kv_heads)).astype(np.float32))
        own = PagedRows(
            rows,
            kv_heads * int(draw.integers(1, MAX_GROUP + 1)),
            kv_heads,
            int(draw.choice(HEAD_DIMS)),
            int(draw.choice([3, 8, 16, 32])),
            DTYPES[int(draw.integers(len(DTYPES)))],
            scales if draw.random() < 0.25 else None,
        )
        options = {}
        if draw.random() < 0.5:
            options["window"] = int(draw.choice([1, 30, 90]))
            options["sink"] = int(draw.choice([0, 5, 70]))
        elif draw.random() < 0.3:
            options |= {"window": 2 ** int(draw.integers(8)), "chunked": True}
        if draw.random() < 0.3:
            options["softcap"] = 1.5
        yield own, options


@dataclass
class PagedRows:
    """`rows`: (new tokens, KV length). Pages behind a row's end, and unowned ones, hold NaN."""

    rows: list[tuple[int, int]]
    heads: int
    kv_heads: int
    head_dim: int
    tokens_per_block: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_scales: torch.Tensor | None = None  # with them pages are float8_e4m3fn
    sinks: torch.Tensor | None = None  # a score of each head that has no value

    def __str__(self):
        pages = "" if self.cache_scales is None else " 8-bit pages"
        sinks = "" if self.sinks is None else " with sinks"
        return (
            f"{self.heads}/{self.kv_heads} heads of {self.head_dim}{sinks} {self.dtype}{pages}, "
            f"blocks of {self.tokens_per_block}"
        )

    def __post_init__(self):
        blocks = [-(-length // self.tokens_per_block) for _, length in self.rows]
        order = np.random.default_rng(0).permutation(sum(blocks) + 2).astype(np.int32)
        tables = torch.full((len(self.rows) + 1, max(blocks) + 1), -7, dtype=torch.int32)
        self.slots = torch.arange(len(self.rows), 0, -1, dtype=torch.int32)
        shape = (len(order), self.kv_heads, self.tokens_per_block, self.head_dim)
        cache_dtype = self.dtype if self.cache_scales is None else torch.float8_e4m3fn
        self.keys = torch.full(shape, torch.nan).to(cache_dtype)
        self.values = torch.full(shape, torch.nan).to(cache_dtype)
        self.history = []
        for row, (end, (_, length)) in enumerate(zip(np.cumsum(blocks), self.rows, strict=True)):
            own = torch.from_numpy(order[end - blocks[row] : end])
            tables[self.slots[row], : len(own)] = own
            self.history.append(self._fill(own.long(), length, row))
        self.block_tables = tables
        starts = np.cumsum([0, *(new for new, _ in self.rows)])
        self.row_starts, self.kv_lengths = int32(starts), int32([end for _, end in self.rows])
        shape = (int(starts[-1]), self.heads, self.head_dim)
        self.queries = randn(*shape, dtype=self.dtype, seed=99)

    def _fill(self, blocks, length, row):
        both = []
        for seed, pages in enumerate((self.keys, self.values)):
            own = randn(
                length, self.kv_heads, self.head_dim, dtype=pages.dtype, seed=2 * row + seed
            )
            for start in range(0, length, self.tokens_per_block):
                part = own[start : start + self.tokens_per_block]
                pages[blocks[start // self.tokens_per_block], :, : len(part)] = part.transpose(0, 1)
            scales = 1 if self.cache_scales is None else self.cache_scales[seed].double()[:, None]
            both.append(own.double() * scales)
        return both

    def put(self, row, position, *, keys=None, values=None):
        """Other keys or values `[kv_heads, head_dim]` of a token."""
        block = self.block_tables[self.slots[row], position // self.tokens_per_block]
        for kind, (new, pages) in enumerate(((keys, self.keys), (values, self.values))):
            if new is None:
                continue
            own = new.to(pages.dtype)
            pages[block, :, position % self.tokens_per_block] = own
            scales = 1 if self.cache_scales is None else self.cache_scales[kind].double()[:, None]
            self.history[row][kind][position] = own.double() * scales

    def shape(self, scale, **options):
        kind = {"fp8": self.cache_scales is not None, "sinks": self.sinks is not None}
        sizes = self.heads, self.kv_heads, self.head_dim
        return AttentionShape(*sizes, scale=scale, **kind, **options)

    def sinks_on(self, machine):
        return None if self.sinks is None else machine.tensor(self.sinks)

    def pages_on(self, machine):
        scales = None if self.cache_scales is None else machine.tensor(self.cache_scales)
        return Pages(machine.tensor(self.keys).mT, machine.tensor(self.values), scales)

    def spans_on(self, machine):
        tables = (self.row_starts, self.kv_lengths, self.slots, self.block_tables)
        return RowSpans(*map(machine.tensor, tables))

    def lose_unseen_blocks(self, window, sink, chunked=False):
        """Those in which no query of their row sees anything may be gone."""
        for row, (new, length) in enumerate(self.rows):
            position = length - new
            first = position - position % window if chunked else max(0, position + 1 - window)
            gone = first // self.tokens_per_block
            kept = -(-sink // self.tokens_per_block)
            self.block_tables[self.slots[row], kept:gone] = -1

    def textbook(self, scale, window=None, sink=0, softcap=0.0, chunked=False):
        """`[T, H, D]` float64."""
        results = []
        for row, (new, length) in enumerate(self.rows):
            keys, values = (
                it.repeat_interleave(self.heads // self.kv_heads, 1) for it in self.history[row]
            )
            start = int(self.row_starts[row])
            queries = self.queries[start : start + new].double()
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            at = torch.arange(length - new, length)[:, None]
            seen = torch.arange(length)
            hidden = seen > at
            if window is not None:
                first = at - at % window if chunked else at + 1 - window
                hidden |= (seen < first) & (seen >= sink)
            scores = scores.masked_fill(hidden, -torch.inf)
            if self.sinks is not None:
                own = self.sinks.double()[:, None, None].expand(-1, new, 1)
                scores = torch.cat([scores, own], dim=-1)
            weights = scores.softmax(-1)[..., :length]
            results.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(results)
