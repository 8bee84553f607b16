"""`StopWords`: finds the first of several token sequences in a growing text, token by token.

An Aho-Corasick automaton, compiled once a request. It decides where a word has ended and how many
tokens may still grow into one; it knows nothing of requests, responses, or what a match entails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_NEVER = 1 << 62  # more tokens than there will be


class StopWords:
    """The automaton of `words`; empty words are passed over, repeated ones count once.

    A state is a plain int, 0 before the first token: it depends on the tokens alone, so that
    replaying a history gives it back. The first match to END wins, since a request stops there;
    of words that end at the same token the longest is reported, so that cutting it off leaves
    none of them behind. `last_tokens`: no other token ends a word, whatever came before it.
    """

    __slots__ = ("words", "_depth", "_least", "_matched", "_next", "_suffix", "last_tokens")

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self.words = tuple(map(tuple, words))
        self._next: list[dict[int, int]] = [{}]  # state -> token -> state: the edges of the trie
        self._suffix = [0]  # state -> that of its longest proper suffix in the trie
        self._matched = [0]  # length of the longest word that ends in the state
        self._depth = [0]  # how many tokens lead to the state
        for word in words:
            self._insert(word)
        ends_word = [length > 0 for length in self._matched]
        self._link()
        self._least = self._distances(ends_word)
        self.last_tokens = frozenset(word[-1] for word in words if len(word))

    def advance(self, state: int, token: int) -> tuple[int, int]:
        """The state after `token`, and the length of the longest word that ends with it or 0."""
        state = self._step(state, token)
        return state, self._matched[state]

    def _step(self, state: int, token: int) -> int:
        # suffixes get shorter by at least one, and a token makes them longer by one: O(1) a token
        while (following := self._next[state].get(token)) is None and state:
            state = self._suffix[state]
        return following or 0

    def held(self, state: int, room: int = _NEVER - 1) -> int:
        """How many of the last tokens may still become part of a word: not yet to be shown.

        `room`: how many tokens may follow.
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
        """Find each state's suffix; breadth first, since a suffix is shorter, hence complete."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            suffix = self._suffix[state]
            for token, child in self._next[state].items():
                self._suffix[child] = self._step(suffix, token)
                queue.append(child)
            self._matched[state] = self._matched[state] or self._matched[suffix]

    def _distances(self, ends_word: Sequence[bool]) -> list[int]:
        """Return for each state the fewest tokens after which a word through it can end."""
        least = [_NEVER] * len(self._next)
        for state in reversed(range(len(least))):  # children have higher numbers
            for child in self._next[state].values():
                if ends_word[child]:
                    least[state] = 1
                elif not self._matched[child]:  # else a shorter word ends first
                    least[state] = min(least[state], 1 + least[child])
        return least
