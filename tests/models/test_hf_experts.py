"""The experts of networks that transformers computes: our matmuls, where we have their layout."""

from __future__ import annotations

from typing import Any

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
from hf_models import in_pieces, new_network, prompts, through_transformers
from torch import nn

from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.models.hf.experts import OwnExperts

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.every(9)
@pytest.mark.parametrize(("module", "name"), decorated())
def test_experts_are_those_of_transformers(module: str, name: str) -> None:
    check_same(experts_of(module, name), name not in CLAMPED)


@pytest.mark.parametrize(
    ("activation", "is_ours"),
    [
        *((name, True) for name in ("gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2")),
        *((name, False) for name in ("quick_gelu", "gelu_10", "tanh", "mish")),
    ],
)
def test_activations_are_recognized_by_their_results(activation: str, is_ours: bool) -> None:
    check_same(experts_of(*MIXTRAL, hidden_act=activation), is_ours)
    check_same(experts_of(*NEMOTRON, mlp_hidden_act=activation), is_ours)


@pytest.mark.parametrize("change", [{"limit": 6.0}, {"alpha": 1.5}, {"has_bias": False}])
def test_other_numbers_than_those_of_gpt_oss_are_left_to_transformers(change: Any) -> None:
    experts = experts_of(*GPT_OSS)
    vars(experts).update(change)
    check_same(experts, is_ours=False)


def test_a_gate_that_needs_the_width_of_its_layer_is_left_to_transformers() -> None:
    experts = experts_of(*MIXTRAL)
    scale = torch.rand(192)
    experts._apply_gate = lambda rows: (rows * scale)[:, :96]
    check_same(experts, is_ours=False)


@pytest.mark.parametrize("sizes", [{"intermediate_size": 40}, {"hidden_size": 80}])
def test_widths_that_share_panels_are_left_to_transformers(sizes: dict[str, int]) -> None:
    module = experts_of(*MIXTRAL, **sizes)
    assert ours(module) is module


@pytest.mark.parametrize(
    ("name", "shape"),
    [("gate_up_proj", (6, 190, 64)), ("down_proj", (6, 64, 95)), ("down_proj", (5, 64, 96))],
)
def test_shapes_that_contradict_each_other_are_left_to_transformers(
    name: str, shape: tuple[int, ...]
) -> None:
    module = experts_of(*MIXTRAL)
    setattr(module, name, nn.Parameter(torch.ones(shape)))
    assert ours(module) is module


def test_matrices_of_two_dtypes_are_left_to_transformers() -> None:
    module = experts_of(*MIXTRAL)
    module.down_proj.data = module.down_proj.data.bfloat16()
    assert ours(module) is module


def test_experts_of_no_rank_add_nothing() -> None:
    """transformers marks the experts of other ranks with a number after the last."""
    module = experts_of(*MIXTRAL)
    x, weights = torch.randn(5, 64), torch.rand(5, 2)
    chosen = torch.tensor([[0, 6], [6, 6], [5, 1], [6, 2], [3, 6]])
    expected = module(x, chosen.clamp(max=5), weights.where(chosen < 6, 0))
    torch.testing.assert_close(ours(module)(x, chosen, weights), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_in_16_bits(dtype: torch.dtype) -> None:
    module = experts_of(*GPT_OSS)
    x, chosen = torch.randn(40, 64), torch.rand(40, 6).topk(2).indices
    weights = torch.rand(40, 2)
    expected = module(x, chosen, weights)
    experts = ours(module.to(dtype))
    for own in (weights, weights.to(dtype)):  # some routers have weights in float32
        found = experts(x.to(dtype), chosen, own)
        assert found.dtype is dtype
        assert (found - expected).std() < 2 * torch.finfo(dtype).eps * expected.std()


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize(("kind", "largest"), [("int8", 0.08), ("int4", 0.5)])
def test_experts_are_stored_in_few_bits(name: str, kind: Any, largest: float) -> None:
    def model(stored: Any, **more: Any) -> Any:
        network = new_network(name, **more)
        return through_transformers(
            network, kind_of=lambda own: stored if own.endswith("experts") else None
        )

    exact, found = model(None), model(kind)
    packed = [it for it in found.network.modules() if isinstance(it, OwnExperts)]
    assert len(packed) == 4
    assert {id(it.experts.up) for it in packed} < {id(it) for it in found.matrices}
    assert all(isinstance(it.experts.up, Int4Matrix) == (kind == "int4") for it in packed)
    own, theirs = (in_pieces(it, prompts(20))[0] for it in (found, exact))
    assert 1e-3 < (own - theirs).std() / theirs.std() < largest
    assert found.nbytes < 0.8 * exact.nbytes


def test_progress_counts_experts() -> None:
    calls: list[tuple[int, int]] = []
    through_transformers(
        new_network("mixtral"), on_progress=lambda done, total: calls.append((done, total))
    )
    num_linears = 4 * 4 + 1
    assert calls == [(n, 4 + num_linears) for n in range(1, 4 + num_linears + 1)]
