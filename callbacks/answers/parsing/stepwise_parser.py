"""`StepwiseParser`: the base of all parsers of an answer that arrives in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gptmanager.callbacks.answers.parsing.answer_parts import Found, ThoughtSpan


class StepwiseParser(ABC):
    """Receives the text of an answer in pieces. A subclass is a state machine (see `_step`)."""

    def __init__(self) -> None:
        self.num_pushed = 0
        self.thoughts: list[ThoughtSpan] = []
        self._text = ""  # pushed, but not returned yet

    def push(self, text: str) -> list[Found]:
        """Add new text to the answer, and return the parts that the new text completes."""
        self.num_pushed += len(text)
        self._text += text
        found: list[Found] = []
        while self._step(found):
            pass
        return found

    @abstractmethod
    def flush(self) -> list[Found]:
        """End the answer, and return the text that was held back, as parts."""

    @abstractmethod
    def _step(self, found: list[Found]) -> bool:
        """Take one step of the state machine, and append the parts that it completes to `found`.

        Return False if the next step needs more text.
        """

    def _take(self, length: int) -> str:
        """Remove the next `length` characters from the text, and return them."""
        taken, self._text = self._text[:length], self._text[length:]
        return taken

    @property
    def _num_taken(self) -> int:
        """The number of pushed characters before `_text`."""
        return self.num_pushed - len(self._text)
