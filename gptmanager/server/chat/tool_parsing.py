"""Calls of tools, found in the text of a model while it comes.

Decides what of a text is a call, and what is said to the client. Knows nothing of tokens. A whole
answer goes through the same parser as a stream, so that both say the same.

A call is a JSON object with the name of a tool and its arguments:

    <tool_call>                                                     Hermes, Qwen: any number, among
    {"name": "get_weather", "arguments": {"city": "Rome"}}          text
    </tool_call>

    {"name": "get_weather", "parameters": {"city": "Rome"}}         Llama 3: the whole answer, in
                                                                    which ";" parts several
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

OPENER, CLOSER = "<tool_call>", "</tool_call>"

# as far as the arguments, if they are an object; a model may say first that it is a function
_HEADER = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_CALL_KEYS = ("name", "type", "id", "arguments", "parameters")
_BREAKS = re.compile(r'["{}\[\]]')
_QUOTE = re.compile(r'["\\]')


@dataclass(frozen=True, slots=True)
class Content:
    """Text for people."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call of the tool `name`; `index` counts the calls of an answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments, which are JSON in the model's own letters."""

    index: int
    text: str


Found = Content | CallBegins | Arguments


class _State(Enum):
    CONTENT = "text, until a call begins"
    HEADER = "a call, until its arguments begin"
    ARGUMENTS = "its arguments"
    REST = "what follows them in the object"
    BETWEEN = "behind a call"
    PLAIN = "text, to the end: an answer that is no call"


class ToolCallParser:
    """Takes the text of one answer in pieces; gives what it amounts to.

    `names`: the tools that may be called; an object that names another one is text. `tagged`: calls
    stand in <tool_call>, as Hermes and Qwen write them; else the answer is calls, as Llama 3's.
    """

    def __init__(self, names: Collection[str], *, tagged: bool) -> None:
        self._names = frozenset(names)
        self._tagged = tagged
        self._state = _State.CONTENT if tagged else _State.BETWEEN
        self._text = ""  # not given out yet
        self._before = ""  # what was left out before the call that begins, should it be none
        self._whole = _ObjectScan()  # the object of a call, until its arguments begin
        self._num_scanned = 0  # letters of it
        self._arguments = _ObjectScan()  # the same from there on
        self.num_calls = 0

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
            self._say(self._before + rest, found)
        elif self._state in (_State.CONTENT, _State.PLAIN) or not self.num_calls:
            if rest.strip() or not self.num_calls:
                self._say(rest, found)
        return found

    # One step: what can be said of the text now; False where more of it is needed ------------

    def _step(self, found: list[Found]) -> bool:
        if self._state is _State.CONTENT:
            return self._read_content(found)
        if self._state is _State.BETWEEN:
            return self._read_between()
        if self._state is _State.HEADER:
            return self._read_header(found)
        if self._state is _State.PLAIN:
            self._say(self._take(len(self._text)), found)
            return False
        return self._read_object(found)

    def _read_content(self, found: list[Found]) -> bool:
        """Up to a tag; spaces before one are left out, and a tag may have begun."""
        at = self._text.find(OPENER)
        end = at if at >= 0 else len(self._text) - _begun(self._text, OPENER)
        stripped = len(self._text[:end].rstrip())
        if stripped or at >= 0:
            said = self._take(stripped)
            if said:
                self._say(said, found)
        if at < 0:
            return False
        self._before = self._take(end - stripped + len(OPENER))
        self._begin()
        return True

    def _read_between(self) -> bool:
        """Behind a call, or before the first one of an answer without tags."""
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
        self._state, self._whole, self._num_scanned = _State.HEADER, _ObjectScan(), 0

    def _read_header(self, found: list[Found]) -> bool:
        """Until the arguments begin, or until the whole object tells what it is."""
        header = _HEADER.match(self._text)
        if header and header[1] in self._names:
            self._call(header[1], found)
            self._arguments = _ObjectScan()
            self._arguments.take(self._take(header.end()))
            self._state = _State.ARGUMENTS
            return True
        if not self._num_scanned:
            self._before += self._take(len(self._text) - len(self._text.lstrip()))
        key = _FIRST_KEY.match(self._text)
        if self._text[:1] not in ("", "{") or (key and key[1] not in _CALL_KEYS):
            return self._is_no_call(found)
        end = self._whole.take(self._text[self._num_scanned :])
        if end is None:
            self._num_scanned = len(self._text)
            return False
        call = _read_call(self._text[: self._num_scanned + end])
        if call is None or call[0] not in self._names:
            return self._is_no_call(found)
        self._call(call[0], found)
        found.append(Arguments(self.num_calls - 1, call[1]))
        self._take(self._num_scanned + end)
        self._state = _State.BETWEEN
        return True

    def _is_no_call(self, found: list[Found]) -> bool:
        self._say(self._before, found)
        self._state = _State.CONTENT if self._tagged else _State.PLAIN
        return True

    def _read_object(self, found: list[Found]) -> bool:
        """The arguments, which are an object in the call's, and what follows them."""
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
    def _say(text: str, found: list[Found]) -> None:
        if text:
            found.append(Content(text))


class _ObjectScan:
    """Where a JSON object ends, in a text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_text = False
        self._is_escaped = False

    def take(self, text: str, depth: int = 0) -> int | None:
        """The index behind the brace that leads back to `depth`; None if it has not come."""
        at = 0
        if self._is_escaped and text:
            self._is_escaped, at = False, 1
        while True:
            found = (_QUOTE if self._is_text else _BREAKS).search(text, at)
            if found is None:
                return None
            at = found.end()
            if found[0] == "\\":
                if at == len(text):
                    self._is_escaped = True
                at += 1
            elif found[0] == '"':
                self._is_text = not self._is_text
            else:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth == depth and found[0] in "}]":
                    return at


def _begun(text: str, tag: str) -> int:
    """How many letters at the end of `text` may be the beginning of `tag`."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments (as JSON) of an object in any order of its keys; None if it is no call."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters"))
    if not isinstance(name, str):
        return None
    if isinstance(arguments, str):  # some models put JSON into a JSON text
        return name, arguments
    return name, json.dumps({} if arguments is None else arguments, ensure_ascii=False)
