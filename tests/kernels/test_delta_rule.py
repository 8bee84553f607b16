"""The gated delta rule: tokens one by one, in chunks and compiled; the same bits in any chunk."""

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

from gptmanager.kernels import CpuKernels, Kernels
from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.recurrent.delta_formulas import DeltaShape, DeltaState, DeltaTensors

SHAPES = [DeltaShape(2, 4, 12, 20, 4), DeltaShape(1, 3, 33, 40, 4), DeltaShape(2, 2, 16, 32, 2)]


class Case:
    """A layer with random parameters, and rows of random tokens over random states."""

    def __init__(self, shape: DeltaShape, dtype: torch.dtype) -> None:
        drawn = torch.Generator().manual_seed(1)

        def randn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=drawn).to(dtype).double()

        heads = shape.value_heads
        self.shape, self.dtype = shape, dtype
        self.projected = randn(sum(LENGTHS), shape.channels + shape.values)
        self.gates = 2 * randn(sum(LENGTHS), 2 * heads)
        conv, norm = (
            randn(shape.width, shape.channels) / 2,
            (1 + randn(shape.value_dim) / 4).to(dtype).double(),
        )
        self.tensors = DeltaTensors(conv, randn(heads), randn(heads), norm)
        self.inputs = randn(NUM_SLOTS, shape.width - 1, shape.channels)
        self.memory = randn(NUM_SLOTS, heads, shape.key_dim, shape.value_dim)

    def run(
        self, kernels: Kernels, dtype: torch.dtype, steps: Steps
    ) -> tuple[list[Tensor], DeltaState]:
        """Run steps of (row, tokens); return the outputs of each row, and the last state."""
        wide = torch.promote_types(dtype, torch.float32)
        own = DeltaTensors(
            self.tensors.conv.to(dtype),
            self.tensors.decay.to(wide),
            self.tensors.step.to(wide),
            self.tensors.norm.to(dtype),
        )
        state = DeltaState(self.inputs.to(dtype).clone(), self.memory.to(wide).clone())

        def compute(places: list[int], rows: RowSpans) -> Tensor:
            given = self.projected[places].to(dtype), self.gates[places].to(wide)
            return kernels.gated_delta(*given, self.shape, own, 1e-6, state, rows)

        return in_steps(steps, compute), state


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_and_compiled_loops_are_the_formula(shape: DeltaShape) -> None:
    check_formula(Case(shape, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_token_has_its_bits_in_any_chunk(dtype: torch.dtype) -> None:
    check_bits_in_chunks(Case(SHAPES[0], dtype), dtype)


def test_narrow_numbers_are_rounded_once() -> None:
    check_rounding(Case(SHAPES[0], torch.bfloat16))


@pytest.mark.parametrize("kernels", [Kernels(deterministic=True), CpuKernels(deterministic=True)])
@pytest.mark.parametrize(("num_tokens", "width", "threads"), [(33, 24, 1), (34, 4096, 3)])
def test_a_gated_token_has_its_bits_in_any_batch(
    kernels: Kernels, num_tokens: int, width: int, threads: int
) -> None:
    drawn, before = torch.Generator().manual_seed(1), torch.get_num_threads()
    x, gates = torch.randn(2, num_tokens, width, generator=drawn)
    torch.set_num_threads(threads)
    try:
        batch = kernels.gated(x, gates)
    finally:
        torch.set_num_threads(before)
    alone = [kernels.gated(x[it : it + 1], gates[it : it + 1]) for it in range(num_tokens)]
    assert torch.equal(batch, torch.cat(alone))
