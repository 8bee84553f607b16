"""`CallParser`: finds tool calls in a model's text as it arrives. Each format is a subclass.

Whole answers and streams use the same parser, and have the same result. The result does not depend
on how the text is divided into pieces.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Sequence
from enum import Enum
from typing import ClassVar

from gptmanager.callbacks.answers.parsing.answer_parts import Arguments, CallBegins, Content, Found
from gptmanager.callbacks.answers.parsing.stepwise_parser import StepwiseParser
from gptmanager.callbacks.answers.parsing.text_scan import ObjectScan, num_tag_letters

NAME = re.compile(r"[A-Za-z0-9_.-]{0,128}")
SPACE = re.compile(r"\s{0,64}")
OBJECT = re.compile(r"(?=\{)")


class State(Enum):
    """The text that a `CallParser` reads next."""

    CONTENT = "text, until a tag begins a call"
    START = "spaces before an answer that is calls or text"
    HEADER = "a call, until its arguments begin"
    ARGUMENTS = "the arguments of a call"
    REST = "the rest of the call's object"
    BETWEEN = "after a call"
    PLAIN = "text to the end"


class CallParser(StepwiseParser):
    """Divides the text of one answer into content and calls. It finds no thoughts.

    `names`: the tools that may be called; a call of another tool is content. `openers`: tags that
    begin a call within text; spaces before the tag of a call are dropped. In a format without
    openers, an answer that begins with text has no calls. `closers`: tags after a call, which are
    dropped.
    """

    openers: ClassVar[tuple[str, ...]] = ()
    closers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.num_calls = 0
        self._names = frozenset(names)
        self._state = State.CONTENT if self.openers else State.START
        self._num_searched = 0  # characters of `_text` in which no opener begins
        self._before = ""  # text taken before a possible call; content if no call follows
        self._arguments = ObjectScan()
        self._depth = 0  # depth of the scan at which the arguments end

    @property
    def is_in_arguments(self) -> bool:
        """Whether the last call's arguments have begun and not ended."""
        return self._state is State.ARGUMENTS

    def flush(self) -> list[Found]:
        """End the answer, and return the text that was held back, as content.

        The rest of a call after its header, and spaces after calls, are dropped.
        """
        found: list[Found] = []
        rest = self._take(len(self._text))
        if self._state is State.HEADER:
            self._add_content(self._before + rest, found)
        elif self._state in (State.CONTENT, State.PLAIN) or not self.num_calls:
            if rest.strip() or not self.num_calls:
                self._add_content(rest, found)
        return found

    def _step(self, found: list[Found]) -> bool:
        """Take one step of the state machine; return False if it needs more text."""
        if self._state is State.CONTENT:
            return self._read_content(found)
        if self._state is State.START:
            return self._read_start()
        if self._state is State.HEADER:
            return self._read_header(found)
        if self._state is State.ARGUMENTS:
            return self._read_arguments(found)
        if self._state is State.REST:
            return self._read_rest()
        if self._state is State.BETWEEN:
            return self._read_between()
        self._add_content(self._take(len(self._text)), found)
        return False

    def _read_content(self, found: list[Found]) -> bool:
        """Add the text before the next opener to `found`.

        Spaces at the end of the text, and letters that may begin an opener, are held back.
        """
        places = ((self._text.find(tag, self._num_searched), tag) for tag in self.openers)
        at, opener = min((one for one in places if one[0] >= 0), default=(-1, ""))
        held = max(num_tag_letters(self._text, tag) for tag in self.openers)
        end = at if at >= 0 else len(self._text) - held
        stripped = len(self._text[:end].rstrip())
        self._add_content(self._take(stripped), found)
        # an opener may begin in the last letters
        self._num_searched = max(0, len(self._text) - held) if at < 0 else 0
        if at < 0:
            return False
        self._before = self._take(end - stripped + len(opener))
        self._begin(opener)
        return True

    def _read_start(self) -> bool:
        """Decide whether the answer begins with a call, perhaps after spaces."""
        rest = self._text.lstrip()
        if not rest:
            return False
        if self._begins_call(rest):
            self._before, self._text = self._text[: -len(rest)], rest
            self._begin("")
        else:
            self._state = State.PLAIN
        return True

    def _begins_call(self, rest: str) -> bool:
        """Return whether `rest`, the beginning of an answer without tags, may be a call."""
        return False

    def _begin(self, opener: str) -> None:
        """Go to the header of a call, which follows the tag `opener`."""
        self._state = State.HEADER

    @abstractmethod
    def _read_header(self, found: list[Found]) -> bool:
        """Read a call up to its arguments."""

    def _read_arguments(self, found: list[Found]) -> bool:
        """Add the next part of the arguments, which are a JSON object, to `found`."""
        if not self._text:
            return False
        end = self._arguments.take(self._text, depth=self._depth)
        piece = self._take(len(self._text) if end is None else end)
        found.append(Arguments(self.num_calls - 1, piece))
        if end is not None:
            self._state = State.REST if self._depth else State.BETWEEN
        return end is not None

    def _read_rest(self) -> bool:
        """Drop the rest of the JSON object that contains the arguments."""
        end = self._arguments.take(self._text) if self._text else None
        self._take(len(self._text) if end is None else end)
        if end is not None:
            self._state = State.BETWEEN
        return end is not None

    def _read_between(self) -> bool:
        """Drop closing tags after a call."""
        rest = self._text.lstrip()
        for tag in self.closers:
            if rest.startswith(tag):
                self._text = rest[len(tag) :]
                return True
        if any(tag.startswith(rest) for tag in self.closers):
            return False
        self._state = State.CONTENT if self.openers else State.PLAIN
        return True

    # Parts of a step -------------------------------------------------------------------------

    def _call(self, name: str, found: list[Found], call_id: str = "") -> None:
        found.append(CallBegins(self.num_calls, name, call_id))
        self.num_calls += 1

    def _reject_call(self, found: list[Found]) -> bool:
        self._add_content(self._before, found)
        self._state = State.CONTENT if self.openers else State.PLAIN
        return True

    def _add_content(self, text: str, found: list[Found]) -> None:
        """Add `text`, which ends at the last taken character, to `found` as content."""
        end = self._num_taken
        if text:
            found.append(Content(text, end - len(text), end))


