"""Parses calls that are JSON objects with the name of a tool and its arguments."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar

from gptmanager.callbacks.answers.parsing.answer_parts import Arguments, Found
from gptmanager.callbacks.answers.parsing.call_parser import CallParser, State
from gptmanager.callbacks.answers.parsing.python_values import STRICT_JSON, as_json
from gptmanager.callbacks.answers.parsing.text_scan import ObjectScan


def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern that is matched again with each piece of a call, so it limits spaces."""
    return re.compile(pattern.replace(r"\s*", r"\s{0,64}"))


# A call up to its arguments, if they are an object. A model may write a type or an id first.
_HEADER = _compiled(
    r'\s*\{\s*(?:(?:"type"\s*:\s*"function"|"(?:tool_call_)?id"\s*:\s*"[^"\\]{0,128}")\s*,\s*)?'
    r'"(?:tool_)?name"\s*:\s*"([^"\\]{0,128})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_FIRST_KEY = _compiled(r'\{\s*"([^"\\]{0,64})"')
_CALL_KEYS = ("name", "type", "id", "arguments", "parameters", "tool_call_id", "tool_name")


class JsonCallParser(CallParser):
    """Parses calls that are JSON objects.

    `separator`: text that may be between two calls, besides white space.
    """

    separator: ClassVar[str] = ""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._depth = 1
        self._whole = ObjectScan()  # scans a call's object from its first brace
        self._num_scanned = 0  # characters that `_whole` has scanned

    def _begins_call(self, rest: str) -> bool:
        return rest.startswith("{")

    def _begin(self, opener: str) -> None:
        super()._begin(opener)
        self._whole, self._num_scanned = ObjectScan(), 0

    def _read_header(self, found: list[Found]) -> bool:
        """Read a call up to its arguments, or the whole object if `_HEADER` does not match."""
        header = _HEADER.match(self._text)
        if header and header[1] in self._names:
            self._call(header[1], found)
            self._arguments = ObjectScan()
            self._arguments.take(self._take(header.end()))
            self._state = State.ARGUMENTS
            return True
        if not self._num_scanned:
            self._before += self._take(len(self._text) - len(self._text.lstrip()))
        key = _FIRST_KEY.match(self._text)
        if self._text[:1] not in ("", "{") or (key and key[1] not in _CALL_KEYS):
            return self._reject_call(found)
        end = self._whole.take(self._text[self._num_scanned :])
        if end is None:
            self._num_scanned = len(self._text)
            return False
        call = _read_call(self._text[: self._num_scanned + end])
        if call is None or call[0] not in self._names:
            return self._reject_call(found)
        self._call(call[0], found)
        found.append(Arguments(self.num_calls - 1, call[1]))
        self._take(self._num_scanned + end)
        self._state = State.BETWEEN
        return True

    def _read_between(self) -> bool:
        if not self.separator:
            return super()._read_between()
        rest = self._text.lstrip().removeprefix(self.separator).lstrip()
        if not rest:
            return False
        if rest.startswith("{"):
            self._before, self._text = self._text[: -len(rest)], rest
            self._begin("")
            return True
        return super()._read_between()


def _read_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments (as JSON) of a call with keys in any order.

    The result is None if the object is not a call.
    """
    try:
        call = STRICT_JSON.decode(text)
    except (ValueError, RecursionError):
        return None
    name = call.get("name", call.get("tool_name"))
    arguments = call.get("arguments", call.get("parameters"))
    if not isinstance(name, str):
        return None
    if isinstance(arguments, str):  # some models write JSON in a JSON string
        return name, arguments
    return name, as_json({} if arguments is None else arguments)
