"""Where tensors of a checkpoint come from: a state dict, or a folder of safetensors.

Decides how files are found and read in pieces. Does not know how a tensor is used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gptmanager.errors import ConfigError, error_summary, quoted, quoted_path
from gptmanager.kernels.gemm.int4_groups import Groups
from gptmanager.memory.checkpoint_files import check_file, read_object

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DTYPES = {**FLOATS, "I8": "int8", "I32": "int32", "I64": "int64"}
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_TENSORS = 200_000  # of 10,000 layers


class TensorInfo(NamedTuple):
    """The shape and dtype of a tensor, known before it is read; `dtype` as torch names it.

    `in_groups`: it is a matrix in 4 bits, of a source that is a `GroupedSource`.
    """

    shape: tuple[int, ...]
    dtype: str
    in_groups: bool = False


class TensorSource(Protocol):
    """The tensors of a checkpoint by name, read in slices."""

    def describe(self) -> Mapping[str, TensorInfo]:
        """Return what is known of each tensor before it is read."""
        ...

    def pieces(
        self, name: str, max_bytes: int, region: Sequence[range] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield slices of a tensor along its first dimension: (first index, slice), all in order.

        `region`: what is wanted, a range for each dimension; indices count from its beginning. A
        slice is of about `max_bytes`, and valid until the next one is asked for.
        """
        ...

    def close(self) -> None:
        """Let go of files; reading opens them again."""
        ...


class GroupedSource(TensorSource, Protocol):
    """A source with matrices in 4 bits, which it also reads as they are."""

    def groups(self, name: str, max_bytes: int, rows: range) -> Iterator[tuple[int, Groups]]:
        """Yield these rows of a matrix `[outputs, inputs]` in slices, as `pieces` does."""
        ...


class StateDict:
    """Tensors that are in memory already. One that is none, or has no values: `ConfigError`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if not isinstance(name, str):
                raise ConfigError(f"tensor {quoted(name)}: a name is needed that is a str")
            if not isinstance(tensor, Tensor):
                raise ConfigError(
                    f"{tensor_name(name)}: a torch.Tensor is needed, got {type(tensor).__name__}"
                )
            if tensor.is_meta or tensor.layout is not torch.strided:
                raise ConfigError(
                    f"{tensor_name(name)}: a dense tensor with values is needed, got one of layout "
                    f"{tensor.layout} on {tensor.device}"
                )
        self._tensors = tensors

    def describe(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._tensors.items()
        }

    def pieces(
        self, name: str, max_bytes: int, region: Sequence[range] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        tensor = self._tensors[name]
        yield 0, tensor if region is None else tensor[tuple(map(_slice, region))]

    def close(self) -> None:
        """Nothing is open."""


class SafetensorsFolder:
    """A Hugging Face checkpoint folder: `model.safetensors`, or the shards that an index names.

    `single`: what the file is called if it is one; a name of its own means that there is no index.
    Files are memory-mapped. A page that was read stays resident as long as its mapping does, so
    the mapping is renewed whenever `max_bytes` were read through it.
    `ConfigError`: no safetensors, a broken file, a tensor in two files or not where the index says.
    """

    def __init__(self, folder: Path, single: str = _SINGLE) -> None:
        self._tensors: dict[str, TensorInfo] = {}
        self._files: dict[str, Path] = {}
        self._mapped: Path | None = None
        self._mapping: Any = None
        self._bytes_read = 0
        index = _read_index(folder, single)
        names = {single} if index is None else set(index.values())
        for file in sorted(folder / name for name in names):
            self._add_file(file)
        for tensor, name in (index or {}).items():
            if self._files.get(tensor) != folder / name:
                raise ConfigError(f"{_INDEX}: tensor {tensor_name(tensor)} is not in {name}")

    def describe(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def pieces(
        self, name: str, max_bytes: int, region: Sequence[range] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the tensor in slices along its first dimension: (first index, slice), all in order.

        `region`: what is wanted, a range for each dimension; indices count from its beginning. A
        slice is valid until the next one is asked for: it may be part of a mapped file.
        """
        shape, dtype, _ = self._tensors[name]
        if not shape:
            yield 0, self._map(self._files[name], max_bytes).get_tensor(name)
            return
        rows, *others = region or [range(size) for size in shape]
        # of a row that is not wanted whole, pages of memory are
        row_bytes = math.prod(shape[1:]) * getattr(torch, dtype).itemsize
        step = max(1, max_bytes // row_bytes)
        for start in range(rows.start, rows.stop, step):
            mapping = self._map(self._files[name], max_bytes)
            own = range(start, min(start + step, rows.stop))
            piece = mapping.get_slice(name)[tuple(map(_slice, (own, *others)))]
            self._bytes_read += len(own) * row_bytes
            yield start - rows.start, piece
            del piece, mapping  # or the old mapping would outlive the opening of the next

    def close(self) -> None:
        """Drop the mapping; reading opens one again."""
        self._mapped = self._mapping = None

    def _map(self, file: Path, max_bytes: int) -> Any:
        if self._mapped != file or self._bytes_read >= max_bytes:
            self.close()
            self._mapping, self._mapped, self._bytes_read = _open(file), file, 0
        return self._mapping

    def _add_file(self, file: Path) -> None:
        handle = _open(file)
        names = handle.keys()
        if len(self._tensors) + len(names) > _MAX_TENSORS:
            raise ConfigError(
                f"{quoted_path(file)} holds {len(names)} tensors: a checkpoint may have "
                f"{_MAX_TENSORS} in all"
            )
        for name in names:
            if name in self._files:
                other = self._files[name].name
                raise ConfigError(
                    f"tensor {tensor_name(name)} is in two files: {other} and {file.name}"
                )
            header = handle.get_slice(name)
            dtype = header.get_dtype()
            self._files[name] = file
            self._tensors[name] = TensorInfo(tuple(header.get_shape()), _DTYPES.get(dtype, dtype))


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop)


def _open(file: Path) -> Any:
    check_file(file)
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError, RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"{quoted_path(file)} cannot be read as safetensors: {error_summary(error)}"
        ) from error


def _read_index(folder: Path, single: str) -> dict[str, str] | None:
    """Tensor name -> file name; None: the checkpoint is a single file."""
    if os.path.lexists(folder / single):
        return None
    file = folder / _INDEX
    if single != _SINGLE or not os.path.lexists(file):
        needed = f"neither {_SINGLE} nor {_INDEX}" if single == _SINGLE else f"no {single}"
        text = f"{quoted_path(folder)} holds {needed}"
        pickles = sorted(file.name for file in folder.glob("*.bin"))
        if pickles:
            text += f"; {pickles[0]} is a pickle, which can run code: save it as safetensors"
        raise ConfigError(text)
    index = read_object(file).get("weight_map")
    if not isinstance(index, dict):
        raise ConfigError(f"{quoted_path(file)}: weight_map = {quoted(index)}: an object is needed")
    for name in index.values():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            text = f"weight_map names {quoted(name)}, a file of the folder is needed"
            raise ConfigError(f"{quoted_path(file)}: {text}")
    return index


def tensor_name(tensor: str) -> str:
    """Return the name as it is if it is printable and short, else quoted."""
    return tensor if tensor.isprintable() and len(tensor) <= 200 else quoted(tensor)
