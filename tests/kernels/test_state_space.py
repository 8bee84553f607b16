"""Mamba-2: tokens one by one, in chunks and compiled; the same bits in any chunk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from gptmanager.kernels import CpuKernels, Kernels
from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.recurrent.convolution import Filter
from gptmanager.kernels.recurrent.state_space_formulas import (
    StateSpaceShape,
    StateSpaceState,
    StateSpaceTensors,
)

SHAPES = [StateSpaceShape(4, 20, 12, 2, 4), StateSpaceShape(2, 40, 33, 1, 2, norm_groups=2)]
LENGTHS, SLOTS, NUM_SLOTS = [5, 1, 150, 1, 2], [3, 0, 6, 1, 5], 7
WHOLE = [list(enumerate(LENGTHS))]
CHUNKS = [[(0, 2), (2, 70)], [(1, 1), (0, 3), (2, 1)], [(2, 79), (3, 1)], [(4, 1)], [(4, 1)]]


class Case:
    """A layer with random parameters, and rows of random tokens over random states."""

    def __init__(self, shape: StateSpaceShape, dtype: torch.dtype) -> None:
        drawn = torch.Generator().manual_seed(1)

        def randn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=drawn).to(dtype).double()

        self.shape, heads = shape, shape.heads
        self.projected = randn(sum(LENGTHS), shape.projected)
        self.conv = randn(shape.width, shape.channels) / 2, randn(shape.channels)
        self.of_heads = [randn(heads) for _ in range(3)]
        self.norm = (1 + randn(shape.inner) / 4).to(dtype).double()
        self.inputs = randn(NUM_SLOTS, shape.width - 1, shape.channels)
        self.memory = randn(NUM_SLOTS, heads, shape.state, shape.head_dim)

    def run(
        self, kernels: Kernels, dtype: torch.dtype, steps: Sequence[Sequence[tuple[int, int]]]
    ) -> tuple[list[Tensor], StateSpaceState]:
        """Run steps of (row, tokens); return the outputs of each row, and the last state."""
        wide = torch.promote_types(dtype, torch.float32)
        conv = Filter(*(it.to(dtype) for it in self.conv))
        own = StateSpaceTensors(conv, *(it.to(wide) for it in self.of_heads), self.norm.to(dtype))
        state = StateSpaceState(self.inputs.to(dtype).clone(), self.memory.to(wide).clone())
        firsts, done = [0, *accumulate(LENGTHS)], [0] * len(LENGTHS)
        found: list[list[Tensor]] = [[] for _ in LENGTHS]
        for step in steps:
            places: list[int] = []
            for row, count in step:
                places += range(firsts[row] + done[row], firsts[row] + done[row] + count)
                done[row] += count
            counts = [count for _, count in step]
            starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
            slots = torch.tensor([SLOTS[row] for row, _ in step], dtype=torch.int32)
            rows = RowSpans(starts, starts[1:], slots, slots[:, None])
            projected = self.projected[places].to(dtype)
            out = kernels.state_space(projected, self.shape, own, 1e-6, state, rows)
            for (row, _), piece in zip(step, out.split(counts), strict=True):
                found[row].append(piece)
        return [torch.cat(own) for own in found], state


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_and_compiled_loops_are_the_formula(shape: StateSpaceShape) -> None:
    exact, last = Case(shape, torch.float32).run(Kernels(True), torch.float64, WHOLE)
    for kernels, dtype, error in (
        (Kernels(), torch.float64, 1e-12),
        (CpuKernels(), torch.float32, 2e-5),
    ):
        found, state = Case(shape, torch.float32).run(kernels, dtype, WHOLE)
        for own, right in zip([*found, *state], [*exact, *last], strict=True):
            assert (own - right).abs().max() < error * right.std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_token_has_its_bits_in_any_chunk(dtype: torch.dtype) -> None:
    kernels = CpuKernels(deterministic=dtype is torch.float64)
    whole, last = Case(SHAPES[0], dtype).run(kernels, dtype, WHOLE)
    chunked, state = Case(SHAPES[0], dtype).run(kernels, dtype, CHUNKS)
    assert all(map(torch.equal, [*whole, *last], [*chunked, *state]))
    untouched = [slot for slot in range(NUM_SLOTS) if slot not in SLOTS]
    assert torch.equal(state.memory[untouched].double(), Case(SHAPES[0], dtype).memory[untouched])


def test_narrow_numbers_are_rounded_once() -> None:
    exact, _ = Case(SHAPES[0], torch.bfloat16).run(Kernels(True), torch.float64, WHOLE)
    found, state = Case(SHAPES[0], torch.bfloat16).run(CpuKernels(), torch.bfloat16, WHOLE)
    assert state.memory.dtype is torch.float32
    for own, right in zip(found, exact, strict=True):
        assert torch.allclose(own.double(), right, rtol=2**-8, atol=1e-5)
