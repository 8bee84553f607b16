"""Mamba-2: tokens one by one, in chunks and compiled; the same bits in any chunk."""

from __future__ import annotations

import pytest
import torch
from recurrent_rows import (
    LENGTHS,
    NUM_SLOTS,
    Steps,
    check_bits_in_chunks,
    check_formula,
    check_rounding,
    in_steps,
)
from torch import Tensor

from gptmanager.kernels import Kernels
from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.recurrent.convolution import Filter
from gptmanager.kernels.recurrent.state_space_formulas import (
    StateSpaceShape,
    StateSpaceState,
    StateSpaceTensors,
)

SHAPES = [StateSpaceShape(4, 20, 12, 2, 4), StateSpaceShape(2, 40, 33, 1, 2, norm_groups=2)]


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
        self, kernels: Kernels, dtype: torch.dtype, steps: Steps
    ) -> tuple[list[Tensor], StateSpaceState]:
        """Run steps of (row, tokens); return the outputs of each row, and the last state."""
        wide = torch.promote_types(dtype, torch.float32)
        conv = Filter(*(it.to(dtype) for it in self.conv))
        own = StateSpaceTensors(conv, *(it.to(wide) for it in self.of_heads), self.norm.to(dtype))
        state = StateSpaceState(self.inputs.to(dtype).clone(), self.memory.to(wide).clone())

        def compute(places: list[int], rows: RowSpans) -> Tensor:
            projected = self.projected[places].to(dtype)
            return kernels.state_space(projected, self.shape, own, 1e-6, state, rows)

        return in_steps(steps, compute), state


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_and_compiled_loops_are_the_formula(shape: StateSpaceShape) -> None:
    check_formula(Case(shape, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_token_has_its_bits_in_any_chunk(dtype: torch.dtype) -> None:
    check_bits_in_chunks(Case(SHAPES[0], dtype), dtype)


def test_narrow_numbers_are_rounded_once() -> None:
    check_rounding(Case(SHAPES[0], torch.bfloat16))
