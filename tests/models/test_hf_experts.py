"""The experts of networks that transformers computes: our matmuls, where we have their layout."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import in_pieces, new_network, prompts, through_transformers
from torch import nn

from gptmanager.kernels import CpuKernels
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.models.hf.experts import PackedExperts, replace_experts

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
_DECORATED = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.MULTILINE)
# Experts that clamp the values of SiLU, which we do not compute.
CLAMPED = {"DeepseekV4Experts", "Glm5NextTextExperts", "HYV4Experts"}


def decorated() -> list[tuple[str, str]]:
    """Return the module and the name of each class of experts in transformers."""
    folder = Path(transformers.__file__).parent / "models"
    return [
        (f"transformers.models.{path.parent.name}.{path.stem}", name)
        for path in sorted(folder.glob("*/modeling_*.py"))
        for name in _DECORATED.findall(path.read_text())
    ]


class AnyConfig:
    """A config with each field that a class of experts reads."""

    _experts_implementation = "eager"
    hidden_act = mlp_hidden_act = hidden_activation = "silu"
    hidden_size = moe_latent_size = 64
    swiglu_limit, swiglu_alpha = 7.0, 1.702

    def __init__(self, **changes: Any) -> None:
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> int:
        for part, size in (("intermediate", 96), ("ffn", 96), ("expert", 6)):
            if part in name:
                return size
        raise AttributeError(name)


def experts_of(module: str, name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    made = getattr(importlib.import_module(module), name)(AnyConfig(**changes))
    for parameter in made.requires_grad_(False).parameters():
        parameter.normal_(0, 0.3)
    return made


def check_same(module: Any, is_ours: bool = True, count: int = 6) -> None:
    """Compare experts with ours: for no token, few tokens, and more than a thread's share."""
    given = []
    for num_tokens in (0, 1, 23, 700):
        chosen = torch.rand(num_tokens, count).topk(2).indices
        given.append((2 * torch.randn(num_tokens, 64), chosen, torch.rand(num_tokens, 2)))
    expected = [module(*it) for it in given]
    network = nn.ModuleDict({"experts": module})
    matrices = replace_experts(network, CpuKernels(), lambda name: None)

    assert (type(network["experts"]) is PackedExperts) == is_ours == (len(matrices) == 2)
    for own, theirs in zip(given, expected, strict=True):
        rounding = 3e-6 * theirs.abs().amax().item() if len(theirs) else 0.0
        torch.testing.assert_close(network["experts"](*own), theirs, rtol=0, atol=rounding)


@pytest.mark.every(9)
@pytest.mark.parametrize(("module", "name"), decorated())
def test_experts_are_those_of_transformers(module: str, name: str) -> None:
    check_same(experts_of(module, name), name not in CLAMPED)


MIXTRAL = "transformers.models.mixtral.modeling_mixtral", "MixtralExperts"
NEMOTRON = "transformers.models.nemotron_h.modeling_nemotron_h", "NemotronHExperts"
GPT_OSS = "transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts"


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
    network = nn.ModuleDict({"experts": experts_of(*MIXTRAL, **sizes)})
    assert replace_experts(network, CpuKernels(), lambda name: None) == []


def test_experts_of_no_rank_add_nothing() -> None:
    """transformers marks the experts of other ranks with a number after the last."""
    module = experts_of(*MIXTRAL)
    x, weights = torch.randn(5, 64), torch.rand(5, 2)
    chosen = torch.tensor([[0, 6], [6, 6], [5, 1], [6, 2], [3, 6]])
    expected = module(x, chosen.clamp(max=5), weights.where(chosen < 6, 0))
    network = nn.ModuleDict({"experts": module})
    replace_experts(network, CpuKernels(), lambda name: None)
    torch.testing.assert_close(network["experts"](x, chosen, weights), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_in_16_bits(dtype: torch.dtype) -> None:
    module = experts_of(*GPT_OSS)
    x, chosen = torch.randn(40, 64), torch.rand(40, 6).topk(2).indices
    weights = torch.rand(40, 2)
    expected = module(x, chosen, weights)
    network = nn.ModuleDict({"experts": module.to(dtype)})
    replace_experts(network, CpuKernels(), lambda name: None)
    for own in (weights, weights.to(dtype)):  # some routers have weights in float32
        found = network["experts"](x.to(dtype), chosen, own)
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
    packed = [it for it in found.network.modules() if isinstance(it, PackedExperts)]
    assert len(packed) == 4
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
