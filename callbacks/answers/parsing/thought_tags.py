"""Parses thoughts in tags, which many models write before their answers: <think>...</think>

The result does not depend on how the text is divided into tokens. Another parser reads the tool
calls in the text after the thought.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from gptmanager.callbacks.answers.parsing.answer_parts import (
    AnswerParser,
    Content,
    Found,
    Thought,
    ThoughtSpan,
)
from gptmanager.callbacks.answers.parsing.call_parser import CallParser
from gptmanager.callbacks.answers.parsing.calls_in_thought import CallsInThought
from gptmanager.callbacks.answers.parsing.dropped_tags import DroppedTags
from gptmanager.callbacks.answers.parsing.stepwise_parser import StepwiseParser
from gptmanager.callbacks.answers.parsing.text_scan import first_tag, num_tag_letters


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """The tags around a thought: `opener`, perhaps a `label`, the thought, and `closer`.

    `around` are tags around the text that follows the thought; they are dropped. `next_tags` begin
    what follows a thought that the model has not closed. `header` follows the closer, and begins
    the message after the thought. A chat template that contains one of `shown`, by default the
    closer, has this format.
    """

    opener: str
    closer: str
    label: str = ""
    around: tuple[str, ...] = ()
    next_tags: tuple[str, ...] = ()
    header: str = ""
    shown: tuple[str, ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        return self.opener, self.closer, *self.around

    def is_in(self, template: str) -> bool:
        """Return whether a chat template describes this format."""
        return any(one in template for one in self.shown or (self.closer,))


THINK = ThoughtFormat("<think>", "</think>")


class _State(Enum):
    """The text that `ThoughtTags` reads next."""

    BEGIN = "before the first letter"
    THOUGHT = "a thought, until its tag closes"
    AFTER = "spaces after a thought"
    ANSWER = "text to the end"


class ThoughtTags(StepwiseParser):
    """Divides the text of one answer into its thought, its content and its tool calls.

    A thought can only be at the beginning; spaces around it are dropped. With `is_open`, the prompt
    has already opened the thought; with `is_closed`, it has also closed it. The parser `calls`
    reads the text after the thought. Without `calls`, all text after the thought is content. With
    `new_calls`, which creates a parser, a thought that is not closed ends before calls that are the
    end of the answer.
    """

    def __init__(
        self,
        calls: AnswerParser | None = None,
        form: ThoughtFormat = THINK,
        *,
        is_open: bool = False,
        is_closed: bool = False,
        new_calls: Callable[[], CallParser] | None = None,
    ) -> None:
        super().__init__()
        self._calls = calls
        self._calls_within = None if new_calls is None else CallsInThought(new_calls)
        self._opener, self._closer = form.opener + form.label, form.closer
        self._ends = (form.closer, *form.next_tags)
        self._around = DroppedTags(form.around)
        self._is_open = is_open
        self._state = _State.ANSWER if is_closed else _State.BEGIN
        self._has_thought = False  # whether text of the thought has been returned

    @property
    def is_in_arguments(self) -> bool:
        return self._calls is not None and self._calls.is_in_arguments

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, text: str) -> list[Found]:
        return self._around.push(super().push(text))

    def flush(self) -> list[Found]:
        return self._around.push(self._flush()) + self._around.flush()

    def _flush(self) -> list[Found]:
        if self._state is _State.BEGIN and self._is_open:
            self._open()
        rest = self._take(len(self._text))
        if self._state is _State.THOUGHT:
            return self._flush_thought(rest)
        found = self._answer(rest) if self._state is not _State.AFTER else []
        return found + ([] if self._calls is None else self._calls.flush())

    def _step(self, found: list[Found]) -> bool:
        """Take one step of the state machine; return False if it needs more text."""
        if self._state is _State.BEGIN:
            return self._begin()
        if self._state is _State.THOUGHT:
            return self._read_thought(found)
        if self._state is _State.AFTER:
            self._take(len(self._text) - len(self._text.lstrip()))
            if not self._text:
                return False
            self._state = _State.ANSWER
        found += self._answer(self._take(len(self._text)))
        return False

    def _begin(self) -> bool:
        rest = self._text.lstrip()
        is_tagged = rest.startswith(self._opener)
        if not is_tagged and self._opener.startswith(rest):
            return False
        if is_tagged:
            self._take(len(self._text) - len(rest) + len(self._opener))
        if is_tagged or self._is_open:
            self._open()
        else:
            self._state = _State.ANSWER
        return True

    def _open(self) -> None:
        self._state = _State.THOUGHT
        self.thoughts.append(ThoughtSpan(self._num_taken))

    def _read_thought(self, found: list[Found]) -> bool:
        at, end_tag = first_tag(self._text, self._ends)
        held = max(num_tag_letters(self._text, tag) for tag in self._ends)
        end = at if at >= 0 else len(self._text) - held
        begin = 0
        if not self._has_thought:
            begin = end - len(self._text[:end].lstrip())
        said = self._text[begin:end].rstrip()
        if said:
            self._has_thought = True
            self._take(begin + len(said))
            if self._calls_within is not None:
                said = self._calls_within.push(said)
                num_held = self._calls_within.num_held
                self.thoughts[-1].certain = self._num_taken - num_held if num_held else None
        if at >= 0 and self._calls_within is not None:
            said += self._calls_within.release()
        if said:
            found.append(Thought(said))
        if at < 0:
            return False
        self._take(self._text.find(end_tag))
        self.thoughts[-1].end = self._num_taken
        if end_tag == self._closer:
            self._take(len(end_tag))
        self._state = _State.AFTER
        return True

    def _flush_thought(self, rest: str) -> list[Found]:
        """Return the end of a thought that is not closed, or the calls that follow it."""
        num_spaces = len(rest) - len(rest.rstrip())
        rest = rest.rstrip() if self._has_thought else rest.strip()
        if self._calls_within is None:
            return [Thought(rest)] if rest else []
        rest = self._calls_within.push(rest)
        ended = self._calls_within.flush()
        if ended is None:
            rest += self._calls_within.release()
            self.thoughts[-1].certain = None
            return [Thought(rest)] if rest else []
        self._calls, found = ended
        self.thoughts[-1].end = self.num_pushed - num_spaces - self._calls_within.num_held
        return [Thought(rest), *found] if rest else found

    def _answer(self, text: str) -> list[Found]:
        """Return the parts of `text`, which follows the thought and was the last text taken."""
        begin, end = self._num_taken - len(text), self._num_taken
        if self._calls is not None:
            self._calls.num_pushed = begin
            return self._calls.push(text)
        return [Content(text, begin, end)] if text else []
