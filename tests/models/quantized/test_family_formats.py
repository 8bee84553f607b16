"""Matrices of every family have the numbers of every format. The pages list the formats."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from family_configs import FAMILY_CONFIGS, VARIANTS
from family_formats import FORMATS, packed_checkpoint
from family_runs import family_folder
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptmanager.errors import ConfigError
from gptmanager.kernels import CpuKernels, Kernels
from gptmanager.kernels.gemm.packed_matrix import PackedMatrix
from gptmanager.memory.checkpoint.tensor_sources import StateDict
from gptmanager.models import load_model
from gptmanager.models.checkpoint_parts import as_floats, is_quantized
from gptmanager.models.conversion import convert_checkpoint
from gptmanager.models.decoder.network import CheckpointModel
from gptmanager.models.families import FAMILIES
from gptmanager.models.gguf.architectures import ARCHITECTURES
from gptmanager.models.gguf.architectures import VARIANTS as GGUF_VARIANTS

DOCS = Path(__file__).parents[3] / "docs"
# Files of these families have the architecture of another family.
OF_OTHERS = {
    "mistral": ["llama"],
    "granitemoehybrid": ["granite", "granitehybrid"],
    "qwen3_vl_moe_text": ["qwen3vlmoe"],
    "solar_open": ["glm4moe"],
    "glm4_moe_lite": ["deepseek2"],
    "youtu": ["deepseek2"],
    "internlm3": ["llama"],
}
WITHOUT_MLX = (
    "bamba",
    "hyperclovax",
    "nanochat",
    "gpt2",
    "gpt_neox",
    "gptj",
    "falcon",
    "granitemoeshared",
)  # refused, or unknown to MLX
CASES = [
    (name, format_)
    for name in [*FAMILY_CONFIGS, *VARIANTS]
    for format_ in FORMATS
    if format_ != "MLX" or not name.startswith(WITHOUT_MLX)
]


def error_of(found: Tensor, exact: Tensor) -> float:
    """The largest error of an element, of the greatest magnitude of its row."""
    return (
        ((found - exact).abs() / exact.abs().amax(-1, keepdim=True).clamp(min=1e-30)).max().item()
    )


@pytest.mark.parametrize(("name", "format_"), CASES)
@pytest.mark.every(150)
def test_a_packed_family_has_the_numbers_of_its_floats(
    name: str, format_: str, tmp_path: Path
) -> None:
    packed, floats, count = packed_checkpoint(name, format_, tmp_path)
    exact = load_model(floats, kernels=Kernels(), dtype="float32").weights
    ours = load_model(packed, kernels=Kernels(), dtype="float32").weights
    kernels = CpuKernels(deterministic=True)
    kept = load_model(packed, kernels=kernels, dtype="float32", weights_dtype="file").weights

    assert count >= 7
    for key in exact:
        assert torch.equal(ours.tensor(key), exact.tensor(key)), key
        matrix = kept[key]
        if isinstance(matrix, PackedMatrix):  # half a step of 8 bits, which has one scale for a row
            assert error_of(matrix.unpacked(), exact.tensor(key)) < 0.51 / 127, key


def test_experts_in_one_tensor_may_be_8_bit_floats(tmp_path: Path) -> None:
    """transformers 5 packs them so; some have a scale for each expert, others for each block."""
    (config, state), (plain, floats), _ = packed_checkpoint("gemma4_text experts", "fp8", tmp_path)
    state, floats = dict(state), dict(floats)
    for layer, kind in itertools.product(range(4), ("gate_up", "down")):
        module = f"model.layers.{layer}.experts"
        names = ("gate", "up") if kind == "gate_up" else ("down",)
        found = []
        for number in range(4):
            own = [f"{module}.{number}.{name}_proj.weight" for name in names]
            for name in own:
                state.pop(name)
                state.pop(f"{name}_scale_inv", None)
            found.append(_fp8_of(torch.cat([floats.pop(name) for name in own]), layer == 0))
        name = f"{module}.{kind}_proj"
        floats[name] = torch.stack([it[2] for it in found])
        state[name], state[f"{name}_scale_inv"] = (
            torch.stack([i[n] for i in found]) for n in (0, 1)
        )
    ours, exact = (load_model(it, dtype="float32") for it in ((config, state), (plain, floats)))
    assert all(torch.equal(of(ours, key), of(exact, key)) for key in exact.weights)
    kept = load_model((config, state), dtype="float32", weights_dtype="file").weights
    matrix = kept["layers.1.experts_down.weight"]
    assert isinstance(matrix, PackedMatrix)
    assert error_of(matrix.unpacked(), of(exact, "layers.1.experts_down.weight")) < 0.51 / 127

    scales = "model.layers.1.experts.down_proj_scale_inv"
    with pytest.raises(ConfigError, match=f"{scales} is missing: a quantized matrix needs it"):
        load_model((config, {key: it for key, it in state.items() if key != scales}))
    for wrong in (state[scales][:3], state[scales][0], state[scales].repeat(1, 2, 1)):
        with pytest.raises(ConfigError, match=f"{scales} has shape"):
            load_model((config, {**state, scales: wrong}))


def nvfp4_experts(matrices: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of experts as ModelOpt packs them by their endings, and their floats."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    largest = matrices.abs().max() / (6 * 448)
    groups = matrices.unflatten(1, (-1, 16))
    scales = (groups.abs().amax(2) / 6 / largest).to(torch.float8_e4m3fn)
    wide = scales.float() * largest
    codes = ((groups.abs() / wide[:, :, None])[..., None] - values).abs().argmin(-1)
    floats = values[codes] * groups.sign() * wide[:, :, None]
    codes = (codes + 8 * (groups < 0)).flatten(1, 2).to(torch.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    tensors = {"": packed, "_weight_scale": scales, "_weight_scale_2": largest}
    return tensors, floats.flatten(1, 2)


@pytest.mark.parametrize("method", ["modelopt", "modelopt NVFP4", "fbgemm_fp8"])
def test_experts_of_llama_4_may_be_floats_of_8_or_4_bits(method: str) -> None:
    """ModelOpt has one scale for all experts, and FBGEMM one for each column of a matrix.

    The numbers of ModelOpt 0.47 were compared once.
    """
    folder = family_folder("llama4_text")
    config = json.loads((folder / "config.json").read_text())
    floats = load_file(folder / "model.safetensors")
    state, experts = dict(floats), [it for it in floats if re.search(r"experts\.\w+_proj$", it)]
    for name in experts:
        matrices = floats[name].float()
        if method.endswith("NVFP4"):
            tensors, floats[name] = nvfp4_experts(matrices)
            state |= {name + ending: tensor for ending, tensor in tensors.items()}
            continue
        if method == "modelopt":
            scales, ending = matrices.abs().max() / 448, "_weight_scale"
            state[f"{name}_input_scale"] = torch.tensor(0.5)
        else:
            scales, ending = matrices.abs().amax(1, keepdim=True) / 448, "_scale"
        state[name] = (matrices / scales).to(torch.float8_e4m3fn)
        state[f"{name}{ending}"], floats[name] = scales, state[name].float() * scales
    kind, _, algorithm = method.partition(" ")
    own = {"quant_method": kind, "quant_algo": algorithm or "FP8"}
    packed = {**config, "quantization_config": own}
    kernels = Kernels()
    ours, exact = (
        load_model(it, kernels=kernels, dtype="float32")
        for it in ((packed, state), (config, floats))
    )
    assert len(experts) >= 2
    assert all(torch.equal(of(ours, key), of(exact, key)) for key in exact.weights)
    if not algorithm:
        return
    kept = load_model((packed, state), dtype="float32", weights_dtype="file").weights
    for key in (it for it in kept if ".experts_" in it):
        matrix = kept[key]
        assert isinstance(matrix, PackedMatrix)
        assert error_of(matrix.unpacked(), exact.weights.tensor(key)) < 0.51 / 127, key
    scales = f"{experts[0]}_weight_scale"
    for broken in (state[scales][:, 1:], state[scales].float()):
        with pytest.raises(ConfigError, match=f"{scales} is .*: it must be float8_e4m3fn"):
            load_model((packed, {**state, scales: broken}))
    with pytest.raises(ConfigError, match="_weight_scale_2 leads to a scale .* NaN"):
        load_model((packed, {**state, f"{scales}_2": torch.tensor(torch.nan)}))


def test_a_text_model_in_a_wrapper_may_describe_its_own_format(tmp_path: Path) -> None:
    (config, state), _, _ = packed_checkpoint("mistral", "GPTQ", tmp_path)
    tie = {"tie_word_embeddings": False}
    wrapped = {"model_type": "mistral3", "text_config": {**config, "model_type": "mistral"}, **tie}
    named = {f"language_model.{key}": it for key, it in state.items()}
    ours, exact = (load_model(it, dtype="float32") for it in ((wrapped, named), (config, state)))
    assert all(torch.equal(of(ours, key), of(exact, key)) for key in exact.weights)
    both = {**wrapped, FORMATS["GPTQ"].field[0]: FORMATS["GPTQ"].field[1]}
    assert load_model((both, named), dtype="float32").weights.nbytes == exact.weights.nbytes


def of(model: CheckpointModel, key: str) -> Tensor:
    matrix = model.weights[key]
    return matrix.unpacked() if isinstance(matrix, PackedMatrix) else matrix


def _fp8_of(matrix: Tensor, is_whole: bool) -> tuple[Tensor, Tensor, Tensor]:
    """8-bit floats, scales and floats of a matrix. `is_whole`: it has one scale."""
    packed, floats = FORMATS["fp8"].pack(matrix)
    if not is_whole:
        return packed["weight"], packed["weight_scale_inv"], floats
    scale = matrix.abs().max() / 448
    own = (matrix / scale).to(torch.float8_e4m3fn)
    return own, scale.view(1, 1), own.float() * scale


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int"}


@pytest.mark.parametrize(
    ("format_", "options"),
    [
        ("GPTQ", {"packing_format": "auto_round:auto_gptq", "sym": True}),
        ("GPTQ", {"packing_format": "auto_round:gptqmodel", "sym": True, "act_bits": 32}),
        ("AWQ", {"packing_format": "auto_round:auto_awq", "sym": False}),
    ],
)
def test_auto_round_packs_as_others_do(
    format_: str, options: dict[str, Any], tmp_path: Path
) -> None:
    (config, state), _, _ = packed_checkpoint("mistral", format_, tmp_path)
    own = {key: it for key, it in state.items() if not key.endswith(".g_idx")}
    if "gptqmodel" in options["packing_format"]:  # zeros are not reduced by 1
        own = {k: it + 0x11111111 if k.endswith("qzeros") else it for k, it in own.items()}
    described = {**config, "quantization_config": {**AUTO_ROUND, **options}}
    ours, exact = (load_model(it, dtype="float32") for it in ((described, own), (config, state)))
    assert all(torch.equal(of(ours, key), of(exact, key)) for key in exact.weights)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("act_bits", 8),
        ("data_type", "mx_fp"),
        ("packing_format", "llm_compressor"),
        ("packing_format", ["auto_round"]),
        ("rotation_config", {"hadamard": True}),
        ("bits", 1),
    ],
)
def test_what_auto_round_may_also_do_is_refused(option: str, value: object) -> None:
    config = {"quantization_config": {**AUTO_ROUND, option: value}}
    with pytest.raises(ConfigError, match=f"quantization_config.{option} = "):
        as_floats(config, StateDict({}))


def test_modelopt_may_describe_its_format_in_a_file_of_its_own(tmp_path: Path) -> None:
    (config, state), (plain, _), _ = packed_checkpoint("mistral", "ModelOpt", tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(plain))
    other = tmp_path / "hf_quant_config.json"
    other.write_text('{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}')
    assert is_quantized(tmp_path)
    ours, exact = (load_model(it, dtype="float32") for it in (tmp_path, (config, state)))
    assert all(torch.equal(of(ours, key), of(exact, key)) for key in exact.weights)
    assert not is_quantized(convert_checkpoint(tmp_path, tmp_path / "floats"))
    other.write_text(
        '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4_SVD"}}'
    )
    with pytest.raises(ConfigError, match="quant_algo = 'NVFP4_SVD': must be one of"):
        load_model(tmp_path)


def test_the_page_has_the_formats_of_every_family() -> None:
    of_family: dict[str, list[str]] = {name: [*OF_OTHERS.get(name, ())] for name in FAMILIES}
    for name, own in ARCHITECTURES.items():
        variants = [variant.architecture for variant in GGUF_VARIANTS.get(name, ())]
        for architecture in (own, *variants):
            of_family[architecture.model_type].append(name)
    table = (DOCS / "models.md").read_text(encoding="utf-8").split("## Does my model run?")[1]
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (.+) \|$", table.split("\n## ")[0], re.M)
    assert rows[1:] == [  # after the head
        (name, ", ".join(f"`{it}`" for it in dict.fromkeys(of_family[name])) or "no")
        for name in FAMILIES
    ]
    page = (DOCS / "weights.md").read_text(encoding="utf-8")
    without = page.split("MLX runs for every family except\n")[1].split(".")[0]
    assert sorted(re.findall(r"`(\w+)`", without)) == sorted(WITHOUT_MLX)
