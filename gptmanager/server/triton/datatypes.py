"""Converts tensors of Triton's datatypes between NumPy arrays, bytes and JSON values.

Numbers are little-endian. A BYTES element is its length in four bytes, followed by its content.
NumPy has no BF16, so BF16 tensors are read as float32.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, Union

import numpy as np

from gptmanager.errors import quoted
from gptmanager.server.errors import ApiError
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
Buffer = Union[bytes, memoryview]
_LENGTH = struct.Struct("<I")
MAX_DIMS = 8


def from_bytes(name: str, datatype: str, shape: Sequence[int], raw: Buffer) -> np.ndarray:
    """Return the tensor `name` of a request from its bytes.

    `InputReader.check` must have accepted its datatype and shape. Raises ApiError if the number of
    bytes does not fit the shape.
    """
    dtype, count = NUMPY[datatype], math.prod(shape)
    if datatype == "BYTES":
        return _objects(_split(name, raw, count), shape)
    size = 2 if datatype == "BF16" else dtype.itemsize
    if len(raw) != count * size:
        raise invalid(
            name,
            f"unexpected total byte size {len(raw)} for input {quoted(name)}, "
            f"expecting {count * size}",
        )
    if datatype == "BOOL":  # a client may send other bytes than 0 and 1
        return np.frombuffer(raw, dtype=np.uint8).reshape(shape).astype(np.bool_)
    if datatype == "BF16":
        halves = np.frombuffer(raw, dtype="<u2").astype("<u4")
        floats: np.ndarray = (halves << 16).view("<f4")
        return floats.reshape(shape)
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def from_values(name: str, datatype: str, shape: Sequence[int], values: Any) -> np.ndarray:
    """Return the tensor `name` of a request from numbers, bools, strings or bytes in nested lists.

    The lists may be nested in any way, up to MAX_DIMS levels. `InputReader.check` must have
    accepted the tensor's datatype and shape. Raises ApiError if the number of elements does not fit
    the shape, for an element of a wrong type, and for an integer that the datatype cannot
    represent. Floats that are too large become infinite.
    """
    dtype, count = NUMPY[datatype], math.prod(shape)
    found = _flat(name, values, shape)
    if len(found) != count:
        raise _wrong_number(name, str(len(found)), count)
    if not _all_fit(dtype, found):
        index = next(index for index, value in enumerate(found) if not _all_fit(dtype, [value]))
        where = f"input {quoted(name)}[{index}]"
        raise invalid(name, f"{where} = {quoted(found[index])} must be of datatype {datatype}")
    if datatype == "BYTES":
        encoded = [one.encode() if isinstance(one, str) else one for one in found]
        return _objects(encoded, shape)
    with np.errstate(over="ignore"):
        return np.array(found, dtype=dtype).reshape(shape)


def _all_fit(dtype: np.dtype, values: Sequence[Any]) -> bool:
    """Return whether `dtype` accepts the types of all values, and the size of all integers."""
    kinds = set(map(type, values))
    if dtype == object:
        return kinds <= {str, bytes}
    if dtype.kind == "b":
        return kinds <= {bool, int} and all(value in (0, 1) for value in values)
    if not kinds <= ({int, float} if dtype.kind == "f" else {int}):
        return False
    if int not in kinds:
        return True
    limits = (-(2**1000), 2**1000) if dtype.kind == "f" else _limits(dtype)
    integers = values if len(kinds) == 1 else [one for one in values if type(one) is int]
    return limits[0] <= min(integers) and max(integers) <= limits[1]


def _limits(dtype: np.dtype) -> tuple[int, int]:
    found = np.iinfo(dtype)
    return int(found.min), int(found.max)


def _flat(name: str, values: Any, shape: Sequence[int]) -> list[Any]:
    """Return the elements of nested lists.

    Raises ApiError if a level has too many items for `shape`, before the items are read.
    """
    count, most = math.prod(shape), math.prod(max(size, 1) for size in shape)
    found = values if isinstance(values, list) else [values]
    for _ in range(MAX_DIMS):
        if len(found) > most:
            raise _wrong_number(name, str(len(found)), count)
        if list not in set(map(type, found)):
            return found
        size = sum(len(one) if isinstance(one, list) else 1 for one in found)
        if size > most:
            raise _wrong_number(name, str(size), count)
        found = [inner for one in found for inner in (one if isinstance(one, list) else [one])]
    raise invalid(name, f"input {quoted(name)} has lists deeper than {MAX_DIMS}")


def _wrong_number(name: str, given: str, expected: int) -> ApiError:
    return invalid(
        name, f"input {quoted(name)} has {given} elements, expected {expected} by its shape"
    )


def _objects(elements: Sequence[bytes], shape: Sequence[int]) -> np.ndarray:
    found = np.empty(len(elements), dtype=object)
    found[:] = elements
    return found.reshape(shape)


def to_values(array: np.ndarray) -> list[Any]:
    """Return all elements of a response's tensor as JSON values."""
    found: list[Any] = array.reshape(-1).tolist()
    return [one.decode() for one in found] if array.dtype == object else found


def to_bytes(array: np.ndarray) -> bytes:
    """Return a response's tensor as bytes. The elements of an object array must be bytes."""
    if array.dtype != object:
        return np.ascontiguousarray(array).tobytes()
    return b"".join(_LENGTH.pack(len(one)) + one for one in array.reshape(-1))


def _split(name: str, raw: Buffer, count: int) -> list[bytes]:
    elements: list[bytes] = []
    at = 0
    while at < len(raw) and len(elements) <= count:
        begin = at + _LENGTH.size
        if begin > len(raw) or (at := begin + _LENGTH.unpack_from(raw, begin - 4)[0]) > len(raw):
            raise invalid(name, f"incomplete string data for input {quoted(name)}")
        elements.append(bytes(raw[begin:at]))
    if len(elements) != count:
        more = "more" if len(elements) > count else str(len(elements))
        raise invalid(
            name, f"expected {count} string elements for input {quoted(name)}, got {more}"
        )
    return elements
