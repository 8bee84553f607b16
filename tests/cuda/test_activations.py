from __future__ import annotations

import pytest
import torch
from kernel_values import DTYPES, close, randn

from gptmanager.cuda.activations import activate, activate_gated
from gptmanager.kernels.activations import activation_kinds as torch_kinds

pytestmark = pytest.mark.every(3)

SHAPES = [(3, 64), (2, 1100), (5, 33), (0, 8), (1, 1)]
PLAIN = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


def check_gated(machine, dtype, tokens, width, activation="silu"):
    gate_up = randn(tokens, 2 * width, dtype=dtype) * 4
    out = machine.empty((tokens, width), dtype)
    activate_gated(machine.launcher, out, machine.tensor(gate_up), activation)
    gate, up = gate_up.double().chunk(2, dim=1)
    close(out, torch_kinds.activate_gated(gate, up, activation))


def check_plain(machine, dtype, tokens, width, activation):
    x = randn(tokens, width, dtype=dtype) * 4
    out = machine.empty((tokens, width), dtype)
    activate(machine.launcher, out, machine.tensor(x), activation)
    close(out, torch_kinds.activate(x.double(), activation))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(machine, dtype):
    for tokens, width in SHAPES:
        check_gated(machine, dtype, tokens, width)
        for activation in ("gelu", "gelu_tanh"):
            check_plain(machine, dtype, tokens, width, activation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", (*PLAIN, "clamped_swiglu"))
def test_all_kinds_of_activations(machine, dtype, activation):
    for tokens, width in ((3, 64), (1, 33)):
        check_gated(machine, dtype, tokens, width, activation)
        if activation in PLAIN:
            check_plain(machine, dtype, tokens, width, activation)


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
    activate_gated(machine.launcher, out, machine.tensor(torch.cat([gate, up])[None]))
    assert torch.equal(out.cpu()[0], expected)


@pytest.mark.parametrize("activation", PLAIN)
def test_activations_of_extreme_values(machine, activation):
    x = torch.tensor([[-1e18, -200.0, -20.0, -0.0, 20.0, 200.0, 1e18, torch.nan]])
    expected = x.clamp(min=0).double()
    if activation == "relu2":
        expected = expected.square()
    out = machine.empty(x.shape, x.dtype)
    activate(machine.launcher, out, machine.tensor(x), activation)
    close(out.cpu(), expected, 1e-6)
    with_ones = machine.tensor(torch.cat([x, torch.ones_like(x)], dim=1))
    activate_gated(machine.launcher, out, with_ones, activation)
    close(out, expected, 1e-6)


def test_clamped_gates_of_extreme_values(machine):
    x = torch.tensor([[-1e18, -200.0, -7.0, -0.0, 7.0, 200.0, 1e18, torch.nan]])
    for other in (-1e18, -7.5, 2.0, 1e18, torch.nan):
        up, out = torch.full_like(x, other), machine.empty(x.shape, x.dtype)
        gate_up = torch.cat([x, up], dim=1)
        activate_gated(machine.launcher, out, machine.tensor(gate_up), "clamped_swiglu")
        close(out, torch_kinds.activate_gated(x.double(), up.double(), "clamped_swiglu"), 1e-6)


def test_activations_stay_inside_their_arrays(checked_machine):
    check_gated(checked_machine, torch.bfloat16, 2, 1100)
    check_plain(checked_machine, torch.bfloat16, 5, 33, "gelu_tanh")


def test_tensors_that_do_not_fit(machine):
    x = machine.tensor(randn(2, 64))
    with pytest.raises(ValueError, match=r"gate_up is torch.float32 \[2, 64\], expected"):
        activate_gated(machine.launcher, x, x)
    with pytest.raises(ValueError, match="x must be contiguous"):
        activate(machine.launcher, x.T, x.T, "gelu")
