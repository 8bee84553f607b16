"""`convert_checkpoint`: writes any checkpoint as a Hugging Face folder that loads fast.

Tensor names, config and tokenizer are those of Hugging Face, and the weights are safetensors.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gptmanager.config import ProgressCallback
from gptmanager.errors import ConfigError, quoted_path
from gptmanager.memory.safetensors_writer import SafetensorsWriter
from gptmanager.memory.tensor_sources import TensorSource
from gptmanager.models.checkpoint_parts import gguf_checkpoint, open_tensors, read_config, read_part
from gptmanager.models.families import place_tensors
from gptmanager.models.int8_tensors import FIELD, SCALE, quantization_config, quantize_rows
from gptmanager.models.parameters import matmul_matrices, wide_parameters
from gptmanager.models.read_spec import read_spec

_PIECE_BYTES = 16 << 20
_TEXT_FILES = ("*.jinja", "additional_chat_templates/*.jinja", "tokenizer*", "*_config.json")
_PARTS = ("generation_config.json", "tokenizer_config.json")


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    weights_dtype: Literal["int8"] | None = None,
    on_progress: ProgressCallback | None = None,
) -> Path:
    """Write the checkpoint `source` to the new folder `target`, and return its path.

    `dtype` None: the checkpoint's. `weights_dtype` "int8": matrices of matmuls are written as int8,
    with one scale per row. The folder appears once it is complete. Raises ConfigError if the
    checkpoint cannot be read, if `target` exists, and for int8 if the rows of a matrix are not its
    outputs.
    """
    folder = Path(target).absolute()
    if os.path.lexists(folder):
        raise ConfigError(f"{quoted_path(folder)} exists already: pass the path of a new folder")
    config, tensors = read_config(source), open_tensors(source)
    spec = read_spec(config, dtype=dtype, num_tensors=len(tensors.describe()))
    quantized = _quantized(spec, tensors) if weights_dtype == "int8" else set()
    name = str(spec.dtype).removeprefix("torch.")
    config = {**{k: v for k, v in config.items() if k != "torch_dtype"}, "dtype": name}
    if quantized:
        config[FIELD] = quantization_config()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as made:
            own = Path(made) / "checkpoint"
            own.mkdir()
            _write_json(own / "config.json", config)
            _write_texts(Path(source), own)
            file = own / "model.safetensors"
            _write_tensors(file, tensors, spec.dtype, quantized, on_progress)
            own.rename(folder)
    except OSError as error:
        raise ConfigError(f"{quoted_path(folder)} cannot be written: {error.strerror}") from error
    finally:
        tensors.close()
    return folder


def _quantized(spec: Any, tensors: TensorSource) -> set[str]:
    """Return the checkpoint's names of the matrices that are written as int8."""
    narrowed = {*matmul_matrices(spec)} - {*wide_parameters(spec)}
    places = place_tensors(spec)
    found = set()
    for name in tensors.describe():
        place = places.get(name)
        if place is None or place.parameter not in narrowed or place.stacked:
            continue
        if place.transposed:
            raise ConfigError(
                f"weights_dtype = 'int8': tensor {name} is [in, out], and a scale belongs to each "
                "output; leave weights_dtype out"
            )
        found.add(name)
    return found


def _write_tensors(
    file: Path,
    source: TensorSource,
    dtype: torch.dtype,
    quantized: set[str],
    on_progress: ProgressCallback | None,
) -> None:
    described = source.describe()
    written: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, info in described.items():
        written[name] = info.shape, torch.int8 if name in quantized else dtype
        if name in quantized:
            written[name + SCALE] = (info.shape[0], 1), torch.float32
    total = sum(shape[0] if shape else 0 for shape, _ in written.values())
    done = 0
    with SafetensorsWriter(file, written) as writer:
        for name in described:
            scales: list[Tensor] = []
            for _, piece in source.pieces(name, _PIECE_BYTES):
                if name in quantized:
                    values, own = quantize_rows(piece)
                    scales.append(own)
                    writer.write(values)
                else:
                    writer.write(piece.to(dtype))
                done += len(piece) if piece.dim() else 0
                if on_progress is not None:
                    on_progress("weights", done, total)
            if scales:
                writer.write(torch.cat(scales))
                done += written[name][0][0]
    if on_progress is not None:
        on_progress("weights", total, total)


def _write_texts(source: Path, folder: Path) -> None:
    """Write the tokenizer, chat templates, and the configs of special tokens."""
    gguf = gguf_checkpoint(source)
    if gguf is None:
        for pattern in _TEXT_FILES:
            for file in sorted(source.glob(pattern)):
                if file.is_file():
                    copy = folder / file.relative_to(source)
                    copy.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, copy)
        return
    for name in _PARTS:
        if part := read_part(source, name):
            _write_json(folder / name, part)
    if gguf.has_tokenizer():
        gguf.tokenizer().save(str(folder / "tokenizer.json"))


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
