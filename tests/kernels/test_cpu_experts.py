"""The experts of a layer as one task: those of one matmul after another; and their choice."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch

from gptmanager.kernels import CpuKernels, compiled_bodies
from gptmanager.kernels.experts import routing_loops
from gptmanager.kernels.experts.mixture import ExpertMatrices, mix_experts
from gptmanager.kernels.experts.routing import Routing, choose_experts
from gptmanager.kernels.gemm.packed_matrix import Quantized
from gptmanager.kernels.recurrent import convolution_loops, delta_loops, state_space_loops

HIDDEN, WIDTH, COUNT = 128, 96, 16
ROUTING = Routing(4, renormalize=True)


def experts_of(
    kernels: CpuKernels, dtype: torch.dtype, quantized: Quantized | None, plain: bool, own: range
) -> ExpertMatrices:
    """Return experts: SiLU without biases if `plain`, else ReLU^2 with biases and without gates."""

    def matrix(rows: int, columns: int):
        made = kernels.new_matrix(rows, columns, dtype, quantized)
        if made is None:
            pytest.skip("weights are not packed on this processor")
        made.copy_(torch.randn(rows, columns) / 10)
        return made

    width = 2 * WIDTH if plain else WIDTH
    up, down = matrix(len(own) * width, HIDDEN), matrix(len(own) * HIDDEN, WIDTH)
    biases = [None, None] if plain else [torch.randn(len(it)).to(dtype) for it in (up, down)]
    activation = ("silu", True) if plain else ("relu2", False)
    return ExpertMatrices(up, biases[0], down, biases[1], *activation, own.start, len(own))


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        ([], set()),
        (["delta"], {it.__name__ for it in delta_loops.BODIES}),
        (["short"], {it.__name__ for it in convolution_loops.BODIES}),
        (["space"], {it.__name__ for it in state_space_loops.BODIES}),
        (["experts"], {"multiply_group", *(it.__name__ for it in routing_loops.BODIES)}),
        (["latents"], {"multiply_heads"}),
    ],
)
def test_what_layers_need_is_compiled_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, kinds: Collection[str], names: set[str]
) -> None:
    compiled: list[set[str]] = []
    monkeypatch.setattr(
        *(compiled_bodies, "compile_all"),
        lambda bodies: compiled.append({it.__name__ for it in bodies}),
    )
    CpuKernels().warm_up_layers(kinds)
    assert compiled == [names]


def test_the_factors_are_those_of_the_chosen_experts() -> None:
    none = torch.empty(0)
    factors = torch.tensor([2.0, 3.0, 5.0])
    experts = ExpertMatrices(none, None, none, None, "silu", True, 0, 3, factors)
    chosen, weights = torch.tensor([[2, 0]]), torch.tensor([[0.5, 0.25]])
    x, numbers, found = experts.prepared(torch.ones(1, 4), Routing(2), chosen, weights)
    assert (x.tolist(), numbers.tolist(), found.tolist()) == ([[1.0] * 4], [[2, 0]], [[2.5, 0.5]])


@pytest.mark.parametrize("quantized", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.every(5)
def test_they_are_those_of_one_expert_after_another(
    deterministic: bool, dtype: torch.dtype, quantized: Quantized | None
) -> None:
    kernels = CpuKernels(deterministic=deterministic)
    torch.manual_seed(1)
    for plain, own in ((True, range(COUNT)), (False, range(COUNT)), (True, range(4, 12))):
        experts = experts_of(kernels, dtype, quantized, plain, own)
        for num_tokens in (1, 3, 40, 900):
            x = torch.randn(num_tokens, HIDDEN).to(dtype)
            logits = torch.randn(num_tokens, COUNT)
            logits[:, 5] = 9.0  # more rows than a chunk has, in one expert
            chosen, weights = choose_experts(logits, ROUTING, None)
            alone = x.repeat_interleave(4, 0), chosen.view(-1, 1), torch.ones(4 * len(x), 1)
            outputs = mix_experts(kernels, *alone, experts).view(*chosen.shape, -1).float()
            expected = (outputs * weights.unsqueeze(-1)).sum(1)
            mixed = kernels.experts(x, logits, None, ROUTING, experts).float()
            eps = torch.finfo(dtype).eps
            assert torch.allclose(mixed, expected, rtol=2 * eps, atol=4e-7 * outputs.abs().max())


@pytest.mark.parametrize("quantized", [None, "int8", "int4"])
def test_deterministic_ones_give_a_token_its_bits_next_to_any_others(
    quantized: Quantized | None,
) -> None:
    kernels = CpuKernels(deterministic=True)
    torch.manual_seed(3)
    experts = experts_of(kernels, torch.float32, quantized, True, range(COUNT))
    x, logits = torch.randn(70, HIDDEN), torch.randn(70, COUNT)
    logits[:, 5] = 9.0  # an expert with the rows of all tokens
    together = kernels.experts(x, logits, None, ROUTING, experts)
    for num_tokens in (1, 4, 5, 9, 17):
        own = slice(num_tokens)
        alone = kernels.experts(x[own], logits[own], None, ROUTING, experts)
        assert torch.equal(alone, together[own])


ROUTINGS = [
    Routing(3, "softmax"),
    Routing(3, "softmax", renormalize=True, factor=1.5),
    Routing(2, "sigmoid", renormalize=True, sum_eps=0.5),
    Routing(4, "softmax_of_best"),
    Routing(1, "sigmoid_of_best", scales_inputs=True),
    Routing(4, "sigmoid", groups=6, top_groups=2, factor=2.5),
    Routing(3, "softmax", groups=4, top_groups=1, group_score="best"),
    Routing(24, "softmax"),
    Routing(20, "softmax_of_best", factor=0.5),
]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_tokens", [7, 700])  # in one thread, and shared
def test_the_choice_is_that_of_torch(routing: Routing, num_tokens: int) -> None:
    kernels, count = CpuKernels(), 24
    torch.manual_seed(2)
    experts = experts_of(kernels, torch.float32, None, True, range(count))
    x = torch.randn(num_tokens, HIDDEN)
    for correction in (None, torch.randn(count) / 3):
        logits = 2 * torch.randn(num_tokens, count)
        logits[::2] = logits[::2].round()  # with equal scores
        logits[1, 5] = torch.nan  # chosen first, so that the output shows it
        chosen, weights = choose_experts(logits, routing, correction)
        routed = kernels._route(x, logits, correction, routing, experts, ((0, 1 << 62),))
        found, places, memory = routed.memory[: 3 * chosen.numel()].view(3, -1)
        assert torch.equal(found.view_as(chosen), chosen)
        order = chosen.flatten().argsort(stable=True)
        assert torch.equal(places.argsort(), order)
        rows = x.repeat_interleave(routing.per_token, 0)
        if routing.scales_inputs:
            assert not routed.weights
            rows = rows * weights.view(-1, 1)
        else:
            own = memory.view(torch.float32)[: len(places)].view_as(weights)
            assert torch.allclose(own, weights, rtol=2e-6, equal_nan=True)
        assert torch.allclose(routed.rows, rows[order], rtol=2e-6, equal_nan=True)


def test_logits_without_an_order_choose_experts_that_exist() -> None:
    kernels = CpuKernels()
    experts = experts_of(kernels, torch.float32, None, True, range(COUNT))
    for value in (torch.nan, torch.inf, -torch.inf):
        logits = torch.zeros(3, COUNT)
        logits[1] = value
        mixed = kernels.experts(torch.ones(3, HIDDEN), logits, None, ROUTING, experts)
        assert mixed[1].isnan().all()
        assert torch.equal(mixed[0], mixed[2]) and mixed[0].isfinite().all()


def test_a_rank_without_any_of_the_chosen_experts_adds_nothing() -> None:
    kernels = CpuKernels()
    experts = experts_of(kernels, torch.float32, None, True, range(8, 16))
    logits = torch.zeros(2, COUNT)
    logits[:, :4] = 1.0
    mixed = kernels.experts(torch.randn(2, HIDDEN), logits, None, ROUTING, experts)
    assert torch.equal(mixed, torch.zeros(2, HIDDEN))
