"""The gated delta rule: tokens one by one, in chunks and compiled; the same bits in any chunk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from gptmanager.kernels import CpuKernels, Kernels
from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.recurrent.delta_formulas import DeltaShape, DeltaState, DeltaTensors

SHAPES = [DeltaShape(2, 4, 12, 20, 4), DeltaShape(1, 3, 33, 40, 4), DeltaShape(2, 2, 16, 32, 2)]
LENGTHS = [5, 1, 150, 1, 2]
SLOTS = [3, 0, 6, 1, 5]
NUM_SLOTS = 7


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
        self, kernels: Kernels, dtype: torch.dtype, steps: Sequence[Sequence[tuple[int, int]]]
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
        firsts, found = [0, *accumulate(LENGTHS)], [[] for _ in LENGTHS]
        done = [0] * len(LENGTHS)
        for step in steps:
            places = []
            for row, count in step:
                start = firsts[row] + done[row]
                places += range(start, start + count)
                done[row] += count
            counts = [count for _, count in step]
            starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
            slots = torch.tensor([SLOTS[row] for row, _ in step], dtype=torch.int32)
            rows = RowSpans(starts, starts[1:], slots, slots[:, None])
            projected = self.projected[places].to(dtype)
            given = projected, self.gates[places].to(wide), self.shape, own, 1e-6, state
            pieces = kernels.gated_delta(*given, rows).split(counts)
            for (row, _), piece in zip(step, pieces, strict=True):
                found[row].append(piece)
        return [torch.cat(own) for own in found], state


WHOLE = [list(enumerate(LENGTHS))]
CHUNKS = [[(0, 2), (2, 70)], [(1, 1), (0, 3), (2, 1)], [(2, 79), (3, 1)], [(4, 1)], [(4, 1)]]


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_and_compiled_loops_are_the_formula(shape: DeltaShape) -> None:
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
