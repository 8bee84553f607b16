"""Checks the bytes of a gRPC message before protobuf parses them into objects.

An empty tensor takes two bytes in a message, but about a hundred in memory, so the number of
fields is limited. Numbers and strings grow at most eightfold, so a limit on their bytes is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

MAX_FIELDS = 4096  # fields of a request, including the fields of its tensors
MAX_SMALL = 1 << 16  # bytes of a field other than tensor data: a name, a shape, a parameter
MAX_CONTENTS = 4 << 20  # bytes of typed contents; raw contents are not converted
_TENSORS = (5, 6)  # inputs and outputs of a ModelInferRequest
_RAW = 7
_CONTENTS = 5  # the field `contents` of an InferInputTensor
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _Field(NamedTuple):
    """A field of a message.

    The content of a field with a length is `message[begin:end]`. For other fields, `begin == end`.
    """

    number: int
    begin: int
    end: int


def wire_problem(message: bytes) -> str | None:
    """Return why a ModelInferRequest is too expensive to parse, or None if it is not.

    Malformed messages may pass this check, because the parser refuses them.
    """
    num_fields = size_of_contents = 0
    for field in _fields(message, 0, len(message)):
        num_fields += 1
        size = field.end - field.begin
        if field.number in _TENSORS:
            for inner in _fields(message, field.begin, field.end):
                num_fields += 1
                inner_size = inner.end - inner.begin
                if inner.number == _CONTENTS:
                    size_of_contents += inner_size
                elif inner_size > MAX_SMALL:
                    return _too_long(inner_size)
                if num_fields > MAX_FIELDS:
                    break
        elif field.number != _RAW and size > MAX_SMALL:
            return _too_long(size)
        if num_fields > MAX_FIELDS:
            return f"the message has more than {MAX_FIELDS} fields"
        if size_of_contents > MAX_CONTENTS:
            return (
                f"the typed contents of the inputs have more than {MAX_CONTENTS} bytes: send large "
                "tensors as raw_input_contents"
            )
    return None


def small_problem(message: bytes) -> str | None:
    """Return why a message of a method without tensors is too large to parse, or None."""
    return _too_long(len(message), "the message") if len(message) > MAX_SMALL else None


def _too_long(size: int, what: str = "a field of the message") -> str:
    return f"{what} has {size} bytes, at most {MAX_SMALL} are allowed"


def _fields(message: bytes, at: int, end: int) -> Iterator[_Field]:
    """Yield the fields between `at` and `end`, as far as they can be read."""
    while at < end:
        tag, at = _varint(message, at, end)
        kind, size = tag & 7, 0
        if kind == _VARINT:
            _, at = _varint(message, at, end)
        elif kind == _BYTES:
            size, at = _varint(message, at, end)
        elif kind == _FIXED64:
            at += 8
        elif kind == _FIXED32:
            at += 4
        if at + size > end:
            return
        yield _Field(tag >> 3, at, at + size)
        at += size


def _varint(message: bytes, at: int, end: int) -> tuple[int, int]:
    """Decode the varint at `at`, of up to ten bytes; return its value and the next position."""
    found = 0
    for index in range(min(10, end - at)):
        byte = message[at + index]
        found |= (byte & 127) << 7 * index
        if byte < 128:
            return found, at + index + 1
    return 0, end + 1
