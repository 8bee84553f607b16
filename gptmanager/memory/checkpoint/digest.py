"""Computes a digest that identifies a checkpoint, from samples of its weights.

Different checkpoints of the same shapes differ in almost every tensor, so some of the values
suffice. Reading all values would take as long as loading.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gptmanager.errors import ConfigError, quoted_path

_NUM_SAMPLES = 256  # samples per file
_SAMPLE_BYTES = 4096  # per sample
_NUM_VALUES = 64  # values per tensor
_WEIGHTS = (".safetensors", ".gguf")


def checkpoint_digest(source: Any) -> str:
    """Return the digest of a checkpoint: a folder, a file, or a pair (config, tensors by name).

    The digest of a folder covers config.json and the weight files. The digest of a pair covers the
    tensors, but not the config. An object that implements `Model` is identified by the name of its
    class only. Missing files are skipped. Raises ConfigError if an existing file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(source, (str, os.PathLike)):
        _add_path(digest, Path(source))
    elif isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping):
        for name in sorted(source[1]):
            _add_tensor(digest, str(name), source[1][name])
    else:
        digest.update(type(source).__qualname__.encode())
    return digest.hexdigest()


def _add_path(digest: Any, path: Path) -> None:
    files = [path]
    if path.is_dir():
        files = sorted(it for it in path.iterdir() if it.suffix in _WEIGHTS)
        files.append(path / "config.json")
    for file in files:
        try:
            with file.open("rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                digest.update(f"{file.name} {size};".encode())
                for index in range(_NUM_SAMPLES):
                    opened.seek(size * index // _NUM_SAMPLES)
                    digest.update(opened.read(_SAMPLE_BYTES))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"{quoted_path(file)} cannot be read: {error.strerror}") from error


def _add_tensor(digest: Any, name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
    flat = tensor.detach().reshape(-1)
    step = max(1, len(flat) // _NUM_VALUES)
    sample = flat[::step][:_NUM_VALUES].to("cpu").contiguous()
    digest.update(sample.view(torch.uint8).numpy().tobytes())
