"""Parse tool calls in the text of a model, piece by piece.

Whole answers use the same parser as streams, so that both have the same result. The parser is
independent of tokens. A call is a JSON object with the name of a tool and its arguments:

    <tool_call>                                                     Hermes, Qwen: any number, among
    {"name": "get_weather", "arguments": {"city": "Rome"}}          text
    </tool_call>

    {"name": "get_weather", "parameters": {"city": "Rome"}}         Llama 3: the whole answer, in
                                                                    ";" separates several
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum

from gptmanager.server.chat.answer_parts import (
    Arguments,
    CallBegins,
    Content,
    Found,
    ThoughtSpan,
)
from gptmanager.server.chat.text_scan import ObjectScan, num_tag_letters

OPENER, CLOSER = "<tool_call>", "</tool_call>"

# up to arguments that are an object; a model may write "type" first
_HEADER = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_CALL_KEYS = ("name", "type", "id", "arguments", "parameters")


class _State(Enum):
    CONTENT = "text, until a call begins"
    HEADER = "a call, until its arguments begin"
    ARGUMENTS = "the arguments of a call"
    REST = "the rest of the call's object"
    BETWEEN = "after a call"
    PLAIN = "text to the end: an answer without calls"


class ToolCallParser:
    """Takes the text of one answer in pieces, and returns its content and calls.

    `names`: the tools that may be called; an object with another name is text. `tagged`: calls are
    in <tool_call> tags, as Hermes and Qwen write them; else the whole answer is calls, as Llama 3
    writes them.
    """

    def __init__(self, names: Collection[str], *, tagged: bool) -> None:
        self._names = frozenset(names)
        self._tagged = tagged
        self._state = _State.CONTENT if tagged else _State.BETWEEN
        self._text = ""  # not returned yet
        self._before = ""  # text skipped before a possible call, returned if it is not a call
        self._whole = ObjectScan()  # scans a call's object from its first brace
        self._num_scanned = 0  # characters that `_whole` has scanned
        self._arguments = ObjectScan()  # scans a call's object from its arguments on
        self.num_calls = 0
        self.thoughts: list[ThoughtSpan] = []  # this parser looks for none

    @property
    def is_in_arguments(self) -> bool:
        """Whether the last call's arguments have begun and not ended."""
        return self._state is _State.ARGUMENTS

    def push(self, text: str) -> list[Found]:
        """Take new text; return what is found so far."""
        self._text += text
        found: list[Found] = []
        while self._step(found):
            pass
        return found

    def flush(self) -> list[Found]:
        """Return what was held back at the end of the answer."""
        found: list[Found] = []
        rest, self._text = self._text, ""
        if self._state is _State.HEADER:
            self._add_content(self._before + rest, found)
        elif self._state in (_State.CONTENT, _State.PLAIN) or not self.num_calls:
            if rest.strip() or not self.num_calls:
                self._add_content(rest, found)
        return found

    # One step in the state table; returns False if it needs more text --------------------------

    def _step(self, found: list[Found]) -> bool:
        if self._state is _State.CONTENT:
            return self._read_content(found)
        if self._state is _State.BETWEEN:
            return self._read_between()
        if self._state is _State.HEADER:
            return self._read_header(found)
        if self._state is _State.PLAIN:
            self._add_content(self._take(len(self._text)), found)
            return False
        return self._read_object(found)

    def _read_content(self, found: list[Found]) -> bool:
        """Return text up to a tag, without the spaces before it; hold back a possible tag."""
        at = self._text.find(OPENER)
        end = at if at >= 0 else len(self._text) - num_tag_letters(self._text, OPENER)
        stripped = len(self._text[:end].rstrip())
        if stripped or at >= 0:
            said = self._take(stripped)
            if said:
                self._add_content(said, found)
        if at < 0:
            return False
        self._before = self._take(end - stripped + len(OPENER))
        self._begin()
        return True

    def _read_between(self) -> bool:
        """Skip separators after a call, or before the first call of an answer without tags."""
        skipped = " \t\r\n" + (";" if self.num_calls and not self._tagged else "")
        rest = self._text.lstrip(skipped)
        if self._tagged:
            if rest.startswith(CLOSER):
                self._text, self._state = rest[len(CLOSER) :], _State.CONTENT
                return True
            if CLOSER.startswith(rest):
                return False
            self._text, self._state = rest, _State.CONTENT
            return True
        if not rest:
            return False
        self._before, self._text = self._text[: -len(rest)], rest
        if rest.startswith("{"):
            self._begin()
        else:
            self._text, self._state = self._before + rest, _State.PLAIN
        return True

    def _begin(self) -> None:
        self._state, self._whole, self._num_scanned = _State.HEADER, ObjectScan(), 0

    def _read_header(self, found: list[Found]) -> bool:
        """Read a call up to its arguments, or the whole object if its keys are in another order."""
        header = _HEADER.match(self._text)
        if header and header[1] in self._names:
            self._call(header[1], found)
            self._arguments = ObjectScan()
            self._arguments.take(self._take(header.end()))
            self._state = _State.ARGUMENTS
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
        self._state = _State.BETWEEN
        return True

    def _reject_call(self, found: list[Found]) -> bool:
        self._add_content(self._before, found)
        self._state = _State.CONTENT if self._tagged else _State.PLAIN
        return True

    def _read_object(self, found: list[Found]) -> bool:
        """Read the arguments, a nested object, and then the rest of the call's object."""
        if not self._text:
            return False
        is_arguments = self._state is _State.ARGUMENTS
        end = self._arguments.take(self._text, depth=1 if is_arguments else 0)
        piece = self._take(len(self._text) if end is None else end)
        if is_arguments:
            found.append(Arguments(self.num_calls - 1, piece))
        if end is not None:
            self._state = _State.REST if is_arguments else _State.BETWEEN
        return end is not None

    # Parts of a step -------------------------------------------------------------------------

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken

    def _call(self, name: str, found: list[Found]) -> None:
        found.append(CallBegins(self.num_calls, name))
        self.num_calls += 1

    @staticmethod
    def _add_content(text: str, found: list[Found]) -> None:
        if text:
            found.append(Content(text))


def _read_call(text: str) -> tuple[str, str] | None:
    """Return name and arguments (as JSON) of a call with its keys in any order; None for others."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters"))
    if not isinstance(name, str):
        return None
    if isinstance(arguments, str):  # some models write JSON in a JSON string
        return name, arguments
    return name, json.dumps({} if arguments is None else arguments, ensure_ascii=False)
