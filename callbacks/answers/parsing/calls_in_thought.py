"""`CallsInThought`: finds the calls that follow a thought which the model has not closed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gptmanager.callbacks.answers.parsing.answer_parts import Content, Found
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
        self._text = ""  # held back
        self._parser: CallParser | None = None  # of `_text`, which has a tag after spaces
        self._found: list[Found] = []  # the parts of `_text`
        self._num_trials = 0

    def push(self, text: str) -> str:
        """Add text to the thought; return the text that certainly belongs to the thought."""
        self._text += text
        released = ""
        while self._num_trials < _MAX_TRIALS and self._tags:
            if self._parser is None:
                at, _ = first_tag(self._text, self._tags)
                held = max(num_tag_letters(self._text, tag) for tag in self._tags)
                end = at if at >= 0 else len(self._text) - held
                released += self._take(len(self._text[:end].rstrip()))
                if at < 0:
                    return released
                self._parser, self._found, text = self._new_parser(), [], self._text
            found = self._parser.push(text)
            self._found += found
            if not _has_content(found):
                return released
            self._parser, self._num_trials = None, self._num_trials + 1
            at, tag = first_tag(self._text, self._tags)
            released += self._take(at + len(tag))
        return released + self.release()

    def release(self) -> str:
        """Return the text that was held back: the thought is closed, or its text has no calls."""
        self._parser = None
        return self._take(len(self._text))

    def flush(self) -> tuple[CallParser, list[Found], int] | None:
        """End the answer: return the parser of the calls, their parts and their length.

        The length is in characters. The result is None if the thought does not end with calls.
        """
        parser = self._parser
        if parser is None or not parser.num_calls or parser.is_in_arguments:
            return None
        found = self._found + parser.flush()
        return None if _has_content(found) else (parser, found, len(self._text))

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken


def _has_content(found: Iterable[Found]) -> bool:
    return any(isinstance(one, Content) and one.text.strip() for one in found)
