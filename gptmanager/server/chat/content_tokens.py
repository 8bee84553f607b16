"""`ContentTokens`: selects the tokens of an answer's content, for log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from gptmanager.server.text.log_probs import TokenLogProb


class ContentTokens:
    """Selects the log probabilities of content tokens from those of all tokens, pushed in order."""

    def __init__(self) -> None:
        self._waiting: list[TokenLogProb] = []  # neither returned nor dropped yet

    def push(self, listed: Sequence[TokenLogProb]) -> None:
        """Add the log probabilities of the next tokens."""
        self._waiting += listed

    def take(self, begin: int, end: int) -> list[TokenLogProb]:
        """Return the log probabilities of the tokens with text in the characters `begin` to `end`.

        Earlier tokens are dropped. A token that crosses `end` is returned now, and not again with
        the next text.
        """
        waiting = self._waiting
        count = sum(1 for _ in takewhile(lambda one: one.start < end, waiting))
        first = 0
        # a token ends where the next one starts
        while first < count and waiting[first].start < begin:
            if first + 1 == len(waiting) or waiting[first + 1].start > begin:
                break
            first += 1
        self._waiting = waiting[count:]
        return waiting[first:count]
