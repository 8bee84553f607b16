"""Search for stop strings in an output that arrives in pieces.

Each stop string has an automaton of Knuth, Morris and Pratt, "Fast pattern matching in strings"
(1977). Its state is the length of the longest prefix of the stop string that the output ends with.
So no piece is read twice, and the largest state is the number of characters to hold back. The
automaton is built only as far as its state has advanced: an unmatched stop string costs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gptmanager.errors import InvalidRequestError, quoted

MAX_STOPS, MAX_STOP_LENGTH = 64, 4096  # limits of a request, also in the server


class Found(NamedTuple):
    """A stop string and its place, in characters from the start of the output."""

    stop: str
    begin: int
    end: int


class StopStrings:
    """Searches for several stop strings in one output."""

    def __init__(self, stops: Sequence[str]) -> None:
        # stop strings, each with the values of its failure function that are known so far
        self._stops: list[tuple[str, list[int]]] = [(stop, []) for stop in stops]
        self._states = [0] * len(stops)
        self._num_seen = 0  # characters

    @property
    def num_held(self) -> int:
        """The number of characters at the end of the output that may begin a stop string."""
        return max(self._states, default=0)

    def push(self, text: str, *, may_end: bool = True) -> Found | None:
        """Read more text; return the first stop string that is complete, or None.

        If several stop strings end at the same character, return the longest. With `may_end=False`,
        ignore stop strings that end in this text.
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
    """Return the next value of the failure function of `stop`.

    Value i is the length of the longest proper prefix of `stop[: i + 1]` that is also its suffix.
    """
    index = len(failures)
    state = failures[-1] if index else 0
    while state and stop[state] != stop[index]:
        state = failures[state - 1]
    return state + (index > 0 and stop[state] == stop[index])


def checked_stops(stop: Any) -> tuple[str, ...]:
    """Return the argument `stop` of a request as a tuple; raise InvalidRequestError if invalid."""
    if isinstance(stop, str) or not isinstance(stop, Sequence):
        raise InvalidRequestError(f"stop = {quoted(stop)} must be a list of strings")
    if len(stop) > MAX_STOPS:
        raise InvalidRequestError(f"stop has {len(stop)} strings, at most {MAX_STOPS} are allowed")
    for index, text in enumerate(stop):
        if not isinstance(text, str):
            raise InvalidRequestError(f"stop[{index}] = {quoted(text)} must be a string")
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise InvalidRequestError(
                f"stop[{index}] has {len(text)} characters, it must have 1 to {MAX_STOP_LENGTH}"
            )
    return tuple(stop)
