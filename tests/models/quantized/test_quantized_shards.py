"""Quantized folders with shards that are cut, missing or lie: each is refused by its name.

The first shard has the packed matrices and the floats, the second one their scales and the like.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bounded import bounded
from quantized_config import CONFIG as LLAMA
from quantized_config import field_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptmanager.errors import ConfigError
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.packed_matrix import Quantized, plain
from gptmanager.models import load_model
from gptmanager.models.conversion import convert_checkpoint

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "expected.json").read_text())
GPT_OSS = {
    **LLAMA,
    "model_type": "gpt_oss",
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": 8,
    "layer_types": ["full_attention"],
    "quantization_config": {"quant_method": "mxfp4"},
}
MXFP4 = {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32}
FORMATS = [*EXPECTED, "mxfp4", "gpt-oss"]
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
INDEX = "model.safetensors.index.json"
LAYER = "model.layers.0."
# Each format's tensor of a matrix that is attacked, and one that the matrix needs
PARTS = {
    "ct-int8": ("mlp.down_proj.weight", "mlp.down_proj.weight_scale"),
    "ct-fp8": ("mlp.down_proj.weight", "mlp.down_proj.weight_scale"),
    "fp8": ("mlp.down_proj.weight", "mlp.down_proj.weight_scale_inv"),
    "gptq": ("mlp.down_proj.qweight", "mlp.down_proj.qzeros"),
    "gptq-reordered": ("mlp.down_proj.qweight", "mlp.down_proj.scales"),
    "awq": ("mlp.down_proj.qweight", "mlp.down_proj.scales"),
    "bnb8": ("mlp.down_proj.weight", "mlp.down_proj.SCB"),
    "bnb4": ("self_attn.o_proj.weight", "self_attn.o_proj.weight.absmax"),
    "mlx": ("mlp.down_proj.weight", "mlp.down_proj.biases"),
    "mlx-mixed": ("mlp.down_proj.weight", "mlp.down_proj.scales"),
    "mlx-floats": ("mlp.down_proj.weight", "mlp.down_proj.scales"),
    "gpt-oss": ("mlp.experts.down_proj_blocks", "mlp.experts.down_proj_scales"),
}
PACKED = ("mlp.down_proj.weight_packed", "mlp.down_proj.weight_scale")
IN_THE_FIRST = (".weight", ".weight_packed", ".qweight", ".bias", "_bias", "_blocks", ".sinks")


def parts(name: str) -> list[str]:
    return [LAYER + part for part in PARTS.get(name, PACKED)]


def gpt_oss() -> dict[str, Tensor]:
    attention = {"q": (32, 64), "k": (32, 64), "v": (32, 64), "o": (64, 32)}
    tensors = {
        "model.embed_tokens.weight": torch.zeros(32, 64),
        "model.norm.weight": torch.ones(64),
    }
    tensors["lm_head.weight"] = torch.zeros(32, 64)
    for module, shape in attention.items():
        tensors[f"{LAYER}self_attn.{module}_proj.weight"] = torch.zeros(shape)
        tensors[f"{LAYER}self_attn.{module}_proj.bias"] = torch.zeros(shape[0])
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{LAYER}{norm}.weight"] = torch.ones(64)
    tensors[f"{LAYER}self_attn.sinks"] = torch.zeros(2)
    tensors[f"{LAYER}mlp.router.weight"] = torch.zeros(2, 64)
    tensors[f"{LAYER}mlp.router.bias"] = torch.zeros(2)
    for matrix, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        shape, own = (2, rows, columns // 32), f"{LAYER}mlp.experts.{matrix}"
        tensors[f"{own}_blocks"] = torch.full((*shape, 16), 7, dtype=torch.uint8)
        tensors[f"{own}_scales"] = torch.full(shape, 120, dtype=torch.uint8)
        tensors[f"{own}_bias"] = torch.zeros(2, rows)
    return tensors


def checkpoint(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if name == "gpt-oss":
        return GPT_OSS, gpt_oss()
    tensors = load_file(HERE / "floats.safetensors")
    if name != "mxfp4":
        tensors |= load_file(HERE / f"{name}.safetensors")
        return {**LLAMA, field_of(name): EXPECTED[name]["config"]}, tensors
    for matrix in EXPECTED["awq"]["digests"]:
        rows, columns = (
            (64, 32) if matrix.endswith(("down_proj.weight", "o_proj.weight")) else (32, 64)
        )
        tensors[f"{matrix}_packed"] = torch.full((rows, columns // 2), 7, dtype=torch.uint8)
        tensors[f"{matrix}_scale"] = torch.full((rows, columns // 32), 120, dtype=torch.uint8)
    scheme = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": MXFP4}}}
    return {**LLAMA, "quantization_config": scheme}, tensors


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each format, in two shards."""
    root = tmp_path_factory.mktemp("sound")
    for name in FORMATS:
        config, tensors = checkpoint(name)
        index = {it: SHARDS[not it.endswith(IN_THE_FIRST)] for it in tensors}
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
        (root / name / INDEX).write_text(json.dumps({"weight_map": index}))
        for shard in SHARDS:
            own = {it: tensors[it] for it in tensors if index[it] == shard}
            save_file(own, root / name / shard)
    return root


