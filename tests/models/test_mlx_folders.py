"""Folders of mlx_lm.convert: floats, in a layout that differs for some families."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from checkpoints import PagedDriver
from family_runs import expected, family_folder, tokens
from mlx_folders import mlx_folder
from rank_threads import World
from safetensors.torch import load_file

from gptmanager.errors import ConfigError
from gptmanager.kernels import Kernels
from gptmanager.models import load_model

SAME = [
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "cohere", "stablelm", "starcoder2"),
    *("gemma", "gemma2", "gemma3_text", "smollm3 tied"),
]
MIXTURES = [
    *(
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "olmoe",
        "glm4_moe",
        "minimax_m2",
        "deepseek_v2",
        "dots1",
        "gpt_oss",
    ),
]
CHANGED = {
    "qwen3_next": "tensors are unknown: model.layers.0.mlp.switch_mlp.down_proj.weight",
    "qwen3_5_text": r"linear_attn.conv1d.weight has shape \[128, 4, 1\]",
    "gpt2": "tensors are unknown: model.h.0.attn.c_attn.bias",
}


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
    assert any(
        re.search(r"(switch_mlp|experts)\.gate_proj", key)
        for key in load_file(folder / "model.safetensors")
    )
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
