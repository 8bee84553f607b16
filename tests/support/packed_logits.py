"""Logits of a model for packed prompts, and those of its reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from checkpoints import (
    CONFIGS,
    PagedDriver,
    random_model,
)
from torch import Tensor


@cache
def reference(name: str) -> Any:
    return random_model(CONFIGS[name])


def random_tokens(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(96, (length,), generator=generator).tolist() for length in lengths]


def packed_logits(driver: PagedDriver, sequences: Sequence[list[int]]) -> list[Tensor]:
    """All logits of each sequence, computed in packed steps of whole and split contexts."""
    cuts = [[], [4], [1, 2, 15], [10, 21, 22, 23], [7]]
    parts = [
        [sequence[start:stop] for start, stop in zip([0, *cut], [*cut, None], strict=True)]
        for sequence, cut in zip(sequences, cuts, strict=True)
    ]
    logits: list[list[Tensor]] = [[] for _ in sequences]
    for step in range(max(map(len, parts))):
        rows = [(slot, part[step]) for slot, part in enumerate(parts) if step < len(part)]
        rows.sort(key=lambda row: len(row[1]) == 1)
        pieces = driver.forward(rows).split([len(tokens) for _, tokens in rows])
        for (slot, _), piece in zip(rows, pieces, strict=True):
            logits[slot].append(piece)
    return [torch.cat(pieces) for pieces in logits]
