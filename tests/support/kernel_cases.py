"""Sizes, pages and textbook results for tests of the CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptmanager.kernels import CpuKernels, Kernels
from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages, RowSpans

CPU = CpuKernels()


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator)


@dataclass(frozen=True)
class Sizes:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    block: int = 16
    window: int | None = None
    sink: int = 0
    chunked: bool = False

    def first(self, position: int) -> int:
        """The first position after the sink that a token at `position` sees."""
        if self.window is None:
            return 0
        begin = position - position % self.window
        return begin if self.chunked else max(0, position + 1 - self.window)

    def sees(self, at: int, position: int) -> bool:
        recent = at >= self.first(position)
        return at <= position and (recent or at < self.sink)


@dataclass
class Cache:
    """A cache in which whatever no query may see is NaN. `rows`: (new tokens, KV length)."""

    sizes: Sizes
    rows: Sequence[tuple[int, int]]
    keys: Tensor
    values: Tensor
    block_tables: Tensor
    q: Tensor
    histories: list[tuple[Tensor, Tensor]]

    def attend(
        self,
        kernels: Kernels,
        parts: Sequence[tuple[int, int, int]],
        softcap: float = 0.0,
        cache_scales: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The queries `start:stop` of each (row, start, stop), packed in that order."""
        begins = np.cumsum([0, *[new for new, _ in self.rows]])
        lengths = [self.rows[row][1] - self.rows[row][0] + stop for row, _, stop in parts]
        counts = [stop - start for _, start, stop in parts]
        queries = [self.q[begins[row] + start : begins[row] + stop] for row, start, stop in parts]
        rows = RowSpans(
            torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            torch.tensor([row for row, _, _ in parts], dtype=torch.int32),
            self.block_tables,
        )
        shape = AttentionShape(
            *(self.sizes.heads, self.sizes.kv_heads, self.sizes.dim, self.sizes.dim**-0.5),
            window=self.sizes.window,
            sink=self.sizes.sink,
            softcap=softcap,
            chunked=self.sizes.chunked,
            sinks=sinks is not None,
        )
        pages = Pages(self.keys, self.values, cache_scales)
        return kernels.attention(torch.cat([*queries, self.q[:0]]), pages, rows, shape, sinks)

    def attend_all(self, kernels: Kernels, **options: Any) -> Tensor:
        parts = [(row, 0, new) for row, (new, _) in enumerate(self.rows)]
        return self.attend(kernels, parts, **options)


def new_pages(sizes: Sizes, rows: Sequence[tuple[int, int]]) -> Cache:
    blocks = [-(-length // sizes.block) for _, length in rows]
    order = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(0))
    keys = torch.full((len(order), sizes.kv_heads, sizes.dim, sizes.block), torch.nan)
    values = torch.full((len(order), sizes.kv_heads, sizes.block, sizes.dim), torch.nan)
    tables = torch.full((len(rows), max([*blocks, 1])), len(order) - 1, dtype=torch.int32)
    histories = []
    for row, (new, length) in enumerate(rows):
        history = randn(2, length, sizes.kv_heads, sizes.dim, seed=row)
        histories.append((history[0], history[1]))
        first = sizes.first(length - new)
        for at in (at for at in range(length) if at >= first or at < sizes.sink):
            block = order[sum(blocks[:row]) + at // sizes.block]
            tables[row, at // sizes.block] = block
            keys[block, :, :, at % sizes.block] = history[0, at]
            values[block, :, at % sizes.block] = history[1, at]
    q = randn(sum(new for new, _ in rows), sizes.heads, sizes.dim, seed=1)
    return Cache(sizes, rows, keys, values, tables, q, histories)


def textbook_attention(pages: Cache, softcap: float = 0.0, sinks: Tensor | None = None) -> Any:
    sizes, results, token = pages.sizes, [], 0
    for (new, length), (keys, values) in zip(pages.rows, pages.histories, strict=True):
        for position in range(length - new, length):
            seen = [at for at in range(length) if sizes.sees(at, position)]
            for head in range(sizes.heads):
                kv_head = head * sizes.kv_heads // sizes.heads
                k = keys[seen, kv_head].double().numpy()
                v = values[seen, kv_head].double().numpy()
                scores = k @ pages.q[token, head].double().numpy() * sizes.dim**-0.5
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                own = -np.inf if sinks is None else float(sinks[head])  # a score without a value
                highest = max(own, scores.max())
                weights = np.exp(scores - highest)
                results.append(weights @ v / (weights.sum() + np.exp(own - highest)))
            token += 1
    return np.reshape(results, (token, sizes.heads * sizes.dim))


def rope_arguments(
    sizes: Sizes, rotary: int | None, norms: bool, rows: Sequence[tuple[int, int]]
) -> tuple[Any, ...]:
    tokens, pages = sum(new for new, _ in rows), new_pages(sizes, rows)
    angles = torch.arange(300).unsqueeze(1) * randn(1, (rotary or 0) // 2)
    positions = [torch.arange(length - new, length) for new, length in rows]
    qkv = randn(tokens, (sizes.heads + 2 * sizes.kv_heads) * sizes.dim)
    qkv[tokens // 2] = 0  # its root mean square is that of eps
    return (
        qkv,
        torch.cat(positions),
        None if rotary is None else torch.cat([angles.cos(), angles.sin()], dim=1),
        randn(sizes.dim, seed=2) if norms else None,
        randn(sizes.dim, seed=3) if norms else None,
        1e-6,
        Pages(torch.full_like(pages.keys, torch.nan), torch.full_like(pages.values, torch.nan)),
        RowSpans(
            torch.tensor(np.cumsum([0, *[new for new, _ in rows]]), dtype=torch.int32),
            torch.tensor([length for _, length in rows], dtype=torch.int32),
            torch.arange(len(rows), dtype=torch.int32),
            pages.block_tables,
        ),
    )
