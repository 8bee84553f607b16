"""Files that llama.cpp's converter wrote, of small random models: the logits of transformers.

`architectures/` has them in F16, written by `convert_hf_to_gguf.py` of llama.cpp b11434 without a
tokenizer, and the logits of transformers 5.17.0 in float32 with the same weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import PagedDriver

from gptmanager.errors import ConfigError
from gptmanager.models import load_model
from gptmanager.models.checkpoint_parts import open_tensors, read_config
from gptmanager.models.gguf.architectures import ARCHITECTURES, WITH_EXPERTS

FOLDER = Path(__file__).with_name("architectures")
FILES = sorted(FOLDER.glob("*.gguf"))
OTHERWISE = {"gemma3", "gpt2"}  # tests that write their own files have these


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    with np.load(FOLDER / "logits.npz") as file:
        return dict(file)


def test_every_architecture_has_a_file() -> None:
    names = {*ARCHITECTURES, *(f"{name}_with_experts" for name in WITH_EXPERTS)}
    assert {file.stem for file in FILES} == names - OTHERWISE


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_logits_equal_transformers(file: Path, expected: dict[str, np.ndarray]) -> None:
    tokens = expected["tokens"].tolist()
    model = load_model(file, dtype="float32")
    logits = PagedDriver(model, 1, 64, torch.float32).forward([(0, tokens)]).float()
    assert np.abs(logits.numpy() - expected[file.stem]).max() < 1e-4


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
    with pytest.raises(ConfigError, match="ffn_.*_exps has 4 experts, at most 3 are supported"):
        load_model(FOLDER / "qwen3moe.gguf")
