"""The datatypes of Triton's protocol, as NumPy arrays and as bytes.

Numbers are little-endian. A BYTES element is its length, four bytes, and what it holds. NumPy has
no BF16: such tensors are read as float32.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from gptmanager.memory.checkpoint_files import shown
from gptmanager.server.triton.errors import invalid

NUMPY = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
    "BF16": np.dtype("<f4"),
}
_LENGTH = struct.Struct("<I")
_MOST_DIMS = 8


def check_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) > _MOST_DIMS or any(size < 0 for size in shape):
        raise invalid(name, f"inference input {shown(name)} has shape {shown(list(shape))}")
    return tuple(shape)


def check_datatype(name: str, datatype: str) -> np.dtype:
    if datatype not in NUMPY:
        raise invalid(
            name, f"inference input {shown(name)} has the unknown data-type {shown(datatype)}"
        )
    return NUMPY[datatype]


def from_bytes(name: str, datatype: str, shape: Sequence[int], raw: bytes) -> np.ndarray:
    """The tensor `name` of a request, from its bytes. ApiError for any other number of them."""
    dtype, shape = check_datatype(name, datatype), check_shape(name, shape)
    count = math.prod(shape)
    if datatype == "BYTES":
        elements = np.empty(count, dtype=object)
        elements[:] = _split(name, raw, count)
        return elements.reshape(shape)
    size = 2 if datatype == "BF16" else dtype.itemsize
    if len(raw) != count * size:
        raise invalid(
            name,
            f"unexpected total byte size {len(raw)} for input {shown(name)}, "
            f"expecting {count * size}",
        )
    if datatype == "BOOL":  # any other byte than 0 would be no bool of NumPy's
        return np.frombuffer(raw, dtype=np.uint8).reshape(shape).astype(np.bool_)
    if datatype == "BF16":
        halves = np.frombuffer(raw, dtype="<u2").astype("<u4")
        floats: np.ndarray = (halves << 16).view("<f4")
        return floats.reshape(shape)
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def from_values(name: str, datatype: str, shape: Sequence[int], values: Any) -> np.ndarray:
    """The tensor `name` of a request, from numbers, bools, texts or bytes, in lists of any depth.
    ApiError for any other number of them, and for those that the datatype does not hold.
    """
    dtype, shape = check_datatype(name, datatype), check_shape(name, shape)
    found = _flat(name, values)
    count = math.prod(shape)
    if len(found) != count:
        raise invalid(
            name, f"input {shown(name)} has {len(found)} elements, expected {count} by its shape"
        )
    index = next((i for i, value in enumerate(found) if not _fits(dtype, value)), None)
    if index is not None:
        told = f"{shown(name)}[{index}] = {shown(found[index])} is no {datatype}"
        raise invalid(name, f"input {told}")
    if datatype != "BYTES":
        with np.errstate(over="ignore"):
            return np.array(found, dtype=dtype).reshape(shape)
    elements = np.empty(count, dtype=object)
    elements[:] = [one.encode() if isinstance(one, str) else one for one in found]
    return elements.reshape(shape)


def _fits(dtype: np.dtype, value: Any) -> bool:
    if dtype == object:
        return isinstance(value, (str, bytes))
    if dtype.kind == "b" or isinstance(value, bool):
        return dtype.kind == "b" and isinstance(value, bool)
    if dtype.kind == "f":
        return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1000)
    limits = np.iinfo(dtype)
    return isinstance(value, int) and limits.min <= value <= limits.max


def _flat(name: str, values: Any) -> list[Any]:
    found = values if isinstance(values, list) else [values]
    for _ in range(_MOST_DIMS):
        if not any(isinstance(one, list) for one in found):
            return found
        found = [inner for one in found for inner in (one if isinstance(one, list) else [one])]
    raise invalid(name, f"input {shown(name)} has lists deeper than {_MOST_DIMS}")


def to_values(array: np.ndarray) -> list[Any]:
    """All elements of a tensor of a response, as JSON has them."""
    found: list[Any] = array.reshape(-1).tolist()
    return [one.decode() for one in found] if array.dtype == object else found


def to_bytes(array: np.ndarray) -> bytes:
    """A tensor of a response; one of objects holds bytes."""
    if array.dtype != object:
        return np.ascontiguousarray(array).tobytes()
    return b"".join(_LENGTH.pack(len(one)) + one for one in array.reshape(-1))


def _split(name: str, raw: bytes, count: int) -> list[bytes]:
    elements, at = [], 0
    while at < len(raw):
        begin = at + _LENGTH.size
        if begin > len(raw) or (at := begin + _LENGTH.unpack_from(raw, begin - 4)[0]) > len(raw):
            raise invalid(name, f"incomplete string data for input {shown(name)}")
        elements.append(raw[begin:at])
    if len(elements) != count:
        raise invalid(
            name,
            f"expected {count} string elements for input {shown(name)}, got {len(elements)}",
        )
    return elements
