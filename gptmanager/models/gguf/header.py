"""`read_header`: reads the metadata of a GGUF file, and the positions of its tensors.

The file is not trusted, so each count, size and offset is compared with a limit or with the file's
size before it is used. The package `gguf` is not used, because its reader trusts the counts. It
also creates an array for each string: a vocabulary of 49,152 tokens takes seconds instead of 0.1 s.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gptmanager.errors import ConfigError, error_summary, quoted, quoted_path
from gptmanager.memory.checkpoint.tensor_sources import tensor_name
from gptmanager.memory.checkpoint.untrusted_files import check_file
from gptmanager.models.gguf.blocks.block_types import BLOCK_TYPES, TYPE_NAMES, BlockType

_MAX_HEADER_BYTES = 64 << 20  # the largest vocabularies need 20 MB
_MAX_STRINGS = 2_000_000  # in all arrays together: tokens and merges
_MAX_KEYS = 10_000
_MAX_TENSORS = 200_000  # enough for 10,000 layers
_MAX_DIMENSIONS = 4
_MAX_SIZE = 2**31 - 1  # size of a dimension
_MAX_ALIGNMENT = 1 << 20
_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9


class StoredTensor(NamedTuple):
    """A tensor in the file `path`.

    `shape`: in torch's order of dimensions. `offset`: in bytes from the file's start.
    """

    path: Path
    shape: tuple[int, ...]
    type: BlockType
    offset: int

    @property
    def row_bytes(self) -> int:
        """The size of a row in bytes. Rows are along the last dimension."""
        return self.shape[-1] // self.type.size * self.type.num_bytes

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])


class Header(NamedTuple):
    """The part of a file before its data. `metadata`: by key. `tensors`: by name.

    An array in `metadata` is a list of str, or a NumPy array of numbers.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def read_header(path: Path, *, is_kept: bool = True) -> Header:
    """Read the header of a GGUF file. Raises ConfigError for a file that cannot be used.

    With `is_kept`, the header stays cached until this function caches another one.
    """
    num_bytes = check_file(path)
    status = path.stat()
    read = _read_once if is_kept else _read
    return read(path, num_bytes, status.st_mtime_ns, status.st_ino)


def _read(path: Path, num_bytes: int, *_: int) -> Header:
    try:
        with path.open("rb") as file, _mapped(file.fileno()) as data:
            return _Reader(path, data).header()
    except OSError as error:
        raise ConfigError(f"{quoted_path(path)} cannot be read: {error.strerror}") from error
    except (ValueError, struct.error) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{quoted_path(path)} is not a readable GGUF file: {error_summary(error)}"
        ) from error


_read_once = functools.lru_cache(maxsize=1)(_read)  # every part of a checkpoint needs the header


