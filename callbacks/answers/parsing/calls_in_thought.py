"""`CallsInThought`: finds the calls that follow a thought which the model has not closed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gptmanager.callbacks.answers.parsing.answer_parts import (
    Arguments,
    CallBegins,
    Content,
    Found,
)
from gptmanager.callbacks.answers.parsing.call_parser import CallParser
from gptmanager.callbacks.answers.parsing.text_scan import first_tag, num_tag_letters

_MAX_TRIALS = 16  # tags of a thought from which on calls are parsed, because each costs as much


class CallsInThought:
    """Receives the text of a thought in pieces, and holds back what may be calls at its end.

    Models that think for long may forget to close their thought before they call a tool. They also
    write about calls. So text is only held back from a tag on that begins a call, and only as long
    as nothing but calls follows the tag. `new_parser` creates a parser of calls.
    """

    def __init__(self, new_parser: Callable[[], CallParser]) -> None:
        self._new_parser = new_parser
        self._tags = new_parser().openers
        self._held: list[str] = []  # pieces of text: spaces, and what may begin a tag or is calls
        self._parser: CallParser | None = None  # parses `_held`, which begins with a tag
        self._found: list[Found] = []  # the parts of `_held`
        self._num_trials = 0
        self.num_held = 0  # characters that are held back, without the spaces before them

    def push(self, text: str) -> str:
        """Add text to the thought; return the text that certainly belongs to the thought."""
        released = ""
        if self._parser is None:
            text = "".join((*self._held, text))
        while self._num_trials < _MAX_TRIALS and self._tags:
            if self._parser is None:
                at, _ = first_tag(text, self._tags)
                part = max(num_tag_letters(text, tag) for tag in self._tags)
                end = at if at >= 0 else len(text) - part
                num_certain = len(text[:end].rstrip())
                released, text = released + text[:num_certain], text[num_certain:]
                self._held, self.num_held = [], num_certain - end
                if at < 0:
                    self._held, self.num_held = [text], part
                    return released
                self._parser, self._found = self._new_parser(), []
            self._held.append(text)
            self.num_held += len(text)
            found = self._parser.push(text)
            self._found += found
            if not _has_content(found):
                return released
            self._parser, self._num_trials = None, self._num_trials + 1
            text = "".join(self._held)
            at, tag = first_tag(text, self._tags)
            released, text = released + text[: at + len(tag)], text[at + len(tag) :]
        self._held, self.num_held = [], 0
        return released + text

    def release(self) -> str:
        """Return the text that was held back: the thought is closed, or its text has no calls."""
        text = "".join(self._held)
        self._parser, self._held, self.num_held = None, [], 0
        return text

    def flush(self) -> tuple[CallParser, list[Found]] | None:
        """End the answer: return the parser of the calls that were held back, and their parts.

        The result is None if the thought does not end with calls.
        """
        parser = self._parser
        if parser is None or not parser.num_calls or parser.is_in_arguments:
            return None
        found = self._found + parser.flush()
        return None if _has_content(found) else (parser, _joined(found))


def _joined(found: list[Found]) -> list[Found]:
    """Return the parts, with the arguments of each call as one part."""
    pieces: dict[int, list[str]] = {}
    for one in found:
        if isinstance(one, Arguments):
            pieces.setdefault(one.index, []).append(one.text)
    joined: list[Found] = []
    for one in found:
        if isinstance(one, CallBegins):
            joined += [one, Arguments(one.index, "".join(pieces.get(one.index, ())))]
    return joined


def _has_content(found: Iterable[Found]) -> bool:
    return any(isinstance(one, Content) and one.text.strip() for one in found)
