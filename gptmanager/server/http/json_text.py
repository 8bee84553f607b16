"""Parses a client's JSON, but first estimates the memory that its values need."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from typing import Any, NamedTuple

import numpy as np
import orjson

from gptmanager.server.errors import ApiError

# The parser holds the interpreter lock, and lists and objects trigger full runs of the garbage
# collector: 400,000 lists take 0.5 s. A million values that are not nested take 0.1 s.
MAX_JSON_BYTES = 16 << 20
MAX_CONTAINERS = 1 << 16
MAX_VALUES = 1 << 21
# Bytes of memory that are estimated for each list or object, for each quote (a string has two), and
# for each comma (a number and its slot in a list).
_CONTAINER_BYTES, _QUOTE_BYTES, _COMMA_BYTES = 88, 32, 40
_BASE_LIMIT, _LIMIT_PER_BYTE = 48 << 20, 7
_QUOTE = ord('"')


class _Counts(NamedTuple):
    """Numbers of opening brackets, quotes and commas in a JSON text."""

    containers: int
    quotes: int
    commas: int


def parse_json(text: bytes) -> Any:
    """Parse `text`. Raise ApiError (400) if it is not JSON, or needs far too much time or memory.

    The values may need much more memory than the text: empty lists, for instance, thirty times. A
    byte order mark of UTF-8 is skipped, because editors and shells on Windows write it to files.
    """
    problem = _problem(text)
    if problem is not None:
        raise ApiError(400, f"the body's JSON {problem}", code="invalid_json")
    try:
        return orjson.loads(text.removeprefix(BOM_UTF8))
    except orjson.JSONDecodeError as error:
        message = f"the body is not JSON: {_not_utf8(text) or error}"
        raise ApiError(400, message, code="invalid_json") from None


def _not_utf8(text: bytes) -> str | None:
    """Return why `text` is not UTF-8, or None. The parser does not say which byte is wrong."""
    encoding = json.detect_encoding(text)
    if not encoding.startswith("utf-8"):
        return f"it must be UTF-8, but begins like {encoding}"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"it must be UTF-8, but byte {error.start} (0x{text[error.start]:02x}) is not"
    return None


def _problem(text: bytes) -> str | None:
    """Return a description of the limit that `text` exceeds, or None."""
    if len(text) > MAX_JSON_BYTES:
        return (
            f"has {len(text)} bytes, at most {MAX_JSON_BYTES} are allowed: send large tensors as "
            "binary data"
        )
    problem = _problem_of(_all_counts(text), len(text))
    return problem and _problem_of(_counts_outside_strings(text), len(text))


def _problem_of(counts: _Counts, size: int) -> str | None:
    if counts.containers > MAX_CONTAINERS:
        return f"has {counts.containers} lists and objects, at most {MAX_CONTAINERS} are allowed"
    if counts.commas >= MAX_VALUES:
        return f"has {counts.commas + 1} values, at most {MAX_VALUES} are allowed"
    estimate = (
        _CONTAINER_BYTES * counts.containers
        + _QUOTE_BYTES * counts.quotes
        + _COMMA_BYTES * counts.commas
    )
    limit = _BASE_LIMIT + _LIMIT_PER_BYTE * size
    if estimate > limit:
        return (
            f"would need about {estimate >> 20} MiB of memory, at most {limit >> 20} MiB are "
            f"allowed for {size} bytes"
        )
    return None


def _all_counts(text: bytes) -> _Counts:
    """Count brackets, quotes and commas, also inside strings. The counts may be too high."""
    return _Counts(text.count(b"[") + text.count(b"{"), text.count(b'"'), text.count(b","))


def _counts_outside_strings(text: bytes) -> _Counts:
    """Count brackets and commas outside strings, and the quotes that begin or end a string.

    Escapes are removed first, so that each remaining quote begins or ends a string. NumPy releases
    the interpreter lock while it counts; a regular expression would hold the lock for 0.25 s.
    """
    text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    letters = np.frombuffer(text, np.uint8)
    quotes = letters == _QUOTE
    outside = np.bitwise_xor.accumulate(quotes.view(np.uint8)) == 0

    def count(letter: str) -> int:
        return int(np.count_nonzero((letters == ord(letter)) & outside))

    return _Counts(count("[") + count("{"), int(np.count_nonzero(quotes)), count(","))
