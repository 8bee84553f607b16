"""Folders of mlx_lm.convert: floats, in a layout that differs for some families."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import PagedDriver
from family_runs import expected, family_folder, tokens
from rank_threads import World
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptmanager.errors import ConfigError
from gptmanager.kernels import Kernels
from gptmanager.models import load_model

SAME = [
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "cohere", "stablelm", "starcoder2"),
    *("gemma", "gemma2", "gemma3_text", "smollm3 tied"),
]
MIXTURES = [
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "minimax_m2", "deepseek_v2"),
]
CHANGED = {
    "qwen3_next": "tensors are unknown: model.layers.0.mlp.switch_mlp.down_proj.weight",
    "qwen3_5_text": r"linear_attn.conv1d.weight has shape \[128, 4, 1\]",
    "gpt2": "tensors are unknown: model.h.0.attn.c_attn.bias",
}
_PLUS_ONE = ("layernorm.weight", "model.norm.weight", ".q_norm.weight", ".k_norm.weight")
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def mlx_folder(name: str, target: Path) -> Path:
    """Write the checkpoint of a family as MLX does."""
    source = family_folder(name)
    config = json.loads((source / "config.json").read_text())
    state = load_file(source / "model.safetensors")
    if config.get("tie_word_embeddings"):
        state.pop("lm_head.weight", None)
    if name == "gpt2":
        matrices = re.compile(r"h\.\d+\..*c_\w+\.weight")
        state = {key.removeprefix("transformer."): it for key, it in state.items()}
        state = {k: it.T if matrices.fullmatch(k) else it for k, it in state.items()}
        state = {f"model.{key}": it for key, it in state.items()}
    if any("conv1d" in key for key in state):
        state = {k: it + 1 if k.endswith(_PLUS_ONE) else it for k, it in state.items()}
        state = {k: it.movedim(2, 1) if "conv1d" in k else it for k, it in state.items()}
    save_file(
        {key: it.contiguous() for key, it in _stacked(state).items()},
        target / "model.safetensors",
        {"format": "mlx"},
    )
    shutil.copy(source / "config.json", target)
    return target


def _stacked(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join the experts of a layer under the name that MLX gives them."""
    found: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for key, tensor in state.items():
        match = re.fullmatch(r"(.*)\.experts\.\d+\.(\w+)\.weight", key)
        if match is None:
            found[key] = tensor
        else:
            own = f"{match[1]}.switch_mlp.{_MIXTRAL.get(match[2], match[2])}.weight"
            experts.setdefault(own, []).append(tensor)
    return found | {key: torch.stack(tensors) for key, tensors in experts.items()}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.every(4)
def test_a_family_with_the_same_tensors_is_read(name: str, tmp_path: Path) -> None:
    folder = mlx_folder(name, tmp_path)
    ours, theirs = (load_model(it, kernels=Kernels()) for it in (family_folder(name), folder))
    for key in ours.weights:
        assert torch.equal(ours.weights.tensor(key), theirs.weights.tensor(key))


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.every(3)
def test_experts_that_mlx_stacks_are_read(name: str, tmp_path: Path) -> None:
    folder = mlx_folder(name, tmp_path)
    assert any("switch_mlp.gate_proj" in key for key in load_file(folder / "model.safetensors"))
    sequence = tokens(30, 4)
    exact = expected(name, sequence)

    def logits(collectives=None):
        model = load_model(folder, collectives=collectives)
        return PagedDriver(model, 1).forward([(0, sequence)])

    for found in (logits(), World(2, 1).run(logits)[0]):
        assert (found - exact).abs().max() < 2e-4 * exact.std()


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.every(2)
def test_a_family_that_mlx_stores_in_another_way_is_refused(name: str, tmp_path: Path) -> None:
    text = f"{CHANGED[name]}.*. MLX has written these files, and stores this family in another way"
    with pytest.raises(ConfigError, match=text):
        load_model(mlx_folder(name, tmp_path), kernels=Kernels())
