"""Random adapters for a fused matrix, and what they come to: dense weights in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gptmanager.kernels.lora.adapter_arguments import AdapterModule, StepAdapters

LAYER, LAYERS, MODULES = 1, 3, 6
NOTHING = (0, 0, 0, 0)


def qkv_layout(width: int, q: int, kv: int) -> tuple[AdapterModule, ...]:
    """The whole matrix, and its parts: indices as they come."""
    columns = (4, 0, q + 2 * kv), (0, 0, q), (5, q, kv), (2, q + kv, kv)
    return tuple(AdapterModule(*it, width) for it in columns)


class Case(NamedTuple):
    """`ranks`: of each slot, those of the modules in the order of the layout."""

    layout: tuple[AdapterModule, ...]
    ranks: Sequence[Sequence[int]]
    adapters: StepAdapters

    def with_rows(self, rows: Sequence[int]) -> StepAdapters:
        return replace(self.adapters, rows=torch.tensor(rows, dtype=torch.int32))


def new_case(
    layout: tuple[AdapterModule, ...],
    ranks: Sequence[Sequence[int]],
    dtype: torch.dtype = torch.float32,
    gap: int = 1,
) -> Case:
    """Adapters of which only those of `LAYER` may be read: all else in the pool is NaN.

    `gap`: elements between one module's weights and the next one's.
    """
    generator = torch.Generator().manual_seed(len(ranks))
    table = torch.zeros(len(ranks), LAYERS, MODULES, 2, dtype=torch.int64)
    table[:, [layer for layer in range(LAYERS) if layer != LAYER]] = torch.tensor([0, 1])
    parts, end = [torch.full((gap,), torch.nan)], gap
    for slot, own in enumerate(ranks):
        for (index, _, columns, width), rank in zip(layout, own, strict=True):
            size = rank * (width + columns)
            table[slot, LAYER, index] = torch.tensor([end, rank])
            scale = torch.full((size,), (width * max(rank, 1)) ** -0.25)
            values = torch.randn(size, generator=generator) * scale
            parts += [values, torch.full((gap,), torch.nan)]
            end += size + gap
    most = max([1, *(rank for own in ranks for rank in own)])
    rows = torch.empty(0, dtype=torch.int32)
    pool = torch.cat(parts).to(dtype)
    return Case(layout, ranks, StepAdapters(pool, rows, table, {"qkv": layout}, most))


def merged(case: Case, slot: int, num_columns: int) -> Tensor:
    """What the adapter adds to the weight `[num_columns, width]`, in float64."""
    total = torch.zeros(num_columns, case.layout[0].width, dtype=torch.float64)
    for (index, first, columns, width), rank in zip(case.layout, case.ranks[slot], strict=True):
        start = int(case.adapters.table[slot, LAYER, index, 0])
        own = case.adapters.pool[start : start + rank * (width + columns)].double()
        a, b = own[: rank * width].reshape(rank, width), own[rank * width :].reshape(columns, rank)
        total[first : first + columns] += b @ a
    return total


def expected(case: Case, rows: Sequence[int], result: Tensor, x: Tensor) -> Tensor:
    """`result + x @ merged^T` in float64."""
    total = result.double()
    for token, slot in enumerate(rows):
        if slot >= 0:
            total[token] += merged(case, slot, result.shape[1]) @ x[token].double()
    return total
