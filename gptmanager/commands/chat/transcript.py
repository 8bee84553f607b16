"""`Transcript`: an answer as it is printed, with a word where thoughts begin and where they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gptmanager.callbacks.answers.parsing.answer_parts import Content, Found, Thought

BEGIN, END = "thinking", "answer"  # lines before and after a thought


class Piece(NamedTuple):
    """A piece of text to print. `is_aside`: it belongs to a thought, or is one of its lines."""

    text: str
    is_aside: bool = False


class Transcript:
    """Receives the parts of one answer. `pieces` has the text that they become.

    With `shows_thoughts`, a thought is preceded by the line `BEGIN` and followed by the line `END`.
    Without it, the text has the content only.
    """

    def __init__(self, shows_thoughts: bool) -> None:
        self.pieces: list[Piece] = []
        self._shows_thoughts = shows_thoughts
        self._is_thought = False

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def ends_line(self) -> bool:
        """Whether the text so far ends with a line break."""
        return bool(self.pieces) and self.pieces[-1].text.endswith("\n")

    def push(self, parts: Sequence[Found]) -> list[Piece]:
        """Add the next parts of the answer; return the new pieces of text."""
        count = len(self.pieces)
        for one in parts:
            if isinstance(one, Thought) and self._shows_thoughts:
                self._turn_to(True, BEGIN)
                self.pieces.append(Piece(one.text, is_aside=True))
            elif isinstance(one, Content):
                self._turn_to(False, END)
                self.pieces.append(Piece(one.text))
        return self.pieces[count:]

    def _turn_to(self, is_thought: bool, line: str) -> None:
        if is_thought is self._is_thought:
            return
        self._is_thought = is_thought
        line_break = "\n" if self.pieces and not self.ends_line else ""
        self.pieces.append(Piece(f"{line_break}{line}\n", is_aside=True))