@pytest.fixture
def folder(sound: Path, tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(sound / name, tmp_path / "hostile"))


def header(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def change_index(folder: Path, part: str, shard: str | None) -> None:
    """Name another shard for a tensor, or remove the tensor."""
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    index[part] = shard
    index = {it: file for it, file in index.items() if file is not None}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))


def refusal(folder: Path) -> str:
    with bounded(1 << 30), pytest.raises(ConfigError) as refused:
        load_model(folder, dtype="float32")
    text = str(refused.value)
    assert "\n" not in text and len(text) < 600
    return text


@pytest.mark.parametrize("name", FORMATS)
def test_shards_that_are_whole_are_read(folder: Path, name: str) -> None:
    assert load_model(folder, dtype="float32", weights_dtype="file").nbytes > 0


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_shard_that_is_cut_is_named(folder: Path, name: str, shard: str) -> None:
    whole = (folder / shard).read_bytes()
    data = 8 + struct.unpack("<Q", whole[:8])[0]
    for size in (
        0,
        1,
        7,
        8,
        9,
        data // 2,
        data - 1,
        data,
        (data + len(whole)) // 2,
        len(whole) - 1,
    ):
        (folder / shard).write_bytes(whole[:size])
        assert shard in refusal(folder), size
    (folder / shard).write_bytes(whole + b"\0")
    assert shard in refusal(folder)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_shard_that_is_missing_is_named(folder: Path, name: str, shard: str) -> None:
    (folder / shard).unlink()
    assert f"{shard} does not exist" in refusal(folder)


@pytest.mark.parametrize("name", FORMATS)
def test_a_tensor_that_is_not_where_the_index_says_is_named(folder: Path, name: str) -> None:
    matrix, scale = parts(name)
    change_index(folder, scale, SHARDS[0])
    assert f"tensor {scale} is not in {SHARDS[0]}" in refusal(folder)
    change_index(folder, scale, "model-00003-of-00003.safetensors")
    assert "model-00003-of-00003.safetensors does not exist" in refusal(folder)
    change_index(folder, scale, SHARDS[1])
    change_index(folder, "model.other.weight", SHARDS[1])
    assert f"tensor model.other.weight is not in {SHARDS[1]}" in refusal(folder)


@pytest.mark.parametrize("name", FORMATS)
def test_a_scale_that_no_shard_has_is_named(folder: Path, name: str) -> None:
    """The tensor is in neither the index nor a shard, so every file is sound by itself."""
    _, scale = parts(name)
    others = load_file(folder / SHARDS[1])
    del others[scale]
    save_file(others, folder / SHARDS[1])
    change_index(folder, scale, None)
    assert refusal(folder) == f"tensor {scale} is missing: a quantized matrix needs it"
    (folder / SHARDS[1]).unlink()
    for part in others:
        change_index(folder, part, None)
    assert "missing" in (found := refusal(folder)) and f"tensor {LAYER}" in found


