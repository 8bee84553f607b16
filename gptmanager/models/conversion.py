"""`convert_checkpoint`: writes any checkpoint as a Hugging Face folder that loads fast.

Tensor names, config and tokenizer are those of Hugging Face, and the weights are safetensors.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from gptmanager.config import ProgressCallback
from gptmanager.errors import ConfigError, quoted_path
from gptmanager.kernels.gemm.int4_groups import Groups
from gptmanager.kernels.gemm.int4_rounding import round_to_groups
from gptmanager.kernels.gemm.packed_matrix import Quantized
from gptmanager.memory.safetensors_writer import SafetensorsWriter
from gptmanager.memory.tensor_sources import GroupedSource, TensorSource
from gptmanager.models.checkpoint_parts import gguf_checkpoint, open_tensors, read_config, read_part
from gptmanager.models.families import place_tensors
from gptmanager.models.parameters import quantized_parameters
from gptmanager.models.quantized_tensors import (
    FIELD,
    SHAPE,
    Part,
    packed_values,
    quantization_config,
    quantize_rows,
    written_parts,
)
from gptmanager.models.read_spec import read_spec
from gptmanager.models.spec import ModelSpec

_PIECE_BYTES = 16 << 20
_TEXT_FILES = ("*.jinja", "additional_chat_templates/*.jinja", "tokenizer*", "*_config.json")
_PARTS = ("generation_config.json", "tokenizer_config.json")


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    weights_dtype: Quantized | None = None,
    head_dtype: Quantized | None = None,
    on_progress: ProgressCallback | None = None,
) -> Path:
    """Write the checkpoint `source` to the new folder `target`, and return its path.

    `dtype` None: the checkpoint's. `weights_dtype` "int8": matrices of matmuls are written as int8,
    with one scale per row; "int4": in groups of 32 with a float16 scale each, but the output matrix
    as `head_dtype` (None: "int8"). Groups of 4 bits in the checkpoint keep their numbers. The
    folder appears once it is complete. Raises ConfigError if the checkpoint cannot be read, if
    `target` exists, and with `weights_dtype` if the rows of a matrix are not its outputs.
    """
    folder = Path(target).absolute()
    if os.path.lexists(folder):
        raise ConfigError(f"{quoted_path(folder)} exists already: pass the path of a new folder")
    config, tensors = read_config(source), open_tensors(source)
    spec = read_spec(config, dtype=dtype, num_tensors=len(tensors.describe()))
    quantized = _quantized(spec, tensors, weights_dtype, head_dtype)
    name = str(spec.dtype).removeprefix("torch.")
    config = {**{k: v for k, v in config.items() if k != "torch_dtype"}, "dtype": name}
    if quantized:
        config[FIELD] = quantization_config("int4" if weights_dtype == "int4" else "int8")
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


def _quantized(
    spec: ModelSpec,
    tensors: TensorSource,
    weights_dtype: Quantized | None,
    head_dtype: Quantized | None,
) -> dict[str, Quantized]:
    """Return the checkpoint's names of the matrices that are written in 8 or 4 bits."""
    kinds = quantized_parameters(spec, weights_dtype, head_dtype)
    places = place_tensors(spec)
    found: dict[str, Quantized] = {}
    for name, info in tensors.describe().items():
        place = places.get(name)
        if place is None or place.parameter not in kinds or place.stacked:
            continue
        if place.transposed:
            raise ConfigError(
                f"weights_dtype = {weights_dtype!r}: tensor {name} is [in, out], and scales belong "
                "to outputs; leave weights_dtype out"
            )
        is_kept = info.in_groups and weights_dtype == "int4"
        found[name] = "int4" if is_kept else kinds[place.parameter]
    return found


def _write_tensors(
    file: Path,
    source: TensorSource,
    dtype: torch.dtype,
    quantized: Mapping[str, Quantized],
    on_progress: ProgressCallback | None,
) -> None:
    parts = {name: _parts(source, name, dtype, quantized.get(name)) for name in source.describe()}
    written = {name + it.end: (it.shape, it.dtype) for name in parts for it in parts[name]}
    total = sum(shape[0] if shape else 0 for shape, _ in written.values())
    done = 0
    with SafetensorsWriter(file, written) as writer:
        for name, (first, *others) in parts.items():
            rest: dict[str, list[Tensor]] = {}
            for values, *own in _pieces(source, name, dtype, quantized.get(name)):
                writer.write(values)
                for part, value in zip(others, own, strict=True):
                    rest.setdefault(part.end, []).append(value)
                done += len(values) if first.shape else 0
                if on_progress is not None:
                    on_progress("weights", done, total)
            for part in others:
                pieces = rest[part.end]
                writer.write(pieces[0] if part.end == SHAPE else torch.cat(pieces))
                done += part.shape[0]
    if on_progress is not None:
        on_progress("weights", total, total)


def _parts(
    source: TensorSource, name: str, dtype: torch.dtype, kind: Quantized | None
) -> Sequence[Part]:
    """Return the tensors that a tensor is written as."""
    info = source.describe()[name]
    if kind is None:
        return [Part("", info.shape, dtype)]
    has_minima = False
    if kind == "int4" and info.in_groups:
        first = next(cast(GroupedSource, source).groups(name, 1, range(1)))
        has_minima = first[1].minima is not None
    return written_parts(kind, info.shape, has_minima)


def _pieces(
    source: TensorSource, name: str, dtype: torch.dtype, kind: Quantized | None
) -> Iterator[tuple[Tensor, ...]]:
    """Yield pieces of the tensors that a tensor is written as."""
    info = source.describe()[name]
    if kind == "int4" and info.in_groups:
        rows = range(info.shape[0])
        for _, groups in cast(GroupedSource, source).groups(name, _PIECE_BYTES, rows):
            yield _grouped_parts(groups, info.shape)
        return
    for _, piece in source.pieces(name, _PIECE_BYTES):
        if kind == "int4":
            yield _grouped_parts(round_to_groups(piece), info.shape)
        else:
            yield quantize_rows(piece) if kind == "int8" else (piece.to(dtype),)


def _grouped_parts(groups: Groups, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    parts = packed_values(groups.values), groups.scales, torch.tensor(shape)
    return parts if groups.minima is None else (*parts, groups.minima)


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
