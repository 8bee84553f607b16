"""Rows of tokens of recurrent layers, computed in steps, and what holds for each kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gptmanager.kernels import CpuKernels, Kernels
from gptmanager.kernels.attention.attention_arguments import RowSpans

Steps = Sequence[Sequence[tuple[int, int]]]
LENGTHS, SLOTS, NUM_SLOTS = [5, 1, 150, 1, 2], [3, 0, 6, 1, 5], 7
WHOLE = [list(enumerate(LENGTHS))]
CHUNKS = [[(0, 2), (2, 70)], [(1, 1), (0, 3), (2, 1)], [(2, 79), (3, 1)], [(4, 1)], [(4, 1)]]


def spans(counts: Sequence[int], slots: Sequence[int]) -> RowSpans:
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    own = torch.tensor(slots, dtype=torch.int32)
    return RowSpans(starts, starts[1:], own, own[:, None])


def in_steps(
    steps: Steps,
    compute: Callable[[list[int], RowSpans], Tensor],
    lengths: Sequence[int] = LENGTHS,
    slots: Sequence[int] = SLOTS,
) -> list[Tensor]:
    """Run steps of (row, tokens); return the outputs of each row.

    `compute` returns the outputs of the tokens at some places.
    """
    firsts, done = [0, *accumulate(lengths)], [0] * len(lengths)
    found: list[list[Tensor]] = [[] for _ in lengths]
    for step in steps:
        places: list[int] = []
        for row, count in step:
            places += range(firsts[row] + done[row], firsts[row] + done[row] + count)
            done[row] += count
        counts = [count for _, count in step]
        out = compute(places, spans(counts, [slots[row] for row, _ in step]))
        for (row, _), piece in zip(step, out.split(counts), strict=True):
            found[row].append(piece)
    return [torch.cat(own) for own in found]


def check_formula(case: Any) -> None:
    exact, last = case.run(Kernels(True), torch.float64, WHOLE)
    for kernels, dtype, error in (
        (Kernels(), torch.float64, 1e-12),
        (CpuKernels(), torch.float32, 2e-5),
    ):
        found, state = case.run(kernels, dtype, WHOLE)
        for own, right in zip([*found, *state], [*exact, *last], strict=True):
            assert (own - right).abs().max() < error * right.std()


def check_bits_in_chunks(case: Any, dtype: torch.dtype) -> None:
    kernels = CpuKernels(deterministic=dtype is torch.float64)
    whole, last = case.run(kernels, dtype, WHOLE)
    chunked, state = case.run(kernels, dtype, CHUNKS)
    assert all(map(torch.equal, [*whole, *last], [*chunked, *state]))
    untouched = [slot for slot in range(NUM_SLOTS) if slot not in SLOTS]
    assert torch.equal(state.memory[untouched].double(), case.memory[untouched])


def check_rounding(case: Any) -> None:
    """`case` is of bfloat16."""
    exact, _ = case.run(Kernels(True), torch.float64, WHOLE)
    found, state = case.run(CpuKernels(), torch.bfloat16, WHOLE)
    assert state.memory.dtype is torch.float32
    for own, right in zip(found, exact, strict=True):
        assert torch.allclose(own.double(), right, rtol=2**-8, atol=1e-5)
