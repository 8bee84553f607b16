"""JSON that a client has sent: what it would take in memory is estimated before it is parsed."""

from __future__ import annotations

from typing import Any

import orjson

from gptmanager.server.errors import ApiError

# Bytes of a list or an object, of a text, and of a number with its place in a list. A text has two
# quotes. What stands inside of texts counts, too, so that the estimate is never too low.
_OF_BRACKET, _OF_QUOTE, _OF_COMMA = 88, 32, 40
_ALWAYS, _FOR_EACH_BYTE = 48 << 20, 7


def parse_json(text: bytes) -> Any:
    """Return what `text` says. ApiError 400 for what is not JSON, and for text that would take much
    more memory than it is long: millions of empty lists take thirty times their text.
    """
    estimate = (
        _OF_BRACKET * (text.count(b"[") + text.count(b"{"))
        + _OF_QUOTE * text.count(b'"')
        + _OF_COMMA * text.count(b",")
    )
    limit = _ALWAYS + _FOR_EACH_BYTE * len(text)
    if estimate > limit:
        raise ApiError(
            400,
            f"the body's JSON would take about {estimate >> 20} MiB in memory: at most "
            f"{limit >> 20} MiB are allowed for {len(text)} bytes",
            code="invalid_json",
        )
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
