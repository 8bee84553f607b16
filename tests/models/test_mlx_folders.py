"""Folders of mlx_lm.convert: floats, in a layout that differs for some families."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from checkpoints import PagedDriver
from family_runs import expected, family_folder, tokens
from mlx_folders import mlx_folder
from rank_threads import World
from safetensors.torch import load_file, save_file

from gptmanager.errors import ConfigError
from gptmanager.kernels import Kernels
from gptmanager.memory.weights import Weights
from gptmanager.models import load_model
from gptmanager.models.conversion import convert_checkpoint

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
# (family, the module that MLX writes in another way)
CHANGED = [
    ("deepseek_v3", r"self_attn\.embed_q"),
    ("qwen3_next", r"mlp\.switch_mlp\.up_proj"),
    ("qwen3_5_text", "conv1d"),
    ("qwen3_5_moe_text", r"mlp\.switch_mlp\.up_proj"),
    ("llama4_text", r"experts\.gate_proj\.weight"),
    ("gemma4_text experts", r"experts\.switch_glu\.up_proj"),
    ("granitemoe", r"block_sparse_moe\.switch_mlp\.up_proj"),
    ("granitemoehybrid attention", r"mlp\.gate_proj"),
    ("granitemoehybrid", "conv1d"),
    ("lfm2", r"conv\.conv"),
    ("nemotron_h", r"mixer\.switch_mlp\.fc1"),
    ("lfm2_moe", r"feed_forward\.switch_mlp\.up_proj"),
]


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


@pytest.mark.parametrize(("name", "module"), CHANGED)
@pytest.mark.every(2)
def test_tensors_that_mlx_changes_are_read(name: str, module: str, tmp_path: Path) -> None:
    folder = mlx_folder(name, tmp_path / "mlx")
    assert any(re.search(module, key) for key in load_file(folder / "model.safetensors"))
    ours, theirs = (load_model(it, kernels=Kernels()) for it in (family_folder(name), folder))
    assert_equal(ours.weights, theirs.weights)

    converted = convert_checkpoint(folder, tmp_path / "converted")
    assert_equal(load_model(converted, kernels=Kernels()).weights, theirs.weights)


def assert_equal(ours: Weights, theirs: Weights) -> None:
    """Norms that MLX has changed are rounded in float32."""
    for key in ours:
        pair = ours.tensor(key), theirs.tensor(key)
        assert torch.equal(*pair) or "norm" in key and (pair[0] - pair[1]).abs().max() < 1e-6


def test_the_numbers_of_norms_in_bfloat16_are_kept(tmp_path: Path) -> None:
    """MLX adds 1 in bfloat16, which is exact for a number that is at least 1 after it."""
    name = "qwen3_5_text"
    state = load_file(family_folder(name) / "model.safetensors")
    norm = "model.layers.0.input_layernorm.weight"
    state[norm] = torch.linspace(-0.99, 2, len(state[norm])).bfloat16()
    config = json.loads((family_folder(name) / "config.json").read_text())
    theirs = {key: it.movedim(2, 1) if "conv1d" in key else it for key, it in state.items()}
    theirs[norm] = state[norm] + 1
    ours, found = (
        load_model((config, it), kernels=Kernels(), dtype="bfloat16").weights.tensor(
            "layers.0.attention_norm.weight"
        )
        for it in (state, theirs)
    )
    assert torch.equal((found.float() + 1).bfloat16(), (ours.float() + 1).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
def test_norms_that_are_not_floats_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = mlx_folder("qwen3_5_text", tmp_path)
    state, name = load_file(folder / "model.safetensors"), "model.layers.0.input_layernorm.weight"
    save_file({**state, name: state[name].to(dtype)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name} has dtype"):
        load_model(folder, kernels=Kernels())


def test_a_correction_that_mlx_leaves_out_is_zero(tmp_path: Path) -> None:
    name, correction = "ernie4_5_moe", "moe_statics.e_score_correction_bias"
    state = load_file(family_folder(name) / "model.safetensors")
    assert any(key.endswith(correction) and it.any() for key, it in state.items())
    config = json.loads((family_folder(name) / "config.json").read_text())
    zeroed = {key: it * 0 if key.endswith(correction) else it for key, it in state.items()}
    ours = load_model((config, zeroed), kernels=Kernels()).weights
    theirs = load_model(mlx_folder(name, tmp_path), kernels=Kernels()).weights
    assert_equal(ours, theirs)

    others = {key: it for key, it in state.items() if not key.endswith(correction)}
    with pytest.raises(ConfigError, match=f"tensors are missing: .*{correction}"):
        load_model((config, others), kernels=Kernels())


def test_only_one_of_the_matrices_of_latents_is_not_enough(tmp_path: Path) -> None:
    folder = mlx_folder("deepseek_v3", tmp_path)
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.self_attn.unembed_out.weight"]
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match="are missing: model.layers.1.self_attn.unembed_out"):
        load_model((config, state), kernels=Kernels())


def test_a_family_that_mlx_stores_in_another_way_is_refused(tmp_path: Path) -> None:
    text = "tensors are unknown: model.h.0.attn.c_attn.bias.*. MLX has written these files, and"
    with pytest.raises(ConfigError, match=text):
        load_model(mlx_folder("gpt2", tmp_path), kernels=Kernels())
