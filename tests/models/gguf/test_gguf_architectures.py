"""Files that llama.cpp's converter wrote, of small random models: the logits of transformers.

`architectures/` has them in F16, written by `convert_hf_to_gguf.py` of llama.cpp b11434 without a
tokenizer, and the logits of transformers 5.17.0 in float32 with the same weights; those of Bamba
are of 5.24.0. The norms of heads in `stablelm_norms.gguf` are stacked as the converter's code says;
this version of it fails.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import PagedDriver
from gguf_files import random_blocks, write_gguf
from mapped_files import resident_bytes

from gptmanager.errors import ConfigError
from gptmanager.models import load_model
from gptmanager.models.checkpoint_parts import open_tensors, read_config
from gptmanager.models.conversion import convert_checkpoint
from gptmanager.models.families import place_tensors
from gptmanager.models.gguf.architectures import ARCHITECTURES, VARIANTS
from gptmanager.models.gguf.config import config_of
from gptmanager.models.gguf.header import read_header
from gptmanager.models.gguf.row_orders import ValueHeads
from gptmanager.models.gguf.tensors import GgufTensors

FOLDER = Path(__file__).with_name("architectures")
FILES = sorted(FOLDER.glob("*.gguf"))


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    with np.load(FOLDER / "logits.npz") as file:
        return dict(file)


def test_every_architecture_has_a_file() -> None:
    variants = [variant.architecture for name in VARIANTS for variant in VARIANTS[name]]
    wanted = {own.model_type for own in [*ARCHITECTURES.values(), *variants]}
    assert {read_config(file)["model_type"] for file in FILES} == wanted
    assert {file.stem for file in FILES} >= ARCHITECTURES.keys()


def test_value_heads_are_read_in_the_order_of_their_key_heads() -> None:
    order = ValueHeads(2, 6, key_dim=4, value_dim=2).order(1, 2)
    assert order(range(13)).tolist() == [0, 1, 2, 5, 6, 9, 10, 3, 4, 7, 8, 11, 12]
    assert any(".linear_attn." in name for name in open_tensors(FOLDER / "qwen35.gguf").describe())


@pytest.mark.parametrize("value_dim", [64, 32, 16])
def test_value_heads_of_whole_groups_stay_in_4_bits(value_dim: int, tmp_path: Path) -> None:
    blocks = random_blocks(torch.Generator().manual_seed(1), 3 * 12, 20).reshape(3, -1)
    blocks.reshape(-1, 20)[:, :4] = np.float16([0.5, -2]).view(np.uint8)
    path = write_gguf(
        tmp_path / "a.gguf", {}, {"blk.0.ssm_out.weight": (3, blocks)}, sizes={3: (32, 20)}
    )
    heads = ValueHeads(2, 384 // value_dim, value_dim, value_dim)
    source = GgufTensors(read_header(path), ARCHITECTURES["qwen35"], 1, 1, value_heads=heads)

    ((name, info),) = source.describe().items()
    assert info.groups == (None if value_dim == 16 else "int4")
    if info.groups:
        found = [it.floats() for _, it in source.groups(name, 384 * 4, range(1, 3))]
        assert resident_bytes(path) == 0  # pages that were read are released
        floats = [it for _, it in source.pieces(name, 1 << 20, [range(1, 3), range(384)])]
        assert resident_bytes(path) == 0
        assert len(found) == 2 and torch.equal(torch.cat(found), torch.cat(floats))


def logits_of(source: Path, expected: dict[str, np.ndarray], **options: Any) -> np.ndarray:
    model = load_model(source, dtype="float32", **options)
    driver = PagedDriver(model, 1, 64, torch.float32)
    found: np.ndarray = driver.forward([(0, expected["tokens"].tolist())]).float().numpy()
    return found


@pytest.mark.every(6)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_logits_equal_transformers(file: Path, expected: dict[str, np.ndarray]) -> None:
    assert np.abs(logits_of(file, expected) - expected[file.stem]).max() < 1e-4


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["gpt-oss", "deepseek2_v3", "granitemoe_shared"])
def test_tensors_with_other_names_are_converted(
    name: str, expected: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Experts and heads that a file has one by one, and a checkpoint of transformers has not."""
    folder = convert_checkpoint(FOLDER / f"{name}.gguf", tmp_path / "folder", dtype="float32")
    assert np.abs(logits_of(folder, expected) - expected[name]).max() < 1e-4
    in_bytes = convert_checkpoint(folder, tmp_path / "bytes", weights_dtype="int8")
    assert np.array_equal(
        logits_of(in_bytes, expected, weights_dtype="file"),
        logits_of(folder, expected, weights_dtype="int8"),
    )