def _mapped(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


class _Reader:
    """Reads a header from its first byte on, up to a fixed limit that the file cannot change."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data = path, data
        self._at, self._end = 0, min(len(data), _MAX_HEADER_BYTES)
        self._strings_left = _MAX_STRINGS

    def header(self) -> Header:
        if self._data[:4] != b"GGUF":
            raise self._error("does not begin with GGUF: it is not a GGUF file")
        self._at = 4
        version = self._number("<u4")
        if version in (2 << 24, 3 << 24):
            raise self._error("is big-endian: gguf-convert-endian of the package gguf converts it")
        if version not in (2, 3):
            raise self._error(f"has version {version} of GGUF: versions 2 and 3 are supported")
        num_tensors = self._count("tensors", _MAX_TENSORS)
        num_keys = self._count("keys", _MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a key")
            if key in metadata:
                raise self._error(f"has the key {quoted(key)} twice")
            metadata[key] = self._value(key, self._number("<u4"))
        found = dict(self._tensor() for _ in range(num_tensors))
        if len(found) < num_tensors:
            raise self._error("has two tensors of the same name")
        alignment = self._alignment(metadata)
        start = -(-self._at // alignment) * alignment
        for name, tensor in found.items():
            if tensor.offset % alignment:
                raise self._error(f"has the tensor {tensor_name(name)} at an unaligned offset")
        tensors = {
            name: tensor._replace(offset=start + tensor.offset) for name, tensor in found.items()
        }
        self._check_places(tensors, start)
        return Header(self._path, metadata, tensors)

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"{quoted_path(self._path)} {what}")

    def _take(self, num_bytes: int, what: str) -> int:
        """Return the position of the next `num_bytes` bytes, and advance beyond them.

        Raises ConfigError if they do not end within the header. `what` names the bytes in errors.
        """
        start = self._at
        if num_bytes > self._end - start:
            if self._end < len(self._data):
                given = f"is damaged, or has a header of more than {self._end} bytes"
                raise self._error(f"{given}: {what} ends beyond this limit")
            raise self._error(f"is cut off or damaged: {what} does not end within the file")
        self._at = start + num_bytes
        return start

    def _number(self, kind: str) -> Any:
        dtype = np.dtype(kind)
        start = self._take(dtype.itemsize, "a number")
        value = np.frombuffer(self._data, dtype, 1, start)[0]
        return float(str(value)) if kind == "<f4" else value.item()  # 1e-05, not 9.99999974e-06

    def _count(self, what: str, limit: int) -> int:
        count: int = self._number("<u8")
        if count > limit:
            raise self._error(f"has {count} {what}: at most {limit} are supported")
        return count

    def _string(self, what: str) -> str:
        length = self._number("<u8")
        start = self._take(length, what)
        return self._data[start : self._at].decode()

    def _value(self, key: str, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string(f"the value of {quoted(key)}")
        if kind == _ARRAY:
            return self._array(key)
        raise self._error(f"has a value of the unknown type {kind} for {quoted(key)}")

    def _array(self, key: str) -> Any:
        kind, count = self._number("<u4"), self._number("<u8")
        if kind in _NUMBERS:
            dtype = np.dtype(_NUMBERS[kind])
            start = self._take(count * dtype.itemsize, f"the array {quoted(key)}")
            return np.frombuffer(self._data, dtype, count, start).copy()
        if kind != _STRING:
            raise self._error(f"has an array of type {kind} for {quoted(key)}: not supported")
        if count > self._strings_left:
            raise self._error(
                f"has {count} strings for {quoted(key)}: at most {_MAX_STRINGS} are supported in "
                "all arrays together"
            )
        self._strings_left -= count
        return self._strings(key, count)

    def _strings(self, key: str, count: int) -> list[str]:
        """Read many strings in one loop, which is faster than `_string` for each."""
        found, data, at, end = [], self._data, self._at, self._end
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            stop = at + 8
            length = unpack(data, at)[0] if stop <= end else end
            if length > end - stop:
                self._at = end
                self._take(1, f"the array {quoted(key)}")  # raises, because no bytes are left
            at = stop + length
            found.append(data[stop:at].decode())
        self._at = at
        return found

    def _tensor(self) -> tuple[str, StoredTensor]:
        name = self._string("the name of a tensor")
        own = f"has the tensor {tensor_name(name)} "
        num_dimensions = self._number("<u4")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._error(
                f"{own}of {num_dimensions} dimensions: must be 1 to {_MAX_DIMENSIONS}"
            )
        shape = tuple(self._number("<u8") for _ in range(num_dimensions))[::-1]
        if not all(1 <= size <= _MAX_SIZE for size in shape):
            raise self._error(f"{own}of shape {list(shape)}: sizes must be 1 to {_MAX_SIZE}")
        number, offset = self._number("<u4"), self._number("<u8")
        block = BLOCK_TYPES.get(number)
        if block is None:
            known = ", ".join(block.name for block in BLOCK_TYPES.values())
            named = TYPE_NAMES.get(number, str(number))
            raise self._error(f"{own}of type {named}, which is not supported; supported: {known}")
        if shape[-1] % block.size:
            raise self._error(
                f"{own}with rows of {shape[-1]} elements: {block.name} needs a multiple of "
                f"{block.size}"
            )
        return name, StoredTensor(self._path, shape, block, offset)

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        is_size = isinstance(alignment, int) and 8 <= alignment <= _MAX_ALIGNMENT
        if not is_size or alignment & (alignment - 1):
            raise self._error(
                f"has general.alignment = {quoted(alignment)}: must be a power of two, from 8 "
                f"to {_MAX_ALIGNMENT}"
            )
        return int(alignment)

    def _check_places(self, tensors: Mapping[str, StoredTensor], start: int) -> None:
        """Raise ConfigError for tensors that overlap or do not end within the file.

        With overlapping tensors, a small file could fill the memory.
        """
        end = start
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset < end:
                raise self._error(
                    f"has the tensor {tensor_name(name)} that overlaps another tensor"
                )
            end = tensor.offset + tensor.num_rows * tensor.row_bytes
            if end > len(self._data):
                raise self._error(
                    f"is cut off or damaged: the tensor {tensor_name(name)} does not end within "
                    "the file"
                )
