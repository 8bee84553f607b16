"""Causal convolutions: the formula, in torch and compiled; the same bits in any chunk."""

from __future__ import annotations

import pytest
import torch
from recurrent_rows import Steps, in_steps, spans
from torch import Tensor

from gptmanager.kernels import CpuKernels, Kernels
from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.recurrent.convolution import Filter

LENGTHS, SLOTS, NUM_SLOTS = [5, 1, 40, 2], [3, 0, 5, 1], 6
WHOLE = [list(enumerate(LENGTHS))]
CHUNKS = [[(0, 2), (2, 7)], [(1, 1), (0, 3), (2, 1)], [(2, 32), (3, 1)], [(3, 1)]]


class Case:
    """A random gated convolution over random states. `channels` is not a multiple of a vector."""

    def __init__(self, width: int, biased: bool, dtype: torch.dtype, channels: int = 300) -> None:
        drawn = torch.Generator().manual_seed(width)

        def randn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=drawn).to(dtype)

        self.projected = randn(sum(LENGTHS), 3 * channels)
        self.filter = Filter(randn(width, channels), randn(channels) if biased else None)
        self.inputs = randn(NUM_SLOTS, width - 1, channels)

    def run(self, kernels: Kernels, steps: Steps) -> list[Tensor]:
        """Run steps of (row, tokens); return the outputs of each row, and the last inputs."""
        state = self.inputs.clone()

        def compute(places: list[int], rows: RowSpans) -> Tensor:
            return kernels.short_convolution(self.projected[places], self.filter, state, rows)

        return [*in_steps(steps, compute, LENGTHS, SLOTS), state]

    def exact(self) -> list[Tensor]:
        """Return the same as `run`, by the convolution of torch, in float64."""
        before, after, x = self.projected.double().chunk(3, dim=-1)
        x = (before * x).to(self.projected.dtype).double()
        weight, bias = self.filter.weight.double(), self.filter.bias
        state, found = self.inputs.double(), []
        for slot, own, factors in zip(SLOTS, x.split(LENGTHS), after.split(LENGTHS), strict=True):
            both = torch.cat((state[slot], own))
            wide_bias = None if bias is None else bias.double()
            filters = weight.T[:, None]
            out = torch.conv1d(both.T[None], filters, wide_bias, groups=len(filters))[0].T
            found.append(out * factors)
            state[slot] = both[len(own) :]
        return [*found, state]


@pytest.mark.parametrize(("width", "biased"), [(3, False), (4, True), (1, True)])
@pytest.mark.parametrize(
    ("kernels", "dtype", "error"),
    [
        (Kernels(), torch.float64, 1e-13),
        (Kernels(), torch.bfloat16, 2**-8),
        (CpuKernels(), torch.float32, 2e-6),
        (CpuKernels(), torch.bfloat16, 2**-8),
    ],
    ids=["torch-float64", "torch-bfloat16", "cpu-float32", "cpu-bfloat16"],
)
def test_a_convolution_is_that_of_torch(
    kernels: Kernels, dtype: torch.dtype, error: float, width: int, biased: bool
) -> None:
    case = Case(width, biased, dtype)
    for found, right in zip(case.run(kernels, WHOLE), case.exact(), strict=True):
        assert found.dtype is dtype
        assert torch.allclose(found.double(), right, rtol=error, atol=error)


@pytest.mark.parametrize("kernels", [Kernels(), CpuKernels()], ids=["torch", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_token_has_its_bits_in_any_chunk(kernels: Kernels, dtype: torch.dtype) -> None:
    case = Case(3, False, dtype)
    whole, chunked = case.run(kernels, WHOLE), case.run(kernels, CHUNKS)
    assert all(map(torch.equal, whole, chunked))
    untouched = [slot for slot in range(NUM_SLOTS) if slot not in SLOTS]
    assert torch.equal(whole[-1][untouched], case.inputs[untouched])


def test_rows_and_tokens_that_pad_a_step_change_nothing() -> None:
    """Rows without tokens have no slot of their own, and may come before rows with tokens."""
    case = Case(3, True, torch.float32)
    expected, state = case.inputs.clone(), case.inputs.clone()
    given = case.projected[:3].clone()
    right = Kernels().short_convolution(given.clone(), case.filter, expected, spans([2, 1], [4, 2]))
    rows = spans([0, 2, 0, 1, 0], [4, 4, 99, 2, -1])
    padded = torch.cat((given, given[:2]))
    found = Kernels().short_convolution(padded, case.filter, state, rows)
    assert torch.equal(found[:3], right) and torch.equal(state, expected)
