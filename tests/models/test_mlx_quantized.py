"""Folders that MLX has quantized: the logits of transformers on the same numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from checkpoints import PagedDriver, exact_logits, in_float64
from family_runs import tokens
from mlx_folders import dequantize, quantize, quantized_folders
from rank_threads import World
from safetensors.torch import load_file, save_file

from gptmanager.errors import ConfigError
from gptmanager.kernels import CpuKernels, Kernels
from gptmanager.kernels.gemm import matmul_plan
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.memory.checkpoint.tensor_sources import StateDict
from gptmanager.models import load_model
from gptmanager.models.checkpoint_parts import as_floats, is_quantized

transformers = pytest.importorskip("transformers", reason="compares with transformers")
DENSE = ["llama", "qwen3", "gemma3_text", "smollm3 tied", "phi3"]
MIXTURES = ["mixtral", "qwen3_moe", "glm4_moe"]
SEQUENCE = tokens(30, 4)


@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
@pytest.mark.every(4)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    packed, floats = quantized_folders(name, tmp_path)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(floats, **eager)
    exact = exact_logits(in_float64(theirs.float().eval()), SEQUENCE)
    assert is_quantized(packed) and not is_quantized(floats)

    def logits(collectives=None, kernels=None, **options):
        model = load_model(
            packed, collectives=collectives, kernels=kernels, dtype="float32", **options
        )
        return PagedDriver(model, 1).forward([(0, SEQUENCE)])

    for found in (logits(), logits(kernels=Kernels()), World(2, 1).run(logits)[0]):
        assert (found - exact).abs().max() < 2e-4 * exact.std()


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["mixtral", "qwen2"])
def test_matrices_in_4_bits_keep_the_numbers_of_the_file(name: str, tmp_path: Path) -> None:
    packed, floats = quantized_folders(name, tmp_path)
    kept = load_model(packed, weights_dtype="file", kernels=CpuKernels(deterministic=True))
    exact = load_model(floats, kernels=Kernels())
    in_4_bits = {it for it in kept.weights if isinstance(kept.weights[it], Int4Matrix)}

    assert len(in_4_bits) > 4
    assert name != "mixtral" or any("experts_down" in it for it in in_4_bits)
    for it in in_4_bits:
        assert torch.equal(kept.weights[it].unpacked(), exact.weights.tensor(it))


@pytest.mark.parametrize("is_packed", [True, False])
def test_experts_in_one_tensor_may_be_cut_for_ranks(
    is_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has half of the experts, or half of the columns of each matrix."""
    # some processors do not pack matrices in 4 bits: they become floats
    monkeypatch.setattr(matmul_plan, "HAS_FLOAT16", is_packed and matmul_plan.HAS_FLOAT16)
    packed, floats = quantized_folders("mixtral", tmp_path)

    def logits(collectives=None, folder=packed):
        kernels = CpuKernels(deterministic=True)
        model = load_model(folder, collectives=collectives, kernels=kernels, weights_dtype="int4")
        return PagedDriver(model, 1).forward([(0, SEQUENCE)])

    one, two = logits(), World(2, 1).run(logits)[0]
    assert (one - two).abs().max() < 1e-4 * one.std()


def test_the_text_model_of_a_wrapper_has_its_modules_options(tmp_path: Path) -> None:
    packed, _ = quantized_folders("mistral", tmp_path)
    config = json.loads((packed / "config.json").read_text())
    tensors = load_file(packed / "model.safetensors")
    own = {key: config.pop(key) for key in ("quantization", "quantization_config")}
    options = {
        f"language_model.{it}" if isinstance(value, dict) else it: value
        for it, value in own["quantization"].items()
    }
    wrapped = {"model_type": "mistral3", "text_config": config, "quantization": options}
    options["vision_tower.patch"] = {"bits": 8, "group_size": 64}
    media = {f"vision_tower.patch.{k}": v for k, v in quantize(torch.ones(4, 64), 8, 64).items()}
    inner = {f"language_model.{key}": it for key, it in tensors.items()}
    plain, found = (
        load_model(it, kernels=Kernels())
        for it in ((config | own, tensors), (wrapped, inner | media))
    )
    for it in plain.weights:
        assert torch.equal(plain.weights.tensor(it), found.weights.tensor(it))


