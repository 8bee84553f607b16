"""`SafetensorsFolder`: reads the tensors of a folder of safetensors files, in slices.

`SafetensorsCopy` reads a file that other programs may change meanwhile. This module decides how the
files are found and mapped. It does not know how a tensor is used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, deserialize, safe_open
from torch import Tensor

from gptmanager.environment.machine.memory import free_memory_bytes
from gptmanager.errors import ConfigError, error_summary, quoted, quoted_path
from gptmanager.memory.checkpoint.mapped_file import MappedFile
from gptmanager.memory.checkpoint.tensor_sources import TensorInfo, as_slice, tensor_name
from gptmanager.memory.checkpoint.untrusted_files import check_file, read_object

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DTYPES = {
    **FLOATS,
    **{"I8": "int8", "U8": "uint8", "I32": "int32", "U32": "uint32", "I64": "int64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu"},
}
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_TENSORS = 200_000  # in all files: 10,000 layers of 20 tensors


class SafetensorsFolder:
    """A Hugging Face checkpoint folder: `model.safetensors`, or the shards that an index names.

    Files are memory-mapped. A page that was read stays resident until the file is
    unmapped, so `pieces` maps the file anew after every `max_bytes` bytes read. Raises ConfigError
    if the folder has no safetensors, if a file is broken, or if a tensor is in two files or not in
    the file that the index names. `formats` holds the values of "format" in the files' metadata,
    such as "pt" or "mlx", and "" for a file without this entry.
    """

    def __init__(self, folder: Path) -> None:
        self.formats: set[str] = set()
        self._tensors: dict[str, TensorInfo] = {}
        self._files: dict[str, Path] = {}
        self._mapped: Path | None = None
        self._mapping: Any = None
        self._bytes_read = 0
        self._kept: dict[Path, MappedFile] = {}
        index = _read_index(folder)
        names = {_SINGLE} if index is None else set(index.values())
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
        """Yield slices as `TensorSource.pieces` does. A slice may be a view of the mapped file."""
        shape, dtype, *_ = self._tensors[name]
        if not shape:
            yield 0, self._map(self._files[name], max_bytes).get_tensor(name)
            return
        rows, *others = region or [range(size) for size in shape]
        # All pages of a row become resident, even if only a part of the row is read.
        row_bytes = math.prod(shape[1:]) * getattr(torch, dtype).itemsize
        step = max(1, max_bytes // max(1, row_bytes))  # a row may have no elements
        for start in range(rows.start, rows.stop, step):
            mapping = self._map(self._files[name], max_bytes)
            own = range(start, min(start + step, rows.stop))
            piece = mapping.get_slice(name)[tuple(map(as_slice, (own, *others)))]
            self._bytes_read += len(own) * row_bytes
            yield start - rows.start, piece
            del piece, mapping  # drop the old mapping before the file is mapped again

    def joined(self, names: Sequence[str], dtype: torch.dtype) -> Tensor | None:
        """Join tensors as `MappedFile.joined` does, or return None if they are in several files."""
        files = {self._files[name] for name in names}
        if len(files) > 1:
            return None
        [file] = files
        if file not in self._kept:
            self._kept[file] = MappedFile(file)
        return self._kept[file].joined(names, dtype)

    def close(self) -> None:
        """Unmap the files. The next read of a file maps it again."""
        self._kept = {}
        self._unmap()

    def _unmap(self) -> None:
        self._mapped = self._mapping = None

    def _map(self, file: Path, max_bytes: int) -> Any:
        if self._mapped != file or self._bytes_read >= max_bytes:
            self._unmap()
            self._mapping, self._mapped, self._bytes_read = _open(file), file, 0
        return self._mapping

    def _add_file(self, file: Path) -> None:
        handle = _open(file)
        names = handle.keys()
        _check_count(file, len(names), len(self._tensors))
        self.formats.add((handle.metadata() or {}).get("format", ""))
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


class SafetensorsCopy:
    """The tensors of the file `name` in a folder, which is read at once and not mapped.

    Other programs may change the file meanwhile. If they truncated a mapped file, the next read of
    it would end the process. Raises ConfigError for a missing or broken file, for a file that
    changes while it is read, and for one that is too large for the free memory.
    """

    def __init__(self, folder: Path, name: str) -> None:
        if not os.path.lexists(folder / name):
            raise _lacks(folder, f"no {name}")
        where, size = quoted_path(folder / name), check_file(folder / name)
        free = free_memory_bytes()
        if 2 * size > free:  # the bytes of the file, and the tensors made of them
            raise ConfigError(
                f"{where} has {size} bytes: to read it takes twice as much memory, and "
                f"{free:.0f} bytes are free"
            )
        try:
            with (folder / name).open("rb") as file:
                before = os.fstat(file.fileno())
                length = file.read(8)
                # a file of another format is refused before all of it is read
                if int.from_bytes(length, "little") > size:
                    raise SafetensorError("its header is longer than the file")
                content = length + file.read(size - len(length))
                after = os.fstat(file.fileno())
            self._tensors = dict(deserialize(content))  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError, MemoryError) as error:
            raise _unreadable(where, error) from error
        _check_count(folder / name, len(self._tensors))
        if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
            raise ConfigError(
                f"{where} was changed while it was read: write the files to another folder, then "
                "rename that folder"
            )

    def describe(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(tuple(it["shape"]), _DTYPES.get(it["dtype"], it["dtype"]))
            for name, it in self._tensors.items()
        }

    def take(self, name: str) -> Tensor:
        """Return a tensor, which must have elements and a dtype of torch, and forget it."""
        found = self._tensors.pop(name)
        dtype = getattr(torch, _DTYPES[found["dtype"]])
        return torch.frombuffer(found["data"], dtype=dtype).view(*found["shape"])


def _check_count(file: Path, num_tensors: int, num_before: int = 0) -> None:
    """Raise ConfigError if a file has too many tensors after `num_before` in other files."""
    if num_before + num_tensors > _MAX_TENSORS:
        raise ConfigError(
            f"{quoted_path(file)} holds {num_tensors} tensors: a checkpoint may have at "
            f"most {_MAX_TENSORS} in all its files"
        )


def _unreadable(where: str, error: BaseException) -> ConfigError:
    return ConfigError(f"{where} cannot be read as safetensors: {error_summary(error)}")


def _open(file: Path) -> Any:
    check_file(file)
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError, RuntimeError, MemoryError) as error:
        raise _unreadable(quoted_path(file), error) from error


def _lacks(folder: Path, what: str) -> ConfigError:
    """Return the error for a folder without safetensors, which names a pickle in the folder."""
    text = f"{quoted_path(folder)} holds {what}"
    pickles = sorted(it.name for it in folder.glob("*") if it.suffix in _PICKLES)
    if pickles:
        text += f"; {pickles[0]} is a pickle, which can run code: save it as safetensors"
    return ConfigError(text)


def _read_index(folder: Path) -> dict[str, str] | None:
    """Return {tensor name: file name}, or None if the checkpoint is a single file."""
    if os.path.lexists(folder / _SINGLE):
        return None
    file = folder / _INDEX
    if not os.path.lexists(file):
        raise _lacks(folder, f"neither {_SINGLE} nor {_INDEX}")
    index = read_object(file).get("weight_map")
    if not isinstance(index, dict):
        raise ConfigError(f"{quoted_path(file)}: weight_map = {quoted(index)}: must be an object")
    for name in index.values():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            text = f"weight_map names {quoted(name)}, which must be a file name without a folder"
            raise ConfigError(f"{quoted_path(file)}: {text}")
    return index
