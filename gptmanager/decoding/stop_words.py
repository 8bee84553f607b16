"""`StopWords`: finds the first of several token sequences in a growing text, token by token.

An Aho-Corasick automaton, compiled once a request. It decides where a word has ended and how many
tokens may still grow into one; it knows nothing of requests, responses, or what a match entails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopWords:
    """The automaton of `words`; empty words are passed over, repeated ones count once.

    A state is a plain int, 0 before the first token: it depends on the tokens alone, so that
    replaying a history gives it back. The first match to END wins, since a request stops there;
    of words that end at the same token the longest is reported, so that cutting it off leaves
    none of them behind.
    """

    __slots__ = ("_held", "_matched", "_next", "_start")

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        # state -> token -> state; at first the trie's edges only
        self._next: list[dict[int, int]] = [{}]
        self._matched = [0]  # length of the longest word that ends in the state
        self._held = [0]  # length of the longest proper prefix of a word that ends in the state
        for word in words:
            self._insert(word)
        self._start = self._next[0]
        self._link()

    def advance(self, state: int, token: int) -> tuple[int, int]:
        """The state after `token`, and the length of the longest word that ends with it or 0."""
        state = self._next[state].get(token) or self._start.get(token, 0)
        return state, self._matched[state]

    def held(self, state: int) -> int:
        """How many of the last tokens may still become part of a word: not yet to be shown."""
        return self._held[state]

    def _insert(self, word: Sequence[int]) -> None:
        state = 0
        for length, token in enumerate(word, start=1):
            child = self._next[state].get(token)
            if child is None:
                child = self._next[state][token] = len(self._next)
                self._next.append({})
                self._matched.append(0)
                self._held.append(length)
            state = child
        self._matched[state] = len(word)

    def _link(self) -> None:
        """Let each state also do what its longest proper suffix can, the start's edges excepted.

        Breadth first: a suffix is shorter, hence complete. The start's edges are looked up apart;
        copied into every state they would cost states x words entries.
        """
        suffixes = dict.fromkeys(self._start.values(), 0)
        queue = deque(suffixes)
        while queue:
            state = queue.popleft()
            suffix = suffixes.pop(state)
            for token, child in self._next[state].items():
                suffixes[child] = self._next[suffix].get(token) or self._start.get(token, 0)
                queue.append(child)
            self._matched[state] = self._matched[state] or self._matched[suffix]
            if not self._next[state]:  # a word that no longer one continues
                self._held[state] = self._held[suffix]
            if suffix:
                self._next[state] = {**self._next[suffix], **self._next[state]}
