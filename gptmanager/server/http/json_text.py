"""JSON that a client has sent: what it would take is estimated before it is parsed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import orjson

from gptmanager.server.errors import ApiError

# The parser holds the interpreter, and each list or object makes the garbage collector look through
# everything again and again: 400,000 of them take half a second. Values that are not nested take a
# tenth of a second for a million.
MAX_JSON_BYTES = 16 << 20
MAX_CONTAINERS = 1 << 16
MAX_VALUES = 1 << 21
# Bytes of a list or an object, of a text, and of a number with its place in a list. A text has two
# quotes.
_OF_CONTAINER, _OF_QUOTE, _OF_COMMA = 88, 32, 40
_ALWAYS, _FOR_EACH_BYTE = 48 << 20, 7
_QUOTE = ord('"')


class _Counts(NamedTuple):
    """How many characters of each kind a JSON text has."""

    containers: int
    quotes: int
    commas: int


def parse_json(text: bytes) -> Any:
    """Return what `text` says. ApiError 400 for what is not JSON, and for text that would take much
    more time or memory than it is long: empty lists take thirty times their text.
    """
    problem = _problem(text)
    if problem is not None:
        raise ApiError(400, f"the body's JSON {problem}", code="invalid_json")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None


def _problem(text: bytes) -> str | None:
    """Return what is too much for a text of this size; None: nothing is."""
    if len(text) > MAX_JSON_BYTES:
        return (
            f"has {len(text)} bytes, at most {MAX_JSON_BYTES} are allowed: pass large tensors as "
            "binary data"
        )
    problem = _problem_of(_all_counts(text), len(text))
    return problem and _problem_of(_counts_outside_texts(text), len(text))


def _problem_of(counts: _Counts, size: int) -> str | None:
    if counts.containers > MAX_CONTAINERS:
        return f"has {counts.containers} lists and objects, at most {MAX_CONTAINERS} are allowed"
    if counts.commas >= MAX_VALUES:
        return f"has {counts.commas + 1} values, at most {MAX_VALUES} are allowed"
    estimate = (
        _OF_CONTAINER * counts.containers + _OF_QUOTE * counts.quotes + _OF_COMMA * counts.commas
    )
    limit = _ALWAYS + _FOR_EACH_BYTE * size
    if estimate > limit:
        return (
            f"would take about {estimate >> 20} MiB in memory, at most {limit >> 20} MiB are "
            f"allowed for {size} bytes"
        )
    return None


def _all_counts(text: bytes) -> _Counts:
    """Count what is inside of texts, too: fast, and never too few."""
    return _Counts(text.count(b"[") + text.count(b"{"), text.count(b'"'), text.count(b","))


def _counts_outside_texts(text: bytes) -> _Counts:
    """Escapes go first, so that each quote that is left begins or ends a text. NumPy lets go of the
    interpreter meanwhile, which a regular expression would hold for a quarter of a second.
    """
    if b"\\" in text:
        text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    letters = np.frombuffer(text, np.uint8)
    quotes = letters == _QUOTE
    outside = np.bitwise_xor.accumulate(quotes.view(np.uint8)) == 0

    def count(letter: str) -> int:
        return int(np.count_nonzero((letters == ord(letter)) & outside))

    return _Counts(count("[") + count("{"), int(np.count_nonzero(quotes)), count(","))
