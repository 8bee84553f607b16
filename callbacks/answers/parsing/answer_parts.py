"""The parts of an answer that parsers find in the text of a model: thoughts, content and calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning: text that the model writes for itself, before or between parts of its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text outside of thoughts and calls, from `begin` up to `end` in the text of the model."""

    text: str
    begin: int = field(default=0, compare=False)
    end: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The beginning of call number `index` (from 0) in an answer. It calls the tool `name`.

    `id` is the id that the model gave to the call, or "" if the format has no ids.
    """

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of the arguments of call `index`. The arguments are JSON."""

    index: int
    text: str


Found = Thought | Content | CallBegins | Arguments


class AnswerParser(Protocol):
    """A parser that takes the text of one answer in pieces, and returns its parts.

    `num_pushed` is the number of characters of the answer so far.
    """

    num_pushed: int

    def push(self, text: str) -> list[Found]:
        """Add new text to the answer; return the parts that are now certain."""

    def flush(self) -> list[Found]:
        """End the answer: return the text that was held back so far, as parts."""

    @property
    def is_in_arguments(self) -> bool:
        """Whether the last call's arguments have begun and not ended."""

    @property
    def num_calls(self) -> int: ...

    @property
    def thoughts(self) -> list[ThoughtSpan]:
        """The places of the thoughts in the pushed text."""


@dataclass(slots=True)
class ThoughtSpan:
    """The place of a thought in a text. `end` is exclusive, and None until the thought ends.

    Until then, `certain` is the end of the text that certainly belongs to the thought, or None if
    all text does.
    """

    begin: int
    end: int | None = None
    certain: int | None = None
