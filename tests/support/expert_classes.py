"""Classes of experts in transformers, and one comparison with ours for CPUs and devices."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gptmanager.kernels import CpuKernels, Kernels
from gptmanager.models.hf.experts import OwnExperts, replace_experts

_DECORATED = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.MULTILINE)
# experts that clamp the values of SiLU, which we do not compute
CLAMPED = {"DeepseekV4Experts", "Glm5NextTextExperts", "HYV4Experts"}


def decorated() -> list[tuple[str, str]]:
    """Return the module and the name of each class of experts in transformers."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return []
    folder = Path(found.origin).parent / "models"
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


MIXTRAL = "transformers.models.mixtral.modeling_mixtral", "MixtralExperts"
NEMOTRON = "transformers.models.nemotron_h.modeling_nemotron_h", "NemotronHExperts"
GPT_OSS = "transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts"


def ours(
    module: nn.Module,
    kernels: Kernels | None = None,
    kind: Any = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """What computes the experts of `module` with these kernels, by default those of the CPU."""
    network = nn.ModuleDict({"experts": module})
    replace_experts(network, kernels or CpuKernels(), lambda name: kind, device=device)
    return network["experts"]


def check_same(
    module: Any,
    is_ours: bool = True,
    count: int = 6,
    *,
    kernels: Kernels | None = None,
    tensor: Callable[[Tensor], Tensor] = lambda own: own,
    sizes: Sequence[int] = (0, 1, 23, 700),
    rounding: float = 3e-6,
) -> None:
    """Compare experts with ours: for no token, few tokens, and more than a thread's share.

    `tensor` moves a tensor to the device of the kernels. Results differ by `rounding`, relative to
    the largest one.
    """
    given, wide = [], copy.deepcopy(module).float()
    for num_tokens in sizes:
        chosen = torch.rand(num_tokens, count).topk(2).indices
        given.append((2 * torch.randn(num_tokens, 64), chosen, torch.rand(num_tokens, 2)))
    dtype = module.down_proj.dtype
    given = [(x.to(dtype), chosen, weights) for x, chosen, weights in given]
    expected = [wide(x.float(), *others) for x, *others in given]
    found = ours(module, kernels, device=tensor(torch.zeros(1)).device)

    assert (type(found) is OwnExperts) == is_ours
    if not is_ours:
        assert found is module
        return
    for own, theirs in zip(given, expected, strict=True):
        result = found(*map(tensor, own))
        assert result.dtype is dtype
        most = rounding * theirs.abs().max().item() if len(theirs) else 0.0
        torch.testing.assert_close(result.cpu().float(), theirs, rtol=0, atol=most)
