"""Experts of transformers' networks in our CUDA kernels, on the emulator or a GPU."""

from __future__ import annotations

import pytest
import torch
from expert_classes import (
    CLAMPED,
    GPT_OSS,
    MIXTRAL,
    NEMOTRON,
    check_same,
    decorated,
    experts_of,
    ours,
)

from gptmanager.cuda import moe
from gptmanager.cuda.kernels import CudaKernels

pytest.importorskip("transformers", reason="transformers is not installed")
FEW = (0, 1, 23)
ROUNDING = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture
def filled():
    """Memory that torch allocates holds NaN, or the largest integer, until it is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(machine, module, is_ours=True, sizes=FEW, rounding=3e-6):
    kernels = CudaKernels(machine.launcher)
    given = {"kernels": kernels, "tensor": machine.tensor, "sizes": sizes, "rounding": rounding}
    check_same(module, is_ours, **given)


@pytest.mark.every(18)
@pytest.mark.parametrize(("module", "name"), decorated())
def test_experts_are_those_of_transformers(machine, filled, module, name):
    check(machine, experts_of(module, name), name not in CLAMPED)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("activation", "is_ours"),
    [
        *((name, True) for name in ("gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2")),
        *((name, False) for name in ("quick_gelu", "gelu_10", "tanh", "mish")),
    ],
)
def test_activations(machine, filled, activation, is_ours):
    check(machine, experts_of(*MIXTRAL, hidden_act=activation), is_ours)
    check(machine, experts_of(*NEMOTRON, mlp_hidden_act=activation), is_ours)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [MIXTRAL, NEMOTRON, GPT_OSS], ids=lambda it: it[1])
@pytest.mark.every(5)
def test_experts_in_16_bits(machine, filled, dtype, kind):
    """Few rows, and more than are in a tile of few."""
    check(machine, experts_of(*kind).to(dtype), sizes=(1, 23, 250), rounding=ROUNDING[dtype])


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [{"intermediate_size": 40}, {"intermediate_size": 33}])
def test_widths_of_any_number(machine, filled, dtype, sizes):
    check(machine, experts_of(*MIXTRAL, **sizes).to(dtype), rounding=ROUNDING[dtype])


def test_experts_of_no_rank_add_nothing(machine, filled):
    """transformers marks the experts of other ranks with a number after the last."""
    module = experts_of(*MIXTRAL)
    x, weights = torch.randn(5, 64), torch.rand(5, 2)
    chosen = torch.tensor([[0, 6], [6, 6], [5, 1], [6, 2], [3, 6]])
    expected = module(x, chosen.clamp(max=5), weights.where(chosen < 6, 0))
    given = [machine.tensor(it) for it in (x, chosen, weights)]
    found = ours(module, CudaKernels(machine.launcher), device=given[0].device)(*given)
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("count", [moe.MAX_EXPERTS, moe.MAX_EXPERTS + 1])
def test_more_experts_than_kernels_sort_are_left_to_transformers(machine, filled, count):
    small = {"num_local_experts": count, "intermediate_size": 8}
    module = experts_of(*MIXTRAL, **small)
    is_ours = count <= moe.MAX_EXPERTS
    given = {"kernels": CudaKernels(machine.launcher), "tensor": machine.tensor}
    check_same(module, is_ours, count, sizes=FEW, **given)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_experts_in_few_bits(machine, filled, kind):
    """Experts are not stored in 4 bits, which no kernel multiplies by."""
    module = experts_of(*GPT_OSS)
    x, chosen = torch.randn(40, 64), torch.rand(40, 6).topk(2).indices
    given = x, chosen, torch.rand(40, 2)
    expected = module(*given)
    own = [machine.tensor(it) for it in given]
    experts = ours(module, CudaKernels(machine.launcher), kind, own[0].device)
    error = (experts(*own).cpu() - expected).std() / expected.std()
    least, most = {"int8": (1e-3, 2e-2), "fp8": (1e-2, 0.1), "int4": (0, 1e-6)}[kind]
    assert least <= error < most


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str
)
def test_neighbors_change_no_bits(machine, filled, dtype):
    module = experts_of(*GPT_OSS).to(dtype)
    x, chosen = torch.randn(250, 64).to(dtype), torch.rand(250, 6).topk(2).indices
    given = [machine.tensor(it) for it in (x, chosen, torch.rand(250, 2))]
    experts = ours(module, CudaKernels(machine.launcher), device=given[0].device)
    together = experts(*given).cpu()
    assert torch.equal(experts(*given).cpu(), together)
    for rows in (slice(7, 8), slice(100, 140), slice(1, 250)):
        assert torch.equal(experts(*(it[rows] for it in given)).cpu(), together[rows])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MIXTRAL, NEMOTRON, GPT_OSS], ids=lambda it: it[1])
def test_experts_have_no_race(checked_machine, filled, kind):
    for dtype in (torch.float32, torch.bfloat16):
        check(checked_machine, experts_of(*kind).to(dtype), rounding=ROUNDING[dtype])