def test_a_matrix_of_one_row_may_be_stored_as_a_vector(
    expected: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Programs of llama.cpp write such a vector, because they drop last dimensions of size 1."""
    header, tensors = read_header(FOLDER / "ernie4_5-moe.gguf"), {}
    data = header.path.read_bytes()
    for name, (_, shape, block, offset) in header.tensors.items():
        kind = {"F32": 0, "F16": 1}[block.name]
        dtype = np.float32 if kind == 0 else np.uint8
        count = math.prod(shape) * block.num_bytes // np.dtype(dtype).itemsize
        values = np.frombuffer(data, dtype, count, offset)
        tensors[name] = kind, values.reshape(*shape[:-1], -1)
    name = "blk.1.exp_probs_b.bias"
    assert tensors[name][1].shape == (1, 4)
    tensors[name] = 0, tensors[name][1][0]
    file = write_gguf(tmp_path / "a.gguf", header.metadata, tensors, sizes={1: (1, 2)})

    found = logits_of(file, expected)

    assert np.abs(found - expected["ernie4_5-moe"]).max() < 1e-4


def test_names_of_parts_are_only_taken_where_a_checkpoint_has_them() -> None:
    spec = load_model(FOLDER / "gpt-oss.gguf").spec
    whole, parts = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.3.up_proj"
    assert {whole, f"{whole}_bias"} <= place_tensors(spec).keys()
    places = place_tensors(spec, [f"{parts}.weight", f"{parts}.bias"])
    assert {f"{parts}.weight", f"{parts}.bias"} <= places.keys() and whole not in places


def test_the_first_files_of_minicpm_have_no_scales() -> None:
    header, names = read_header(FOLDER / "minicpm.gguf"), ("scale_emb", "scale_depth")
    config = config_of(header)
    assert [config[it] for it in (*names, "dim_model_base")] == [3.0, 1.4, 16]
    rest = {key: it for key, it in header.metadata.items() if not key.endswith("_scale")}
    config = config_of(header._replace(metadata=rest))
    assert [config[it] for it in (*names, "dim_model_base")] == [12.0, 1.4, 256]


def test_a_file_may_have_the_layers_with_rope_and_the_temperature_of_queries() -> None:
    header = read_header(FOLDER / "granite_swa.gguf")
    own = {**header.metadata, "granite_swa.attention.rope_pattern": np.array([True, False])}
    config = config_of(header._replace(metadata=own))
    assert config["layer_rope_theta"] == [10000.0, 0]
    header, keys = read_header(FOLDER / "mistral4.gguf"), "mistral4.attention.temperature_"
    own = {**header.metadata, f"{keys}scale": 0.1, f"{keys}length": 40}
    config = config_of(header._replace(metadata=own))
    assert config["rope_scaling"]["llama_4_scaling_beta"] == 0.1
    with pytest.raises(ConfigError, match="length = 41: must equal mistral4.rope.scaling.orig"):
        config_of(header._replace(metadata={**own, f"{keys}length": 41}))


def test_experts_are_read_in_any_slices() -> None:
    file = FOLDER / "qwen3moe.gguf"
    assert read_config(file)["num_experts"] == 4
    source = open_tensors(file)
    for name in ("gate_proj", "down_proj"):
        whole = [source.describe()[f"model.layers.1.mlp.experts.{n}.{name}.weight"] for n in (0, 3)]
        assert [tuple(info.shape) for info in whole] == [(32, 32)] * 2
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    ((_, all_rows),) = source.pieces(name, 1 << 20)
    part = [piece for _, piece in source.pieces(name, 4 * 4 * 32, (range(5, 19), range(3, 9)))]
    assert len(part) > 1 and torch.equal(torch.cat(part), all_rows[5:19, 3:9])


def test_too_many_experts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptmanager.models.gguf.tensors._MAX_EXPERTS", 3)
    with pytest.raises(ConfigError, match="ffn_.*_exps has 4 matrices or vectors: at most 3"):
        load_model(FOLDER / "qwen3moe.gguf")


def test_an_interval_says_which_layers_have_linear_attention() -> None:
    """Files from before `recurrent_layers` have it, or are of models with the interval 4."""
    header = read_header(FOLDER / "qwen35.gguf")
    metadata = {**header.metadata}
    assert metadata.pop("qwen35.attention.recurrent_layers").tolist() == [True, False]
    for interval, found in ((2, 2), (None, 4)):
        own = {**metadata, "qwen35.full_attention_interval": interval}
        config = config_of(header._replace(metadata=own))
        assert config["full_attention_interval"] == found and "layer_types" not in config


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("xielu.alpha_p", None, "alpha_p is missing: must be an array of 2 numbers"),
        ("xielu.alpha_n", np.ones(3), "must be an array of 2 numbers"),
        ("xielu.beta", np.array([0.5, 0.6]), "must be 0.5 in all layers"),
        ("xielu.eps", np.array([-1e-6, 1e-6]), "must be -1e-06 in all layers"),
    ],
)
def test_numbers_of_xielu_are_checked(
    key: str, value: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = read_header(FOLDER / "apertus.gguf")
    changed = header._replace(metadata={**header.metadata, key: value})
    monkeypatch.setattr("gptmanager.models.gguf.checkpoint.read_model", lambda _: changed)
    with pytest.raises(ConfigError, match=text):
        load_model(header.path)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        (
            "qwen35.ssm.group_count",
            3,
            "time_step_rank = 4: must be a multiple of qwen35.ssm.group_count",
        ),
        ("cohere2moe.expert_gating_func", 3, "must be 1 or 2"),
        ("hy_v3.expert_shared_feed_forward_length", 33, "must be a multiple of hy_v3.expert_feed"),
        ("qwen35.ssm.group_count", 0, "ssm.group_count = 0: must be a positive integer"),
        ("qwen35.ssm.inner_size", 2**40 + 1, "must be a multiple of qwen35.ssm.time_step_rank"),
        ("qwen35.ssm.state_size", 2**31, "has shape"),
        ("qwen35.attention.recurrent_layers", 1, "must be an array of booleans"),
        ("lfm2.attention.head_count_kv", 1, "must be an array of 3 numbers"),
        ("lfm2.attention.head_count_kv", np.array([0, 1, 2]), "must have the same number for all"),
        ("lfm2.shortconv.l_cache", 0, "conv_L_cache = 0: must be a positive integer"),
        (
            "granitehybrid.ssm.inner_size",
            65,
            "inner_size = 65: must be a multiple of granitehybrid.ssm.time_s",
        ),
        ("granitehybrid.ssm.state_size", 9, "the config requires"),
        (
            "granitehybrid.rope.scaling.finetuned",
            True,
            "expert_count = 4: not supported",
        ),  # Bamba has none
    ],
)
def test_sizes_are_checked(
    key: str, value: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = read_header(FOLDER / f"{key.partition('.')[0]}.gguf")
    changed = header._replace(metadata={**header.metadata, key: value})
    monkeypatch.setattr("gptmanager.models.gguf.checkpoint.read_model", lambda _: changed)
    with pytest.raises(ConfigError, match=text):
        load_model(header.path)
