"""Converted checkpoints: the same numbers, tokens and texts, in a folder that loads as it is."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIGS, PagedDriver, random_model
from family_configs import FAMILY_CONFIGS
from gguf_files import save_gguf
from gguf_tokenizers import metadata_of
from packed_logits import random_tokens
from rank_threads import World
from safetensors.torch import load_file, save_file
from text_checkpoint import save_text_checkpoint

from gptmanager import cli
from gptmanager.callbacks import TokenDefaults, load_tokenizer
from gptmanager.errors import ConfigError
from gptmanager.kernels.gemm.int4_groups import Groups
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.memory.checkpoint.safetensors_reader import SafetensorsFolder
from gptmanager.memory.checkpoint.safetensors_writer import SafetensorsWriter
from gptmanager.models import load_model
from gptmanager.models.checkpoint_parts import is_quantized, open_tensors
from gptmanager.models.conversion import convert_checkpoint
from gptmanager.models.converted_tensors import FIELD, ConvertedTensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_checkpoint(tmp_path_factory.mktemp("source") / "text")


def logits(path: Path, **options: Any) -> torch.Tensor:
    model = load_model(path, **options)
    tokens = random_tokens(20)[0]
    pages = torch.float32 if model.spec.dtype is torch.float32 else torch.bfloat16
    return PagedDriver(model, 1, dtype=pages).forward([(0, tokens)])


def test_a_folder_keeps_its_numbers_and_texts(folder: Path, tmp_path: Path) -> None:
    target = convert_checkpoint(folder, tmp_path / "new" / "copy")

    assert torch.equal(logits(target), logits(folder))
    before, after = (load_file(path / "model.safetensors") for path in (folder, target))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert TokenDefaults.of_folder(target) == TokenDefaults.of_folder(folder)
    assert load_tokenizer(target).encode("Hi!").ids == load_tokenizer(folder).encode("Hi!").ids
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["copy"]


def test_a_dtype_is_that_of_the_new_folder(folder: Path, tmp_path: Path) -> None:
    target = convert_checkpoint(folder, tmp_path / "copy", dtype="bfloat16")

    assert load_model(target).spec.dtype is torch.bfloat16
    assert torch.equal(logits(target), logits(folder, dtype="bfloat16"))


def test_the_text_model_of_a_wrapper_has_the_dtype_of_the_new_folder(
    folder: Path, tmp_path: Path
) -> None:
    wrapper = Path(shutil.copytree(folder, tmp_path / "wrapper"))
    text = json.loads((wrapper / "config.json").read_text())
    config = {"model_type": "llava", "text_config": {**text, "torch_dtype": "float32"}}
    (wrapper / "config.json").write_text(json.dumps(config))
    target = convert_checkpoint(wrapper, tmp_path / "copy", dtype="bfloat16")

    assert load_model(target).spec.dtype is torch.bfloat16


def test_int8_is_what_int8_of_the_source_is(folder: Path, tmp_path: Path) -> None:
    target = convert_checkpoint(folder, tmp_path / "copy", weights_dtype="int8")

    assert is_quantized(target) and not is_quantized(folder)
    ours = load_model(target, weights_dtype="int8").weights
    expected = load_model(folder, weights_dtype="int8").weights
    for name in expected:
        if isinstance(expected[name], torch.Tensor):
            assert torch.equal(ours[name], expected[name])
        else:
            assert torch.equal(ours[name].values, expected[name].values)
            assert torch.allclose(ours[name].scales, expected[name].scales, rtol=1e-6)
    sizes = [(path / "model.safetensors").stat().st_size for path in (folder, target)]
    assert sizes[1] < 0.7 * sizes[0]  # rows of 32 positions are padded to 64


def test_int8_rows_are_read_in_any_slices(folder: Path, tmp_path: Path) -> None:
    target = convert_checkpoint(folder, tmp_path / "copy", weights_dtype="int8")
    name = "model.layers.0.mlp.down_proj.weight"
    (_, whole), *rest = open_tensors(target).pieces(name, 1 << 40)
    pieces = list(open_tensors(target).pieces(name, 1000, [range(3, 30), range(5, 50)]))

    assert not rest and len(pieces) > 1
    assert torch.equal(torch.cat([piece for _, piece in pieces]), whole[3:30, 5:50])
    exact = load_file(folder / "model.safetensors")[name]
    assert (whole - exact).abs().max() < exact.abs().max() / 127


def test_a_gguf_file_becomes_a_folder_of_hugging_face(tmp_path: Path) -> None:
    metadata = metadata_of("llama-bpe")
    config = {**CONFIGS["llama"], "vocab_size": len(metadata["tokenizer.ggml.tokens"])}
    model = random_model(config)
    source = save_gguf(tmp_path / "a.gguf", "llama", model, **metadata)

    target = convert_checkpoint(source, tmp_path / "copy")

    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    own = transformers.AutoModelForCausalLM.from_pretrained(target)
    tokens = torch.tensor(random_tokens(20))
    assert torch.allclose(own(tokens).logits, model(tokens).logits, atol=1e-4)
    assert TokenDefaults.of_folder(target) == TokenDefaults.of_folder(source)
    text = "Hi <|im_start|>"
    assert load_tokenizer(target).encode(text).ids == load_tokenizer(source).encode(text).ids


def test_a_target_that_is_not_utf_8_is_refused(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "made" / os.fsdecode(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"caf\\udce9' must be valid UTF-8"):
        convert_checkpoint(folder, target)
    assert not target.parent.exists()


def test_what_cannot_be_converted_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists already: pass the path of a new folder"):
        convert_checkpoint(folder, tmp_path)
    gpt2 = save_gguf(tmp_path / "a.gguf", "gpt2", random_model(CONFIGS["gpt2"]))
    with pytest.raises(
        ConfigError, match=r"is stored as \[in, out\], but only matrices stored as \[out, in\]"
    ):
        convert_checkpoint(gpt2, tmp_path / "copy", weights_dtype="int8")
    with pytest.raises(ConfigError, match="file/copy cannot be written: (File exists|Not a)"):
        (tmp_path / "file").touch()
        convert_checkpoint(folder, tmp_path / "file" / "copy")


def test_an_interrupt_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(folder, tmp_path / "copy", on_progress=interrupt)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("head_dtype", [None, "int4"])
def test_int4_is_what_int4_of_the_source_is(folder: Path, tmp_path: Path, head_dtype: Any) -> None:
    options = {"weights_dtype": "int4", "head_dtype": head_dtype}
    target = convert_checkpoint(folder, tmp_path / "copy", **options)
    again = convert_checkpoint(target, tmp_path / "again", **options)

    expected = load_model(folder, **options).weights
    for path, kind in itertools.product((target, again), ("int4", "file")):
        given = options if kind == "int4" else {"weights_dtype": "file"}
        ours = load_model(path, **given).weights
        for name in expected:
            if isinstance(expected[name], Int4Matrix):
                assert torch.equal(ours[name].values, expected[name].values)
                assert torch.equal(ours[name].scales, expected[name].scales)
            else:
                assert type(ours[name]) is type(expected[name])
    name = "model.layers.0.mlp.down_proj.weight"
    (_, whole), *rest = open_tensors(target).pieces(name, 1 << 40)
    pieces = list(open_tensors(target).pieces(name, 1000, [range(3, 30), range(5, 50)]))
    assert not rest and len(pieces) > 1
    assert torch.equal(torch.cat([piece for _, piece in pieces]), whole[3:30, 5:50])


def is_mapped(weight: Any) -> bool:
    """Whether values and scales are in one storage, which is a file."""
    parts = weight.values, weight.scales
    return len({it.untyped_storage().data_ptr() for it in parts}) == 1


def quantized_matrices(model: Any) -> dict[str, Any]:
    weights = {name: model.weights[name] for name in model.weights}
    return {name: it for name, it in weights.items() if not isinstance(it, torch.Tensor)}


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_matrices_are_memory_of_the_file(folder: Path, tmp_path: Path, kind: Any) -> None:
    target = convert_checkpoint(folder, tmp_path / "copy", weights_dtype=kind)
    file = target / "model.safetensors"
    before = file.read_bytes()

    model = load_model(target, weights_dtype=kind)
    for name, own in quantized_matrices(model).items():
        # 56 rows of a gate leave a part of a panel, which the rows after it must fill
        assert is_mapped(own) == (not name.endswith(".up.weight")), name
        assert own.values.data_ptr() % 64 == 0
    model.weights.load(load_file(folder / "model.safetensors"))  # pages are copied, and written
    expected = quantized_matrices(load_model(folder, weights_dtype=kind))
    for name, own in quantized_matrices(model).items():
        assert torch.equal(own.unpacked(), expected[name].unpacked())
    assert file.read_bytes() == before
    file.unlink()  # the memory stays
    assert torch.equal(own.unpacked(), expected[name].unpacked())


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_panels_of_another_size_are_repacked(folder: Path, tmp_path: Path, kind: Any) -> None:
    target = convert_checkpoint(folder, tmp_path / "copy", weights_dtype=kind)
    expected = quantized_matrices(load_model(target, weights_dtype="file"))
    file, tensors = target / "model.safetensors", load_file(target / "model.safetensors")

    def halved(panels: torch.Tensor, count: int, dim: int) -> torch.Tensor:
        return torch.stack(panels.chunk(2, dim), dim=1).flatten(0, 1)[:count].contiguous()

    for name, values in tensors.items():  # panels of 8 rows, as another version may have
        if values.dtype in (torch.int8, torch.uint8):
            count = -(-int(tensors[f"{name}_shape"][0]) // 8)
            tensors[name] = halved(values, count, values.dim() - 2)
            scales = tensors[f"{name}_scale"]
            cut = scales[: count * 8].clone() if scales.dim() == 1 else halved(scales, count, 2)
            tensors[f"{name}_scale"] = cut
    save_file(tensors, file)
    found = quantized_matrices(load_model(target, weights_dtype="file"))
    assert found.keys() == expected.keys() and not any(map(is_mapped, found.values()))
    for name, own in found.items():
        assert torch.equal(own.values, expected[name].values)
        assert torch.allclose(own.scales.float(), expected[name].scales.float(), rtol=1e-6)


def test_what_is_stored_otherwise_is_copied(folder: Path, tmp_path: Path) -> None:
    target = convert_checkpoint(folder, tmp_path / "copy", weights_dtype="int4")
    assert torch.equal(logits(target), logits(target, weights_dtype=None, dtype="float32"))
    given = quantized_matrices(load_model(target, weights_dtype="int8"))
    assert [name for name in given if is_mapped(given[name])] == ["lm_head.weight"]


@pytest.mark.parametrize("family", ["cohere", "gpt_neox", "mixtral"])
def test_rows_that_loading_moves_are_right(tmp_path: Path, family: str) -> None:
    """Pairs of a rotation, heads that are stored together, and experts of which one matrix is
    made."""
    config = {"model_type": family, **FAMILY_CONFIGS[family]}
    source = tmp_path / "source"
    random_model(config).save_pretrained(source)

    target = convert_checkpoint(source, tmp_path / "copy", weights_dtype="int8")
    expected = quantized_matrices(load_model(source, weights_dtype="int8"))
    found = quantized_matrices(load_model(target, weights_dtype="int8"))
    assert found.keys() == expected.keys()
    for name, own in found.items():
        assert torch.allclose(own.unpacked(), expected[name].unpacked(), atol=1e-6), name
    assert any(map(is_mapped, found.values()))


def written(file: Path, matrices: dict[str, Int4Matrix]) -> ConvertedTensors:
    """A folder of these matrices, in their order."""
    tensors: dict[str, torch.Tensor] = {}
    for number, end in enumerate(("", "_scale", "_minimum")):
        parts = {f"{name}{end}": it.panels[number] for name, it in matrices.items()}
        tensors |= {name: part for name, part in parts.items() if part is not None}
    tensors |= {f"{name}_shape": torch.tensor(it.shape) for name, it in matrices.items()}
    announced = {name: (tuple(it.shape), it.dtype) for name, it in tensors.items()}
    with SafetensorsWriter(file, announced) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return ConvertedTensors(SafetensorsFolder(file.parent))


def test_only_whole_panels_next_to_each_other_are_one_matrix(tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(0)

    def matrix(rows: int, minima: bool) -> Int4Matrix:
        values = torch.randint(0, 16, (rows, 40), generator=made, dtype=torch.uint8)
        scales, lowest = (torch.randn(rows, 2, generator=made).half() for _ in range(2))
        own = Int4Matrix(rows, 40, torch.float32)
        own.copy_(Groups(values, scales, lowest if minima else None))
        return own

    parts = {"a": matrix(16, True), "b": matrix(24, True), "c": matrix(16, True)}
    source = written(tmp_path / "model.safetensors", parts)
    found, joined = source.panels(["a", "b"]), Int4Matrix(40, 40, torch.float32)
    assert found is not None and joined.adopt(found)
    expected = torch.cat([parts[name].unpacked() for name in "ab"])
    assert torch.equal(joined.unpacked(), expected) and joined.minima is not None
    # apart, in another order, and with rows that pad a panel before others
    assert all(source.panels(names) is None for names in (["a", "c"], ["b", "a"], ["b", "c"]))

    (tmp_path / "other").mkdir()
    four = {name: matrix(16, name == "d") for name in "abcd"}
    source = written(tmp_path / "other" / "model.safetensors", four)
    assert source.panels(["a", "b", "c"]) is not None
    assert all(source.panels(list(names)) is None for names in ("acb", "bac", "cd"))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_each_rank_copies_its_part(folder: Path, tmp_path: Path, kind: Any) -> None:
    target = convert_checkpoint(folder, tmp_path / "copy", weights_dtype=kind)
    alike = {"weights_dtype": "file"}
    one, other = (quantized_matrices(it) for it in split_models(target, **alike))
    whole = quantized_matrices(load_model(target, **alike))

    assert one.keys() == other.keys() == whole.keys() and not is_mapped(one["layers.0.out.weight"])
    for name, expected in whole.items():
        own, rest = one[name].unpacked(), other[name].unpacked()
        if name.endswith((".out.weight", ".down.weight")):
            both = torch.cat((own, rest), dim=1)
            # a part that begins within a group is rounded once more
            is_exact = kind == "int8" or own.shape[1] % 32 == 0
            near = 0.0 if is_exact else 0.1
            torch.testing.assert_close(both, expected.unpacked(), rtol=0, atol=near)
        else:
            both = torch.cat((own, rest)).sort(dim=0).values
            assert torch.equal(both, expected.unpacked().sort(dim=0).values)


def split_models(path: Path, **options: Any) -> list[Any]:
    return World(2).run(lambda own: load_model(path, collectives=own, **options))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weights_dtype": "int2"}, "weights_dtype = 'int2' must be 'int8', 'int4' or None"),
        ({"weights_dtype": "file"}, "weights_dtype = 'file' must be 'int8', 'int4' or None"),
        (
            {"weights_dtype": "int4", "head_dtype": "fp8"},
            "head_dtype = 'fp8' must be 'int8', 'int4' or None",
        ),
        (
            {"weights_dtype": "int8", "head_dtype": "int4"},
            "head_dtype = 'int4' is refused with weights_dtype = 'int8': it belongs to 'int4'",
        ),
    ],
    ids=str,
)
def test_dtypes_that_are_not_written_are_refused(
    folder: Path, tmp_path: Path, options: Any, text: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{text}$"):
        convert_checkpoint(folder, tmp_path / "copy", **options)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("end", ["_scale", "_shape", "_minimum"])
def test_broken_folders_are_refused(folder: Path, tmp_path: Path, end: str, kind: Any) -> None:
    target = convert_checkpoint(folder, tmp_path / "copy", weights_dtype=kind)
    file, name = target / "model.safetensors", "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(file)

    if end != "_minimum":
        save_file({k: v for k, v in tensors.items() if k != name + end}, file)
        with pytest.raises(ConfigError, match=f"tensor {name}"):
            load_model(target)
    for broken in (torch.ones(3, 1), torch.tensor([-5, 1 << 40]), torch.tensor([0, 0])):
        save_file({**tensors, name + end: broken}, file)
        with pytest.raises(ConfigError, match=f"tensor {name}.*(two int64|convert the checkp)"):
            load_model(target)
    rows, values, scales = int(tensors[f"{name}_shape"][0]), tensors[name], {}
    if end == "_scale":  # panels without rows have no scales
        scales[name + end] = tensors[name + end].new_empty(
            (rows, values.shape[1], 0) if kind == "int4" else 0
        )
    without = values.new_empty(rows, *values.shape[1:-2], 0, 4)
    for broken, own in ((values[1:].contiguous(), {}), (without, scales)):
        save_file({**tensors, name: broken, **own}, file)
        with pytest.raises(
            ConfigError, match=r"not have the layout of a matrix \[.*; convert the checkpoint ag"
        ):
            load_model(target)


def test_another_version_is_refused(folder: Path, tmp_path: Path) -> None:
    target = convert_checkpoint(folder, tmp_path / "copy", weights_dtype="int8")
    config = json.loads((target / "config.json").read_text())

    config[FIELD]["gptmanager_layout"] = 3
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="not a layout of this version"):
        load_model(target)


def test_the_command_writes_the_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "copy"
    arguments = ["convert", str(folder), str(target), "--weights-dtype", "int8"]

    assert cli.main(arguments) == 0
    assert is_quantized(target) and capsys.readouterr().err.endswith("copy is complete\n")
    assert cli.main(arguments) == 2
    assert "exists already" in capsys.readouterr().err
