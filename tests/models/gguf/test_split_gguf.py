"""Models in several GGUF files, as llama.cpp's `llama-gguf-split` writes them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, random_model
from gguf_files import model_metadata, model_tensors, save_gguf, write_gguf

from gptmanager.errors import ConfigError
from gptmanager.models import load_model
from gptmanager.models.checkpoint_parts import open_tensors, read_config

COUNT = 3


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model({**CONFIGS["llama"], "num_hidden_layers": 2})


def split(folder: Path, model: Any, changes: Mapping[int, Mapping[str, Any]] | None = None) -> Path:
    """Write the files, and return the first. `changes`: number of a file -> other metadata."""
    config = model.config.to_dict()
    tensors = model_tensors("llama", config, model.state_dict())
    for number in range(COUNT):
        own = dict(itertools.islice(tensors.items(), number, None, COUNT))
        metadata = model_metadata("llama", config) if number == 0 else {}
        keys = {"split.no": number, "split.count": COUNT, "split.tensors.count": len(tensors)}
        metadata = {**metadata, **keys, **(changes or {}).get(number, {})}
        write_gguf(folder / f"m-{number + 1:05}-of-{COUNT:05}.gguf", metadata, own)
    return folder / f"m-00001-of-{COUNT:05}.gguf"


def test_the_files_are_one_model(tmp_path: Path, model: Any) -> None:
    whole = save_gguf(tmp_path / "whole.gguf", "llama", model)
    folder = tmp_path / "parts"
    folder.mkdir()
    first = split(folder, model)
    for path in (first, folder):
        assert read_config(path) == read_config(whole)
        parts, source = open_tensors(path), open_tensors(whole)
        assert parts.describe().keys() == source.describe().keys()
        for name in source.describe():
            pairs = zip(parts.pieces(name, 4096), source.pieces(name, 4096), strict=True)
            assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in pairs)
    assert load_model(first).spec == load_model(whole).spec


def test_what_is_wrong_with_the_files_is_named(tmp_path: Path, model: Any) -> None:
    def refused(path: Path, told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            load_model(path)

    first = split(tmp_path, model, {1: {"split.no": 2}})
    refused(first, re.escape("m-00002-of-00003.gguf: split.no and split.count = (2, 3) must be"))
    split(tmp_path, model, {2: {"split.count": 4}})
    refused(first, re.escape("m-00003-of-00003.gguf: split.no and split.count = (2, 4) must be"))
    many, none = np.array([1, 2], np.int32), np.array([], np.int32)
    for number, key, wrong in [
        (0, "count", "3"),
        (0, "no", many),
        (1, "no", none),
        (1, "count", True),
        (0, "tensors.count", many),
    ]:
        split(tmp_path, model, {number: {f"split.{key}": wrong}})
        refused(first, rf"m-0000{number + 1}-of-00003.gguf: split.{key} = .*: must be an integer")
    split(tmp_path, model, {0: {"split.tensors.count": 7}})
    refused(first, "the 3 files of the model have 21 tensors, and split.tensors.count = 7")
    split(tmp_path, model)
    refused(tmp_path / "m-00002-of-00003.gguf", "one of 3 files of a model: pass the first one")
    first.rename(tmp_path / "n.gguf")
    refused(tmp_path / "n.gguf", "pass the first one, with a name that ends with -00001-of-00003")
    (tmp_path / "n.gguf").rename(first)
    write_gguf(
        tmp_path / "m-00002-of-00003.gguf",
        {"split.no": 1, "split.count": 3},
        {"token_embd.weight": (0, np.zeros((4, 8), np.float32))},
    )
    refused(first, "has the tensor token_embd.weight, which another file of the model has")
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    refused(tmp_path, "holds 2 GGUF files: pass one")
    refused(first, "m-0000[23]-of-00003.gguf")
