from __future__ import annotations

import pytest
import torch
from kernel_values import DTYPES, close, randn

from gptmanager.cuda.activations import gelu, silu_mul

SHAPES = [(3, 64), (2, 1100), (5, 33), (0, 8), (1, 1)]


def check_silu_mul(machine, dtype, tokens, width):
    gate_up = randn(tokens, 2 * width, dtype=dtype) * 4
    out = machine.empty((tokens, width), dtype)
    silu_mul(machine.launcher, out, machine.tensor(gate_up))
    gate, up = gate_up.double().chunk(2, dim=1)
    close(out, gate * gate.sigmoid() * up)


def check_gelu(machine, dtype, tokens, width, approximate):
    x = randn(tokens, width, dtype=dtype) * 4
    out = machine.empty((tokens, width), dtype)
    gelu(machine.launcher, out, machine.tensor(x), approximate)
    close(out, torch.nn.functional.gelu(x.double(), approximate=approximate))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(machine, dtype):
    for tokens, width in SHAPES:
        check_silu_mul(machine, dtype, tokens, width)
        check_gelu(machine, dtype, tokens, width, "none")
        check_gelu(machine, dtype, tokens, width, "tanh")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_are_rounded_to_the_nearest_and_ties_to_even(machine, dtype):
    """From 32 on SiLU gives its argument, and products of two such numbers are exact as floats."""
    number, eps = torch.arange(1024), torch.finfo(dtype).eps
    gate = (32 * (1 + number * eps % 1)).to(dtype)
    up = torch.where(number % 3 > 0, 1.5, 1.25).to(dtype)
    exact = gate.float() * up.float()
    expected = exact.to(dtype)
    ulp = torch.nextafter(expected, torch.full_like(expected, torch.inf)).float() - expected.float()
    assert ((exact - expected.float()).abs() == ulp / 2).sum() > 20  # ties
    out = machine.empty((1, 1024), dtype)
    silu_mul(machine.launcher, out, machine.tensor(torch.cat([gate, up])[None]))
    assert torch.equal(out.cpu()[0], expected)


def test_activations_of_extreme_values(machine):
    x = torch.tensor([[-1e30, -200.0, -20.0, -0.0, 20.0, 200.0, 1e30, torch.nan]])
    expected = x.clamp(min=0).double()
    out = machine.empty(x.shape, x.dtype)
    for approximate in ("none", "tanh"):
        gelu(machine.launcher, out, machine.tensor(x), approximate)
        close(out.cpu(), expected, 1e-6)
    silu_mul(machine.launcher, out, machine.tensor(torch.cat([x, torch.ones_like(x)], dim=1)))
    close(out, expected, 1e-6)


def test_activations_stay_inside_their_arrays(checked_machine):
    check_silu_mul(checked_machine, torch.bfloat16, 2, 1100)
    check_gelu(checked_machine, torch.bfloat16, 5, 33, "tanh")


def test_tensors_that_do_not_fit(machine):
    x = machine.tensor(randn(2, 64))
    with pytest.raises(ValueError, match=r"gate_up is torch.float32 \[2, 64\], expected"):
        silu_mul(machine.launcher, x, x)
    with pytest.raises(ValueError, match="x must be contiguous"):
        gelu(machine.launcher, x.T, x.T)
