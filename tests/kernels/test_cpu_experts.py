"""The experts of a layer as one task: bit for bit those of one matmul after another."""

from __future__ import annotations

import pytest
import torch

from gptmanager.kernels import CpuKernels
from gptmanager.kernels.experts.mixture import ExpertMatrices, mix_experts
from gptmanager.kernels.experts.routing import Routing, choose_experts
from gptmanager.kernels.gemm.packed_matrix import Quantized

HIDDEN, WIDTH, COUNT = 128, 96, 16
ROUTING = Routing(4, renormalize=True)


def experts_of(
    kernels: CpuKernels, dtype: torch.dtype, quantized: Quantized | None, plain: bool, own: range
) -> ExpertMatrices:
    """Of SiLU without biases if `plain`, else of ReLU^2 without gates and with biases."""

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


@pytest.mark.parametrize("quantized", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_they_have_the_bits_of_one_expert_after_another(
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
            expected = mix_experts(kernels, x, chosen, weights, experts)
            assert torch.equal(kernels.experts(x, logits, None, ROUTING, experts), expected)


def test_a_rank_without_any_of_the_chosen_experts_adds_nothing() -> None:
    kernels = CpuKernels()
    experts = experts_of(kernels, torch.float32, None, True, range(8, 16))
    logits = torch.zeros(2, COUNT)
    logits[:, :4] = 1.0
    mixed = kernels.experts(torch.randn(2, HIDDEN), logits, None, ROUTING, experts)
    assert torch.equal(mixed, torch.zeros(2, HIDDEN))