class HeadedCallParser(CallParser):
    """Parses calls that consist of a header of tags and a JSON object with the arguments.

    `headers`: for each opener, the headers that may follow it. A header is a sequence of tags and
    patterns; the text of its first `NAME` is the name of the tool. The part of a header that
    matches `id_pattern`, if there is one, is the id of the call.
    """

    headers: ClassVar[dict[str, tuple[tuple[str | re.Pattern[str], ...], ...]]]
    id_pattern: ClassVar[re.Pattern[str] | None] = None

    def _begin(self, opener: str) -> None:
        super()._begin(opener)
        self._opener = opener

    def _read_header(self, found: list[Found]) -> bool:
        read = [read_header(self._text, header) for header in self.headers[self._opener]]
        name, end = next((it for it in read if it is not None and it[1]), ("", 0))
        if not end and any(it is not None for it in read):
            return False  # needs more text
        if name not in self._names:
            return self._reject_call(found)
        header = self._take(end)
        found_id = self.id_pattern and self.id_pattern.search(header)
        self._call(name, found, found_id[0] if found_id else "")
        self._begin_arguments(found)
        return True

    def _begin_arguments(self, found: list[Found]) -> None:
        self._arguments, self._depth = ObjectScan(), 0
        self._state = State.ARGUMENTS


def read_header(
    text: str, header: Sequence[str | re.Pattern[str]], pattern: re.Pattern[str] = NAME
) -> tuple[str, int] | None:
    """Return the name in a header at the beginning of `text`, and the index after the header.

    `pattern` is the part of the header that is the name. If the text ends within the header, the
    name is "" and the index 0. The result is None if the text cannot be this header, for instance
    because the name is empty.
    """
    at, name = 0, ""
    for part in header:
        if at == len(text):
            return "", 0
        if isinstance(part, str):
            if not text.startswith(part, at):
                return ("", 0) if part.startswith(text[at:]) else None
            at += len(part)
            continue
        found = part.match(text, at)
        if found is None:
            return None
        at = found.end()
        if part is pattern:
            name = name or found[0]
            if not name:
                return None
    return name, at
