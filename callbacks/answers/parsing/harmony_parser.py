"""Parses the harmony format of gpt-oss: an answer is several messages, each with a header.

    <|channel|>analysis<|message|>a thought<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}
    <|start|>assistant<|channel|>final<|message|>the answer

A prompt usually ends with `<|start|>assistant`. The parser reads text, not tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum

from gptmanager.callbacks.answers.parsing.answer_parts import (
    Arguments,
    CallBegins,
    Content,
    Found,
    Thought,
    ThoughtSpan,
)
from gptmanager.callbacks.answers.parsing.stepwise_parser import StepwiseParser
from gptmanager.callbacks.answers.parsing.text_scan import ObjectScan, num_tag_letters

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
TAGS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)

_LONGEST = max(map(len, TAGS))
_LONGEST_HEADER = 1024  # characters of a header; a longer one is content
_ENDS = re.compile("|".join(map(re.escape, (END, CALL, RETURN, START, CHANNEL))))
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([A-Za-z0-9_.-]{1,128})")
_FIRST_HEADER = (CHANNEL, MESSAGE, CONSTRAIN, START, "to=")  # beginnings of the first header


class _State(Enum):
    """The text that a `HarmonyParser` reads next."""

    HEADER = "a header, until its message begins"
    BODY = "a message, until it ends"
    BETWEEN = "after a message"


def is_in_final(prompt: str) -> bool:
    """Return whether `prompt`, which is a prompt's last header, begins the final answer."""
    channel = _CHANNEL.search(prompt)
    return channel is not None and channel[1] == "final" and MESSAGE in prompt


class HarmonyParser(StepwiseParser):
    """Divides the text of one answer into thoughts, content and calls.

    `names`: the tools that may be called; a message to another function is content. `prompt`: the
    last header of the prompt, from `<|start|>` on. The answer continues this header. Several
    thoughts, or several messages of content, are joined by line breaks. If an answer begins without
    a header, its first text is content.
    """

    def __init__(self, names: Collection[str] = (), prompt: str = "") -> None:
        super().__init__()
        self.num_calls = 0
        self._names: frozenset[str] = frozenset()
        self._state = _State.HEADER
        self._is_first = True  # the message is the answer's first
        # the kind of the message, or None if it is a call
        self._kind: type[Thought] | type[Content] | None = None
        self._arguments = ObjectScan()  # scans the last call
        self._has_all_arguments = True
        self._said: set[type] = set()  # the kinds of parts returned so far
        self._needs_break = False  # a line break must precede the next text
        self._continue(prompt)
        self._names = frozenset(names)

    def _continue(self, prompt: str) -> None:
        """Go to the state after the prompt's text, none of which belongs to the answer."""
        self.push(prompt)
        at = self._text.find(CHANNEL)
        self._text = self._text[at:] if at >= 0 else ""
        self.num_pushed = 0
        self._is_first = self._state is _State.HEADER
        self._needs_break, self._said = False, set()
        is_thought = self._state is _State.BODY and self._kind is Thought
        self.thoughts = [ThoughtSpan(0)] if is_thought else []

    @property
    def is_in_arguments(self) -> bool:
        return not self._has_all_arguments

    def flush(self) -> list[Found]:
        found: list[Found] = []
        if self._state is _State.HEADER and self._is_first and "<|" not in self._text:
            self._begin(Content)
        if self._state is _State.BODY:
            self._add(self._take(len(self._text)), found)
        return found

    def _step(self, found: list[Found]) -> bool:
        """Take one step of the state machine; return False if it needs more text."""
        if self._state is _State.HEADER:
            return self._read_header(found)
        if self._state is _State.BODY:
            return self._read_body(found)
        at = self._text.find(START)
        self._take(at + len(START) if at >= 0 else len(self._text) - self._num_held())
        if at >= 0:
            self._state = _State.HEADER
        return at >= 0

    def _read_header(self, found: list[Found]) -> bool:
        rest = self._text.lstrip()
        if self._is_first and not any(
            rest.startswith(one) or one.startswith(rest) for one in _FIRST_HEADER
        ):
            self._begin(Content)
            return True
        at = self._text.find(MESSAGE, 0, _LONGEST_HEADER)
        if at < 0:
            if len(self._text) < _LONGEST_HEADER:
                return False
            self._begin(Content)
            self._add(self._take(_LONGEST_HEADER), found)
            return True
        header = self._take(at + len(MESSAGE))
        name = _RECIPIENT.search(header)
        if name and name[1] in self._names:
            self._begin(None)
            found.append(CallBegins(self.num_calls, name[1]))
            self.num_calls += 1
            self._arguments, self._has_all_arguments = ObjectScan(), False
        else:
            channel = _CHANNEL.search(header)
            is_thought = channel is not None and channel[1] == "analysis" and not name
            self._begin(Thought if is_thought else Content)
        return True

    def _begin(self, kind: type[Thought] | type[Content] | None) -> None:
        self._state, self._kind, self._is_first = _State.BODY, kind, False
        self._needs_break = kind in self._said
        if kind is Thought:
            self.thoughts.append(ThoughtSpan(self._num_taken))

    def _read_body(self, found: list[Found]) -> bool:
        end = _ENDS.search(self._text)
        self._add(self._take(end.start() if end else len(self._text) - self._num_held()), found)
        if end is None:
            return False
        if self._kind is Thought:
            self.thoughts[-1].end = self._num_taken
        if end[0] in (START, CHANNEL):  # a message that has not been closed
            self._take(len(START) if end[0] == START else 0)
            self._state = _State.HEADER
        else:
            self._take(len(end[0]))
            self._state = _State.BETWEEN
        return True

    def _add(self, text: str, found: list[Found]) -> None:
        if not text:
            return
        if self._kind is None:
            self._has_all_arguments |= self._arguments.take(text) is not None
            found.append(Arguments(self.num_calls - 1, text))
            return
        begin, end = self._num_taken - len(text), self._num_taken
        if self._needs_break:
            self._needs_break, text = False, "\n" + text
        self._said.add(self._kind)
        found.append(Thought(text) if self._kind is Thought else Content(text, begin, end))

    def _num_held(self) -> int:
        """Return how many characters at the end of the text may begin a tag."""
        if "<" not in self._text[-_LONGEST:]:
            return 0
        return max(num_tag_letters(self._text, tag) for tag in TAGS)