def test_a_family_that_mlx_stores_in_another_way_is_refused(tmp_path: Path) -> None:
    packed, _ = quantized_folders("gpt2", tmp_path)
    tensors = load_file(packed / "model.safetensors")
    config = (packed / "config.json").read_text()
    (packed / "config.json").write_text(config.replace('"transformer.', '"model.'))
    renamed = {re.sub("^transformer", "model", key): it for key, it in tensors.items()}
    save_file(renamed, packed / "model.safetensors", {"format": "mlx"})
    with pytest.raises(ConfigError, match="MLX has written these files, and stores this family"):
        load_model(packed, kernels=Kernels())


def test_a_tensor_that_is_not_a_matrix_is_named_as_what_it_is(tmp_path: Path) -> None:
    packed, _ = quantized_folders("llama", tmp_path)
    config = json.loads((packed / "config.json").read_text())
    tensors = load_file(packed / "model.safetensors")
    norm = "model.norm.weight"
    with pytest.raises(ConfigError, match=f"{norm} has dtype uint8"):
        load_model((config, {**tensors, norm: tensors[norm].to(torch.uint8)}))
    for broken in (torch.zeros(64), torch.zeros((), dtype=torch.int32)):
        key = "model.layers.0.mlp.up_proj.weight"
        with pytest.raises(ConfigError, match=f"{key} is .*: it must be"):
            load_model((config, {**tensors, key: broken}))


@pytest.mark.parametrize("bits", [2, 8])
def test_a_module_with_bits_that_the_config_does_not_name_is_refused(
    bits: int, tmp_path: Path
) -> None:
    packed, _ = quantized_folders("llama", tmp_path)
    name, state = "model.layers.1.mlp.up_proj", load_file(packed / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    config["quantization"].pop(name, None)
    del config["quantization_config"]
    matrix = torch.randn(state[f"{name}.scales"].shape[0], 64)
    state |= {f"{name}.{it}": own for it, own in quantize(matrix, bits, 32).items()}
    rows = len(matrix)
    wanted = (
        f"quantization.{name} = {{'bits': 4, 'group_size': 32}}: but tensor {name}.weight is "
        f"[{rows}, {2 * bits}] with scales [{rows}, 2], so this module must have {bits} bits"
    )
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        as_floats(config, StateDict(state))


def test_an_empty_group_stays_in_4_bits() -> None:
    """The scale of a group of zeros is 1e-7, which float16 rounds to its smallest numbers."""
    matrix = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    matrix[3:] = 0
    packed = quantize(matrix, 4, 32)
    assert packed["scales"][3, 0] < 2e-7
    source = as_floats(
        {"quantization": {"bits": 4, "group_size": 32}},
        StateDict({f"a.{key}": it for key, it in packed.items()}),
    )
    assert source.describe()["a.weight"].groups
    [(_, groups)] = source.groups("a.weight", 1 << 20, range(8))
    assert torch.equal(groups.floats(), dequantize(packed, 4, 32))


@pytest.mark.parametrize(("ending", "number"), [("scales", 1e5), ("biases", -1e5)])
def test_numbers_that_float16_cannot_hold_become_8_bits(ending: str, number: float) -> None:
    packed = quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)), 4, 32)
    packed[ending][2, 1] = number
    source = as_floats(
        {"quantization": {"bits": 4, "group_size": 32}},
        StateDict({f"a.{key}": it for key, it in packed.items()}),
    )
    assert not source.describe()["a.weight"].groups
    [(_, floats)] = source.pieces("a.weight", 1 << 20)
    assert torch.equal(floats, dequantize(packed, 4, 32))
