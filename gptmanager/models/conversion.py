"""`convert_checkpoint`: writes a checkpoint as a Hugging Face folder that loads fast.

The folder has the tensor names, config.json and tokenizer files of Hugging Face, and the weights as
safetensors.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from gptmanager.config import ProgressCallback
from gptmanager.errors import ConfigError, quoted_path, write_error
from gptmanager.kernels.gemm.int4_groups import CODEBOOKS, codebook_of
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.packed_matrix import PackedMatrix, Quantized
from gptmanager.memory.checkpoint.safetensors_writer import SafetensorsWriter
from gptmanager.memory.checkpoint.tensor_sources import GroupedSource, TensorSource, tensor_name
from gptmanager.memory.places import Place, name_in_places
from gptmanager.models.checkpoint_parts import gguf_checkpoint, open_tensors, read_config, read_part
from gptmanager.models.converted_tensors import (
    CODEBOOK,
    FIELD,
    MINIMUM,
    SCALE,
    SHAPE,
    quantization_config,
)
from gptmanager.models.families import FAMILIES, place_tensors
from gptmanager.models.families.wrappers import PREFIXES, is_wrapper
from gptmanager.models.parameters import (
    check_head_dtype,
    lookup_tables,
    quantized_parameters,
)
from gptmanager.models.quantized.scheme import MODELOPT_FILE
from gptmanager.models.read_spec import read_spec
from gptmanager.models.spec import ModelSpec

_PIECE_BYTES = 16 << 20
_ENDS = ("", SCALE)  # added to a matrix's name: for its values, and for its scales
_TEXT_FILES = (
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "tokenizer*",
    "*_config.json",
    "added_tokens.json",
)
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

    `dtype`: the type of the tensors that are not quantized, by default the checkpoint's type.
    `weights_dtype` "int8" writes the matrices of matmuls as int8, with one scale per row. "int4"
    writes these matrices in groups of 32 4-bit numbers, with one float16 scale per group, but the
    output matrix as `head_dtype`, by default "int8". With "int4", matrices that the checkpoint
    already has in these groups, even the output matrix, are copied exactly. Experts that are
    stacked in one tensor stay floats. Loading can map quantized matrices into memory instead of
    copying them.

    `target` does not exist until all its files are written. Raises ConfigError if the checkpoint
    cannot be read, if `target` exists or cannot be written, for other dtypes, or if a matrix to
    quantize is stored as `[in, out]`, and GptManagerError if the disk is full.
    """
    folder = Path(target).absolute()
    if os.path.lexists(folder):
        raise ConfigError(f"{quoted_path(folder)} exists already: pass the path of a new folder")
    if not _is_utf8(folder):
        raise ConfigError(f"{quoted_path(folder)} must be valid UTF-8, as safetensors requires")
    _check_dtypes(weights_dtype, head_dtype)
    config, tensors = read_config(source), open_tensors(source)
    spec = read_spec(config, dtype=dtype, tensors=tensors.describe())
    places = _places(spec, config, tensors.describe())
    quantized = _quantized(spec, tensors, places, weights_dtype, head_dtype)
    config = _with_dtype(config, str(spec.dtype).removeprefix("torch."))
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
            _write_tensors(file, tensors, spec, places, quantized, on_progress)
            own.rename(folder)
    except OSError as error:
        raise write_error(quoted_path(folder), error) from error
    finally:
        tensors.close()
    return folder


