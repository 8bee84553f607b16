"""Weights: tensors by name into storage that stays, from safetensors folders and state dicts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gptmanager.errors import ConfigError
from gptmanager.memory import Place, SafetensorsFolder, Weights
from gptmanager.memory.checkpoint.digest import checkpoint_digest
from gptmanager.memory.checkpoint.mapped_file import MappedFile

SHAPES = {"fused.weight": (5, 3), "conv.weight": (4, 2), "norm.weight": (3,)}
PLACES = {
    "m.a.weight": Place("fused.weight", 0, 2),
    "m.b.weight": Place("fused.weight", 2, 3),
    "m.conv.weight": Place("conv.weight", transposed=True),
    "m.norm.weight": Place("norm.weight"),
    "head.weight": Place("fused.weight", twin=True),
}


def new_weights(dtype: torch.dtype = torch.float32) -> Weights:
    ignored = re.compile(r"\.inv_freq$")
    return Weights(SHAPES, lambda _: PLACES, prefix="m.", ignored=ignored, dtype=dtype)


def new_tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"m.a.weight": (2, 3), "m.b.weight": (3, 3), "m.conv.weight": (2, 4)}
    shapes["m.norm.weight"] = (3,)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def save_sharded(folder: Path, *shards: dict[str, Tensor]) -> None:
    weight_map = {}
    for number, tensors in enumerate(shards):
        file_name = f"model-{number}.safetensors"
        save_file(tensors, folder / file_name)
        weight_map.update(dict.fromkeys(tensors, file_name))
    write_index(folder, weight_map)


def write_index(folder: Path, weight_map: object) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def assert_holds(weights: Weights, tensors: dict[str, Tensor]) -> None:
    fused = torch.cat((tensors["m.a.weight"], tensors["m.b.weight"]))
    assert torch.equal(weights["fused.weight"], fused)
    assert torch.equal(weights["conv.weight"], tensors["m.conv.weight"].t())
    assert torch.equal(weights["norm.weight"], tensors["m.norm.weight"])


@pytest.mark.parametrize("partial", [False, True])
def test_loading_reports_its_progress(partial: bool) -> None:
    weights, told = new_weights(torch.bfloat16), []
    if partial:
        weights.load(new_tensors())
    tensors = new_tensors(1)
    weights.load(tensors, partial=partial, on_progress=lambda *given: told.append(given))
    total = 2 * sum(tensor.numel() for tensor in tensors.values())
    assert [given[::2] for given in told] == [("weights", total)] * len(tensors)
    counts = [done for _, done, _ in told]
    assert counts == sorted(set(counts)) and counts[-1] == total


def test_tensors_reach_their_rows_and_orientation() -> None:
    weights = new_weights()
    tensors = new_tensors()
    weights.load(tensors)
    assert_holds(weights, tensors)
    assert weights.nbytes == 4 * (15 + 8 + 3)
    assert "norm.weight" in weights
    assert "norm.bias" not in weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_converted_while_copying(dtype: torch.dtype) -> None:
    weights = new_weights(dtype)
    tensors = new_tensors()
    weights.load({name: tensor.double() for name, tensor in tensors.items()})
    assert_holds(weights, {name: tensor.to(dtype) for name, tensor in tensors.items()})


def test_a_prefix_may_be_missing_and_ignored_tensors_may_be_there() -> None:
    weights = new_weights()
    tensors = new_tensors()
    bare = {name.removeprefix("m."): tensor for name, tensor in tensors.items()}
    weights.load(bare | {"layer.inv_freq": torch.zeros(2, dtype=torch.int64)})
    assert_holds(weights, tensors)


def test_loading_again_changes_the_same_storage() -> None:
    weights = new_weights()
    weights.load(new_tensors())
    held = weights["fused.weight"]
    assert weights.version == 1

    weights.load(new_tensors(seed=1))
    assert weights["fused.weight"] is held
    assert_holds(weights, new_tensors(seed=1))

    weights.load({"norm.weight": torch.full((3,), 7.0)}, partial=True)
    assert_holds(weights, new_tensors(seed=1) | {"m.norm.weight": torch.full((3,), 7.0)})
    assert weights.version == 3


def test_a_twin_must_be_equal() -> None:
    weights = new_weights()
    tensors = new_tensors()
    fused = torch.cat((tensors["m.a.weight"], tensors["m.b.weight"]))
    weights.load({"head.weight": fused} | tensors)
    with pytest.raises(ConfigError, match=r"head\.weight differs from fused\.weight"):
        weights.load({"head.weight": fused + 1} | tensors)


def test_a_twin_alone_fills_its_parameter() -> None:
    """Programs that save a tied matrix once keep either of its names."""
    weights, tensors = new_weights(), new_tensors()
    fused = torch.cat((tensors.pop("m.a.weight"), tensors.pop("m.b.weight")))
    weights.load(tensors | {"head.weight": fused})
    assert torch.equal(weights["fused.weight"], fused)
    with pytest.raises(ConfigError, match=r"head\.weight differs from fused\.weight"):
        weights.load({"head.weight": fused + 1}, partial=True)


SCALES = {
    "norm.weight": Place("norm.weight"),
    "k_scale": Place("scales", 0, 2, scale=True),
    "v_scale": Place("scales", 2, 2, scale=True),
}


def new_scaled() -> Weights:
    return Weights({"norm.weight": (3,), "scales": (4,)}, lambda _: SCALES, dtype=torch.bfloat16)


def test_scales_are_one_number_or_one_for_each_row_and_1_without_any(tmp_path: Path) -> None:
    weights, norm = new_scaled(), {"norm.weight": torch.ones(3)}
    scales = {"k_scale": torch.tensor(0.3), "v_scale": torch.tensor([0.5, 2.0])}
    save_file(norm | scales, tmp_path / "model.safetensors")
    weights.load(SafetensorsFolder(tmp_path))
    held = weights["scales"]
    assert torch.equal(held, torch.tensor([0.3, 0.3, 0.5, 2.0]))  # float32 beside bfloat16

    weights.load({"v_scale": torch.tensor([4.0]).bfloat16()}, partial=True)
    assert torch.equal(held, torch.tensor([0.3, 0.3, 4.0, 4.0]))
    weights.load(norm)
    assert torch.equal(held, torch.ones(4))
    assert weights["scales"] is held


@pytest.mark.parametrize("number", [0.0, -1.0, torch.nan, torch.inf])
def test_scales_are_positive(number: float) -> None:
    tensors = {"norm.weight": torch.ones(3), "k_scale": torch.tensor(number)}
    with pytest.raises(ConfigError, match=r"tensor k_scale holds .*: scales must be positive"):
        new_scaled().load(tensors)


def test_scales_of_another_shape_are_named() -> None:
    tensors = {"norm.weight": torch.ones(3), "k_scale": torch.ones(3)}
    with pytest.raises(ConfigError, match=r"has shape \[3\]; the config requires \[2\] or \[1\]"):
        new_scaled().load(tensors)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"m.norm.weight": None}, "tensors are missing: m.norm.weight"),
        ({"m.a.weight": None, "m.b.weight": None}, "missing: m.a.weight, m.b.weight"),
        ({"m.a.bias": torch.zeros(2)}, "tensors are unknown: m.a.bias"),
        ({"norm.weight": torch.zeros(3)}, "m.norm.weight occurs twice: as m.norm.weight and as"),
        ({"m.norm.weight": torch.zeros(4)}, "m.norm.weight has shape [4]; the config requires [3]"),
        ({"m.norm.weight": torch.zeros(())}, "m.norm.weight has shape []; the config requires [3]"),
        (
            {"m.conv.weight": torch.zeros(4, 2)},
            "m.conv.weight has shape [4, 2]; the config requires",
        ),
        ({"m.b.weight": torch.zeros(2, 3)}, "m.b.weight has shape [2, 3]; the config requires [3"),
        ({"m.norm.weight": torch.zeros(3, dtype=torch.int8)}, "m.norm.weight has dtype int8"),
        ({"m.norm.weight": [1.0]}, "m.norm.weight: must be a torch.Tensor, got list"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_copied(
    change: dict[str, Tensor | None], text: str
) -> None:
    weights = new_weights()
    weights.load(new_tensors())
    tensors = new_tensors(seed=1) | change
    with pytest.raises(ConfigError, match=re.escape(text)):
        weights.load({name: tensor for name, tensor in tensors.items() if tensor is not None})
    assert_holds(weights, new_tensors())
    assert weights.version == 1


def test_a_first_load_is_never_partial() -> None:
    with pytest.raises(ConfigError, match="missing"):
        new_weights().load({"m.norm.weight": torch.zeros(3)}, partial=True)


def test_a_folder_is_read_single_or_sharded(tmp_path: Path) -> None:
    tensors = new_tensors()
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    single.mkdir()
    sharded.mkdir()
    save_file(tensors, single / "model.safetensors")
    first = {name: tensors.pop(name) for name in ("m.b.weight", "m.norm.weight")}
    save_sharded(sharded, first, tensors)
    for folder in (single, sharded):
        weights = new_weights()
        source = SafetensorsFolder(folder)
        weights.load(source)
        source.close()
        assert_holds(weights, new_tensors())
        weights.load(source)


def test_every_row_of_tied_tensors_is_compared() -> None:
    places = {"one": Place("tied"), "two": Place("tied", twin=True)}
    weights = Weights({"tied": (1025, 1)}, lambda _: places)
    one = torch.arange(1025.0)[:, None]
    for row in (0, 1023, 1024):
        two = one.clone()
        two[row] += 1
        with pytest.raises(ConfigError, match="tensor two differs from tied"):
            weights.check_values({"one": one, "two": two}, {"one": "one", "two": "two"})
    weights.check_values({"one": one, "two": one.clone()}, {"one": "one", "two": "two"})


def test_a_pair_of_config_and_tensors_has_the_digest_of_its_tensors() -> None:
    tensors = new_tensors()
    digest = checkpoint_digest(({}, tensors))
    assert digest == checkpoint_digest(({}, dict(reversed(tensors.items()))))
    other = {**tensors, "m.norm.weight": tensors["m.norm.weight"] + 1}
    assert digest != checkpoint_digest(({}, other))


def test_a_folder_has_the_digest_of_its_weights_and_its_config(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(5)}, tmp_path / "model.safetensors")
    digest = checkpoint_digest(str(tmp_path))
    (tmp_path / "notes.txt").write_text("read by nobody")
    assert checkpoint_digest(tmp_path) == digest
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_digest(tmp_path) != digest
    (tmp_path / "config.json").unlink()
    save_file({"a": torch.ones(5)}, tmp_path / "model.safetensors")
    assert checkpoint_digest(tmp_path) != digest


def test_tensors_that_follow_each_other_in_a_file_are_mapped_as_one(tmp_path: Path) -> None:
    save_file({it: torch.full((2,), ord(it), dtype=torch.uint8) for it in "abcd"}, tmp_path / "f")
    mapped = MappedFile(tmp_path / "f")
    assert bytes(mapped.joined("bcd", torch.uint8).numpy()) == b"bbccdd"
    assert bytes(mapped.joined("ab", torch.int16).view(torch.uint8).numpy()) == b"aabb"
    mapped.joined("ab", torch.uint8).zero_()
    assert bytes(MappedFile(tmp_path / "f").joined("ab", torch.uint8).numpy()) == b"aabb"
    for names in ("acbd", "ac", "ba"):
        assert mapped.joined(names, torch.uint8) is None
    assert mapped.joined("bc", torch.int32) is None  # the address of b is not a multiple of 4


@pytest.mark.parametrize("transposed", [False, True])
def test_tensors_larger_than_a_piece_are_whole(tmp_path: Path, transposed: bool) -> None:
    # 3.5 MB in pieces of 1 MiB, rows that no piece divides evenly
    tensor = torch.randn(700, 1250, generator=torch.Generator().manual_seed(0))
    save_file({"a": tensor, "b": tensor + 1}, tmp_path / "model.safetensors")
    shape = (1250, 700) if transposed else (700, 1250)
    places = {name: Place(name.upper(), transposed=transposed) for name in ("a", "b")}
    weights = Weights({"A": shape, "B": shape}, lambda _: places)
    weights.load(SafetensorsFolder(tmp_path))
    assert torch.equal(weights["A"], tensor.t() if transposed else tensor)
    assert torch.equal(weights["B"], (tensor.t() if transposed else tensor) + 1)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (2, 0, 3)])
def test_a_tensor_without_elements_is_read(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save_file({"a": torch.zeros(shape)}, tmp_path / "model.safetensors")
    pieces = [piece for _, piece in SafetensorsFolder(tmp_path).pieces("a", 100)]
    assert torch.cat([torch.zeros(0, *shape[1:]), *pieces]).shape == shape


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    tensors = new_tensors()
    save_sharded(tmp_path, tensors, {"m.norm.weight": torch.zeros(3)})
    text = "tensor m.norm.weight is in two files: model-0.safetensors and model-1.safetensors"
    with pytest.raises(ConfigError, match=text):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "text"),
    [
        ({"m.a.weight": "model-9.safetensors"}, "model-9.safetensors does not exist"),
        ({"m.z.weight": "model-0.safetensors"}, "tensor m.z.weight is not in model-0.safetensors"),
        ({"m.a.weight": "../model-0.safetensors"}, "weight_map names '../model-0.safetensors'"),
        ({"m.a.weight": 3}, "weight_map names 3"),
        ({"m.a.weight": ".."}, "weight_map names '..', which must be a file name without a folder"),
        ({"m.a.weight": ""}, "weight_map names '', which must be a file name without a folder"),
        (
            {"m.a.weight": "/etc/passwd"},
            "weight_map names '/etc/passwd', which must be a file name without a folder",
        ),
        ({"m.a.weight": "a\0b"}, r"/a\x00b' cannot be read: "),
        (["model-0.safetensors"], "weight_map = ['model-0.safetensors']: must be an object"),
        ("?", "weight_map = '?': must be an object"),
    ],
)
def test_an_index_that_does_not_hold_is_refused(
    tmp_path: Path, weight_map: object, text: str
) -> None:
    save_file(new_tensors(), tmp_path / "model-0.safetensors")
    write_index(tmp_path, weight_map)
    with pytest.raises(ConfigError, match=re.escape(text)):
        SafetensorsFolder(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read as safetensors"):
        SafetensorsFolder(tmp_path)


def test_pickles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds neither model\.safetensors nor .*json$"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is a pickle"):
        SafetensorsFolder(tmp_path)
