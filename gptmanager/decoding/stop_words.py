"""`StopWords`: finds the first of several token sequences in a growing text, token by token.

It is an Aho-Corasick automaton, compiled once per request. It finds where a stop word ends, and
how many of the last tokens may still become part of a stop word. It knows nothing of requests and
responses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_NEVER = 1 << 62  # more tokens than any text has


class StopWords:
    """The automaton of `words`. Empty words are ignored, and repeated words count once.

    A state is an int, 0 before the first token. It depends on the tokens only, so replaying a
    history restores it. The match that ends first is reported, because a request stops there. If
    several words end at the same token, the longest is reported, so that cutting it off removes all
    of them. `last_tokens` has the last token of each word.
    """

    __slots__ = ("words", "_depth", "_least", "_matched", "_next", "_suffix", "last_tokens")

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self.words = tuple(map(tuple, words))
        self._next: list[dict[int, int]] = [{}]  # state -> token -> state: the edges of the trie
        self._suffix = [0]  # state -> state of its longest proper suffix in the trie
        self._matched = [0]  # length of the longest word that ends in the state
        self._depth = [0]  # number of tokens that lead to the state
        for word in words:
            self._insert(word)
        ends_word = [length > 0 for length in self._matched]
        self._link()
        self._least = self._distances(ends_word)
        self.last_tokens = frozenset(word[-1] for word in words if len(word))

    def advance(self, state: int, token: int) -> tuple[int, int]:
        """Return the next state, and the length of the longest word that ends at `token`, or 0."""
        state = self._step(state, token)
        return state, self._matched[state]

    def _step(self, state: int, token: int) -> int:
        # Amortized O(1): each pass of the loop shortens the match, and a token adds at most 1.
        while (following := self._next[state].get(token)) is None and state:
            state = self._suffix[state]
        return following or 0

    def held(self, state: int, room: int = _NEVER - 1) -> int:
        """Return how many of the last tokens may still become part of a word, if at most `room`
        tokens follow.
        """
        while state and self._least[state] > room:
            state = self._suffix[state]
        return self._depth[state]

    def _insert(self, word: Sequence[int]) -> None:
        state = 0
        for length, token in enumerate(word, start=1):
            child = self._next[state].get(token)
            if child is None:
                child = self._next[state][token] = len(self._next)
                self._next.append({})
                self._suffix.append(0)
                self._matched.append(0)
                self._depth.append(length)
            state = child
        self._matched[state] = len(word)

    def _link(self) -> None:
        """Find each state's suffix, breadth first, so that shorter suffixes are found first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            suffix = self._suffix[state]
            for token, child in self._next[state].items():
                self._suffix[child] = self._step(suffix, token)
                queue.append(child)
            self._matched[state] = self._matched[state] or self._matched[suffix]

    def _distances(self, ends_word: Sequence[bool]) -> list[int]:
        """Return for each state the fewest further tokens that complete a word from this state."""
        least = [_NEVER] * len(self._next)
        for state in reversed(range(len(least))):  # children have higher numbers
            for child in self._next[state].values():
                if ends_word[child]:
                    least[state] = 1
                elif not self._matched[child]:  # else a shorter word ends first
                    least[state] = min(least[state], 1 + least[child])
        return least
