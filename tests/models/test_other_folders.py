"""Paths that are not checkpoints: each refusal is a sentence that says what the path is."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from gptmanager import GptManager, cli
from gptmanager.callbacks import generate
from gptmanager.config import ModelType
from gptmanager.errors import ConfigError

LLAMA = json.loads(
    (Path(__file__).parents[2] / "examples" / "tiny_llama" / "config.json").read_text()
)
TENSORS = save({"x": torch.zeros(2)})
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345678\n"
ENGINE = {"pretrained_config": {"architecture": "LlamaForCausalLM"}, "build_config": {}}
# Content of files, by name; the path to pass, in their folder; the sentence's end.
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing": ({}, "", "it is an empty folder"),
    "GGUF": ({"model": b"GGUF\x03"}, "model", "model is cut off or damaged"),
    "GGUF files": ({"a.gguf": b"GGUF", "b.gguf": b"GGUF"}, "", "GGUF files: pass one of them (a.g"),
    "GGUF pointer": ({"a.gguf": POINTER}, "", "a.gguf is a pointer of Git LFS, not the file: run"),
    "pt": ({"model.pt": b"PK"}, "", "its weights are pickles, which can run code: pass"),
    "pth": ({"consolidated.00.pth": b"PK", "params.json": {}}, "", "in its author's own format"),
    "bin": (
        {"config.json": LLAMA, "pytorch_model.bin": b"PK"},
        "",
        "its weights are pickles, which can run code: pass",
    ),
    "a pickle": ({"model.pt": b"PK"}, "model.pt", "it is a file that does not begin with GGUF"),
    "a shard": (
        {"config.json": LLAMA, "a.safetensors": TENSORS},
        "a.safetensors",
        "it is a file of a checkpoint: pass its folder",
    ),
    "no config": (
        {"model.safetensors": TENSORS, "tokenizer.json": {}},
        "",
        "it holds safetensors without their config.json: add the config.json of the model",
    ),
    "PEFT": ({"adapter_config.json": {}}, "", "it holds a PEFT adapter: pass its base model"),
    "PEFT with config": (
        {"adapter_config.json": {}, "config.json": LLAMA, "adapter_model.safetensors": TENSORS},
        "",
        "it holds a PEFT adapter: pass its base model here",
    ),
    "diffusion": (
        {"model_index.json": {}, "unet/config.json": {}},
        "",
        "it holds a diffusion pipeline, which generates images, not text",
    ),
    "unet": (
        {"config.json": {}, "diffusion_pytorch_model.safetensors": TENSORS},
        "",
        "it holds a part of a diffusion pipeline",
    ),
    "ONNX": ({"genai_config.json": {}, "model.onnx": b"x"}, "", "it holds an ONNX model: pass"),
    "ONNX in a folder": (
        {"config.json": LLAMA, "onnx/model.onnx": b"x"},
        "",
        "it holds an ONNX model: pass the checkpoint from which it was exported",
    ),
    "TensorFlow": ({"config.json": LLAMA, "tf_model.h5": b"x"}, "", "it holds weights of Tensor"),
    "Flax": ({"config.json": LLAMA, "flax_model.msgpack": b"x"}, "", "it holds weights of Flax"),
    "MLX": (
        {"config.json": LLAMA, "weights.npz": b"x"},
        "",
        "it holds a model of MLX in NumPy",
    ),
    "engine": (
        {"config.json": ENGINE, "rank0.engine": b"x"},
        "",
        "an engine of TensorRT-LLM: pass",
    ),
    "TensorRT-LLM": (
        {"config.json": ENGINE["pretrained_config"], "rank0.safetensors": TENSORS},
        "",
        "it holds a checkpoint of TensorRT-LLM: pass the Hugging Face checkpoint",
    ),
    "tokenizer": ({"tokenizer.json": {}, "tokenizer_config.json": {}}, "", "a tokenizer without a"),
    "hub cache": (
        {"refs/main": b"a", "snapshots/a/config.json": LLAMA},
        "",
        "it is a folder of the Hugging Face cache: pass the folder in its snapshots/",
    ),
    "training": (
        {"checkpoint-9/config.json": LLAMA, "trainer_state.json": {}},
        "",
        "it has no config.json: pass its folder 'checkpoint-9', which has one",
    ),
    "BERT": ({"config.json": {"model_type": "bert"}}, "", "'bert': this is an encoder, which does"),
    "ViT": (
        {"config.json": {"model_type": "vit"}},
        "",
        "'vit': this is a model of images or sound",
    ),
    "T5": (
        {"config.json": {"model_type": "t5", "is_encoder_decoder": True}},
        "",
        "'t5': this is an encoder-decoder, and only decoders are served",
    ),
    "list": ({"config.json": [1]}, "", "config.json: must be a JSON object"),
    "a text": ({"a.txt": b"hello"}, "a.txt", "it is a file that does not begin with GGUF"),
}
# What does not exist: the end of the sentence of the commands, and of the library.
MISSING = {
    "new\nline": (r"got 'new\nline'", "it does not exist"),
    "~/models": ("; ~ is not expanded: write the home folder in full",) * 2,
    "Qwen/Qwen3-0.6B": ("; if it is a model of the Hugging Face hub, download it with",) * 2,
    "dangling": ("; it is a link to a path that does not exist",) * 2,
    "a\0b": (r"got 'a\x00b'", "it does not exist"),
    "x" * 5000: ("(5002 characters)", "it does not exist"),
    "/dev/null": ("got '/dev/null'", "it is neither a folder nor a file"),
}


def refusals(path: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the errors of three commands, and of two calls."""
    found = []
    for command in (["run", "--prompt", "x"], ["serve", "--port", "0"], ["chat"]):
        try:
            status: object = cli.main([*command, "--model", path])
        except SystemExit as error:
            status = error.code
        assert status == 2
        found.append(capsys.readouterr().err.splitlines()[-1])
    for call in (_manager, _generate):
        with pytest.raises(ConfigError) as error:
            call(path)
        found.append(str(error.value))
    return found


def _manager(path: str) -> None:
    model_type = ModelType.INFLIGHT_FUSED_BATCHING
    GptManager(path, model_type, 1, None, lambda count: [], lambda *response: None)


def _generate(path: str) -> None:
    generate(path, [[1, 2]], 1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(4)
def test_what_a_path_is_gets_said(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, inner, text = CASES[name]
    for file, content in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (tmp_path / file).write_bytes(data)
    if "model_type" in (files.get("config.json") or {}) and len(files) == 1:
        (tmp_path / "model.safetensors").write_bytes(TENSORS)
    for error in refusals(str(tmp_path / inner), capsys):
        assert text in error and "\n" not in error and len(error) < 500


@pytest.mark.parametrize("name", MISSING)
@pytest.mark.every(2)
def test_an_error_of_a_missing_folder_says_what_to_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    of_command, of_library = MISSING[name]
    errors = refusals(name, capsys)
    assert all(of_command in error for error in errors[:3])
    assert all(of_library in error for error in errors[3:])
    assert max(map(len, errors)) < 500


def test_an_error_of_an_unreadable_folder_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: str) -> list[str]:  # the superuser may list every folder
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "listdir", refuse)
    for error in refusals(str(tmp_path), capsys):
        assert "it cannot be read: Permission denied" in error
