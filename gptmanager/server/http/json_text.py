"""JSON that a client has sent: what it would take is estimated before it is parsed."""

from __future__ import annotations

import re
from typing import Any

import orjson

from gptmanager.server.errors import ApiError

# The parser holds the interpreter, and each list or object makes the garbage collector look through
# everything again and again: 400,000 of them take half a second.
MAX_CONTAINERS = 1 << 16
# Bytes of a list or an object, of a text, and of a number with its place in a list. A text has two
# quotes.
_OF_CONTAINER, _OF_QUOTE, _OF_COMMA = 88, 32, 40
_ALWAYS, _FOR_EACH_BYTE = 48 << 20, 7
_LOOKED_INTO = 8 << 20  # bytes of the longest text whose texts are told from what is around them
_TEXTS = re.compile(rb'"[^"]*"')


def parse_json(text: bytes) -> Any:
    """Return what `text` says. ApiError 400 for what is not JSON, and for text that would take much
    more time or memory than it is long: empty lists take thirty times their text.
    """
    problem = _problem(text, len(text))
    if problem is not None and len(text) <= _LOOKED_INTO:
        problem = _problem(_structure(text), len(text))
    if problem is not None:
        raise ApiError(400, f"the body's JSON {problem}", code="invalid_json")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None


def _structure(text: bytes) -> bytes:
    """Return a JSON text with empty texts. Escapes go first, so that no pattern has to go back."""
    return _TEXTS.sub(b'""', text.replace(rb"\\", b"").replace(rb"\"", b""))


def _problem(text: bytes, size: int) -> str | None:
    """Return what is too much for `size` bytes; None: nothing is."""
    containers = text.count(b"[") + text.count(b"{")
    if containers > MAX_CONTAINERS:
        return f"has {containers} lists and objects, at most {MAX_CONTAINERS} are allowed"
    estimate = (
        _OF_CONTAINER * containers + _OF_QUOTE * text.count(b'"') + _OF_COMMA * text.count(b",")
    )
    limit = _ALWAYS + _FOR_EACH_BYTE * size
    if estimate > limit:
        return (
            f"would take about {estimate >> 20} MiB in memory, at most {limit >> 20} MiB are "
            f"allowed for {size} bytes"
        )
    return None