def _is_utf8(path: Path) -> bool:
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _with_dtype(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the config with another dtype, also for the text model of a wrapper."""
    changed = {**{k: v for k, v in config.items() if k != "torch_dtype"}, "dtype": name}
    inner = config.get("text_config")
    return changed | {"text_config": _with_dtype(inner, name)} if inner else changed


def _check_dtypes(weights_dtype: str | None, head_dtype: str | None) -> None:
    if weights_dtype == "fp8":
        raise ConfigError(
            "weights_dtype = 'fp8' is refused: it must be 'int8' or 'int4'; a GPU quantizes to fp8 "
            "when it loads a checkpoint"
        )
    if weights_dtype not in (None, "int8", "int4"):
        raise ConfigError(f"weights_dtype = {weights_dtype!r} must be 'int8', 'int4' or None")
    check_head_dtype(weights_dtype, head_dtype)


def _places(spec: ModelSpec, config: Mapping[str, Any], given: Collection[str]) -> dict[str, Place]:
    """Return name in the checkpoint -> place, for the tensors of the network."""
    family, places = FAMILIES[spec.family], place_tensors(spec, given)
    prefixes = {**family.prefixes, **(PREFIXES if is_wrapper(config) else {})}
    names = {it: name_in_places(it, places, family.prefix, prefixes) for it in given}
    return {name: places[own] for name, own in names.items() if own in places}


def _quantized(
    spec: ModelSpec,
    tensors: TensorSource,
    places: Mapping[str, Place],
    weights_dtype: Quantized | None,
    head_dtype: Quantized | None,
) -> dict[str, Quantized]:
    """Return name in the checkpoint -> format, for each matrix that is written in 8 or 4 bits."""
    kinds = quantized_parameters(spec, weights_dtype, head_dtype)
    tables = {*lookup_tables(spec)} if kinds else set()
    found: dict[str, Quantized] = {}
    for name, info in tensors.describe().items():
        place = places.get(name)
        if place is not None and place.parameter in tables and info.quantized:
            kinds[place.parameter] = "int8"
        if place is None or place.parameter not in kinds:
            continue
        if place.stacked:
            if info.quantized:
                raise ConfigError(
                    f"weights_dtype = {weights_dtype!r}: tensor {tensor_name(name)} has quantized "
                    "matrices of all experts, which would be written as floats; load the "
                    "checkpoint as it is, or leave weights_dtype out"
                )
            continue
        if place.transposed:
            raise ConfigError(
                f"weights_dtype = {weights_dtype!r}: tensor {name} is stored as [in, out], but "
                "only matrices stored as [out, in] can be quantized; leave weights_dtype out"
            )
        kept = info.groups if weights_dtype == "int4" else None
        found[name] = kept or kinds[place.parameter]
    return found


def _write_tensors(
    file: Path,
    source: TensorSource,
    spec: ModelSpec,
    places: Mapping[str, Place],
    quantized: Mapping[str, Quantized],
    on_progress: ProgressCallback | None,
) -> None:
    given = source.describe()
    written = _layout(source, spec, places, quantized)
    total, done = sum(info.shape[0] if info.shape else 1 for info in given.values()), 0
    with SafetensorsWriter(file, written) as writer:
        for name, info in given.items():
            if (kind := quantized.get(name)) is None:
                for _, piece in source.pieces(name, _PIECE_BYTES):
                    writer.write(name, piece.to(spec.dtype))
            else:
                matrix = _quantized_matrix(source, name, kind)
                values, scales, minima, codebook = matrix.panels
                numbers = None if codebook is None else CODEBOOKS[codebook].float()
                ends = {"": values, SCALE: scales, MINIMUM: minima, CODEBOOK: numbers}
                for end, part in ends.items():
                    if part is not None:
                        writer.write(name + end, part)
                writer.write(name + SHAPE, torch.tensor(info.shape))
            done += info.shape[0] if info.shape else 1
            if on_progress is not None:
                on_progress("weights", done, total)


def _layout(
    source: TensorSource,
    spec: ModelSpec,
    places: Mapping[str, Place],
    quantized: Mapping[str, Quantized],
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name -> shape and dtype of the tensors to write, in the order of the file.

    A model joins some matrices, for example the projections to queries, keys and values. In the
    file, the values of these matrices follow each other, and so do their scales. Loading can then
    map the joined matrix from the file. Quantized values begin at multiples of 64 bytes, the size
    of a CPU cache line.
    """
    given = source.describe()
    order = sorted(quantized, key=lambda name: (places[name].parameter, places[name].first_row))
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for is_int8, number in itertools.product((True, False), range(len(_ENDS))):
        for name in order:
            if (quantized[name] == "int8") is is_int8:
                part = _new_matrix(quantized[name], given[name].shape).panels[:2][number]
                found[name + _ENDS[number]] = tuple(part.shape), part.dtype
    for name in order:
        if quantized[name] == "int4" and _has_minima(source, name):
            found[name + MINIMUM] = found[name + SCALE]
    # The size of each tensor above is a multiple of 8 bytes, so those below are aligned.
    in_codebook = [name for name in order if quantized[name] in CODEBOOKS]
    found |= {name + CODEBOOK: ((16,), torch.float32) for name in in_codebook}
    found |= {name + SHAPE: ((2,), torch.int64) for name in order}
    rest = given.keys() - quantized.keys()
    return found | {name: (given[name].shape, spec.dtype) for name in given if name in rest}


def _new_matrix(kind: Quantized, shape: tuple[int, ...]) -> PackedMatrix:
    if kind != "int8":
        return Int4Matrix(shape[0], shape[1], torch.float32, codebook=codebook_of(kind))
    return PackedMatrix(shape[0], shape[1], torch.float32, quantized=True)


def _has_minima(source: TensorSource, name: str) -> bool:
    if source.describe()[name].groups is None:
        return False
    [(_, first), *_] = cast(GroupedSource, source).groups(name, _PIECE_BYTES, range(1))
    return first.minima is not None


def _quantized_matrix(source: TensorSource, name: str, kind: Quantized) -> PackedMatrix:
    info = source.describe()[name]
    matrix = _new_matrix(kind, info.shape)
    pieces: Iterable[tuple[int, Any]] = source.pieces(name, _PIECE_BYTES)
    if info.groups == kind:
        pieces = cast(GroupedSource, source).groups(name, _PIECE_BYTES, range(info.shape[0]))
    for start, piece in pieces:
        matrix.copy_(piece, start)
    return matrix


def _write_texts(source: Path, folder: Path) -> None:
    """Write the tokenizer, the chat templates, and the config files other than config.json."""
    gguf = gguf_checkpoint(source)
    if gguf is None:
        for pattern in _TEXT_FILES:
            for file in sorted(source.glob(pattern)):
                if file.is_file() and file.name != MODELOPT_FILE:
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
