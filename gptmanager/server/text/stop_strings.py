"""Texts that end an output, found while it comes, across its pieces.

Each text is followed by the automaton of Knuth, Morris and Pratt, "Fast pattern matching in
strings" (1977): its state is how much of the text the output ends with. So no piece is read twice,
and what must be held back, because a text may have begun in it, is the longest of the states. The
automaton is made as far as its state has come: a text that never begins costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """`begin` and `end`: where the stop string is, in characters from the start of the output."""

    stop: str
    begin: int
    end: int


class StopStrings:
    """Looks for several texts in one output."""

    def __init__(self, stops: Sequence[str]) -> None:
        # for each beginning that was seen: the length of its longest end that begins it, too
        self._stops: list[tuple[str, list[int]]] = [(stop, []) for stop in stops]
        self._states = [0] * len(stops)
        self._num_seen = 0  # characters

    @property
    def num_held(self) -> int:
        """Characters at the end of the output that may be the beginning of a stop string."""
        return max(self._states, default=0)

    def push(self, text: str, *, may_end: bool = True) -> Found | None:
        """The stop string that is complete first; of several at once the one that begins first.

        `may_end` False: those that are complete now are no end.
        """
        for character in text:
            self._num_seen += 1
            found = None
            for index, (stop, failures) in enumerate(self._stops):
                state = self._states[index]
                while state and stop[state] != character:
                    state = failures[state - 1]
                state += stop[state] == character
                if state > len(failures):
                    failures.append(_next_failure(stop, failures))
                if state == len(stop):
                    if found is None or len(stop) > len(found):
                        found = stop
                    state = failures[state - 1]
                self._states[index] = state
            if found is not None and may_end:
                return Found(found, self._num_seen - len(found), self._num_seen)
        return None


def _next_failure(stop: str, failures: Sequence[int]) -> int:
    """For the beginning of `stop` that is a character longer than those of `failures`."""
    index = len(failures)
    state = failures[-1] if index else 0
    while state and stop[state] != stop[index]:
        state = failures[state - 1]
    return state + (index > 0 and stop[state] == stop[index])