Lie = Callable[[dict[str, Any]], Any]
LIES: dict[str, Lie] = {
    "begins later": lambda it: _offsets(it, 1, 0),
    "ends later": lambda it: _offsets(it, 0, 1),
    "moved": lambda it: _offsets(it, 8, 8),
    "behind the end": lambda it: _offsets(it, 1 << 40, 1 << 40),
    "swapped": lambda it: it["data_offsets"].reverse(),
    "negative": lambda it: _offsets(it, -(1 << 20), 0),
    "empty": lambda it: it.update(data_offsets=[0, 0]),
    "many rows": lambda it: it.update(shape=[1 << 40, *it["shape"][1:]]),
    "product overflows": lambda it: it.update(shape=[1 << 33, 1 << 31]),
    "no rows": lambda it: it.update(shape=[0, *it["shape"][1:]]),
    "scalar": lambda it: it.update(shape=[]),
}


def _offsets(info: dict[str, Any], first: int, end: int) -> None:
    info["data_offsets"] = [info["data_offsets"][0] + first, info["data_offsets"][1] + end]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_header_with_wrong_values_is_named(
    folder: Path, name: str, lie: str, number: int
) -> None:
    file = folder / SHARDS[number]
    tensors, data = header(file)
    LIES[lie](tensors[parts(name)[number]])
    text = json.dumps(tensors).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    assert f"{file.name} cannot be read as safetensors" in refusal(folder)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", FORMATS)
def test_a_tensor_of_no_or_other_size_is_named(folder: Path, name: str, number: int) -> None:
    """The files are sound: a tensor has other rows, no elements, or another dtype."""
    part = parts(name)[number]
    tensors = load_file(folder / SHARDS[number])
    own = tensors[part]
    for other in (
        torch.cat([own.view(-1), own.view(-1)]).reshape(-1, *own.shape[1:]),
        own.new_empty(0, *own.shape[1:]),
        own.new_empty(*own.shape[:-1], 0),
        own.new_empty(0),
        torch.zeros(own.shape, dtype=torch.int64),
        torch.zeros(own.shape, dtype=torch.bool),
    ):
        save_file({**tensors, part: other}, folder / SHARDS[number])
        module = part.rsplit(".", 1)[0]
        assert module in refusal(folder), other.shape


def test_experts_of_gpt_oss_stay_in_4_bits() -> None:
    """Gate and up projections, which are stored in turns, are one matrix of all experts."""
    generator, tensors = torch.Generator().manual_seed(1), gpt_oss()
    for name, tensor in tensors.items():
        if name.endswith("_blocks"):
            tensor.random_(0, 256, generator=generator)
        elif name.endswith("_scales"):
            tensor.random_(118, 124, generator=generator)
    exact = load_model((GPT_OSS, tensors), dtype="float32").weights
    for weights_dtype in ("file", "int4"):
        kept = load_model((GPT_OSS, tensors), weights_dtype=weights_dtype).weights
        for name in ("up", "down"):
            matrix = kept[f"layers.0.experts_{name}.weight"]
            assert isinstance(matrix, Int4Matrix) and matrix.codebook == "e2m1"
            assert torch.equal(matrix.unpacked(), plain(exact[f"layers.0.experts_{name}.weight"]))
        assert kept["layers.0.qkv.weight"].values.dtype is (
            torch.int8 if weights_dtype == "file" else torch.uint8
        )


@pytest.mark.parametrize("weights_dtype", ["int8", "int4"])
def test_experts_in_one_quantized_tensor_are_not_converted(
    sound: Path, tmp_path: Path, weights_dtype: Quantized
) -> None:
    with pytest.raises(ConfigError, match="down_proj has quantized matrices of all experts"):
        convert_checkpoint(sound / "gpt-oss", tmp_path / "a", weights_dtype=weights_dtype)
    assert not any(tmp_path.iterdir())
    folder = convert_checkpoint(sound / "gpt-oss", tmp_path / "a")
    assert load_model(folder).weights["layers.0.experts_down.weight"].shape == (128, 32)
