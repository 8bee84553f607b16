"""Draft tokens: proposed ahead of the network, which then computes several positions in one step.

Decides what to propose from a request's own tokens, and how much; knows nothing of whether a draft
was right but what it is told. A wrong draft costs computing, never a different output.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gptmanager.config import PromptLookup
from gptmanager.request.input_rows import HostRows

_LONGEST_REST = 32  # steps
_START = 4  # tokens proposed first; doubled when all were right


class DrafterState(NamedTuple):
    """The state of a `Drafter`: how its drafts fared. Its n-grams follow from the tokens."""

    length: int
    wrong: int
    rest: int


class Drafter:
    """The drafts of one request by prompt lookup (see `config.PromptLookup`).

    How many tokens are proposed follows what became of the last ones: twice as many after a draft
    that was right to its end, else one more than were right. A draft that was all wrong is
    followed by a rest, the longer the more often, so that text without repeats costs little.
    Virtual tokens, ids from `vocab_size` on, are looked up but never proposed: none is ever chosen.
    """

    __slots__ = ("_config", "_length", "_found", "_rest", "_seen", "_vocab_size", "_wrong")

    def __init__(self, config: PromptLookup, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._length = min(_START, config.max_draft_tokens)
        self._found: dict[tuple[int, ...], int] = {}  # n-gram -> index of what followed it
        self._seen = 0  # tokens whose n-grams are in `_found`
        self._wrong = 0  # drafts in a row that were all wrong
        self._rest = 0  # steps without a draft that are left

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """At most `limit` tokens that may follow `tokens`, which only ever grow."""
        self._learn(tokens)
        if self._rest:
            self._rest -= 1
            return []
        limit = min(limit, self._length)
        if limit < 1:
            return []
        config, end = self._config, len(tokens)
        for size in range(min(config.max_ngram, end - 1), config.min_ngram - 1, -1):
            index = self._found.get(tuple(tokens[end - size :]))
            if index is not None:
                continued = _continued(tokens, index, limit)
                return list(itertools.takewhile(lambda i: i < self._vocab_size, continued))
        return []

    def state(self) -> DrafterState:
        return DrafterState(self._length, self._wrong, self._rest)

    def restore(self, state: DrafterState) -> None:
        """Raises ValueError for what no drafts lead to."""
        longest = self._config.max_draft_tokens
        if (
            not 0 <= state.length <= longest
            or state.wrong < 0
            or not 0 <= state.rest <= _LONGEST_REST
        ):
            raise ValueError(f"no drafts lead to {state}")
        self._length, self._wrong, self._rest = state

    def learn_result(self, num_drafts: int, num_accepted: int) -> None:
        """`num_accepted` of the last draft's `num_drafts` tokens were right."""
        if num_accepted:
            self._wrong = 0
            grown = 2 * num_drafts if num_accepted == num_drafts else num_accepted + 1
            self._length = min(grown, self._config.max_draft_tokens)
        else:
            self._rest = 1 << min(self._wrong, _LONGEST_REST.bit_length() - 1)
            self._wrong += 1
            self._length = 1

    def _learn(self, tokens: Sequence[int]) -> None:
        """N-grams that something follows; those that end the text are what is looked up."""
        found, config = self._found, self._config
        for end in range(max(self._seen, config.min_ngram), len(tokens)):
            for size in range(config.min_ngram, min(config.max_ngram, end) + 1):
                found[tuple(tokens[end - size : end])] = end
        self._seen = max(self._seen, len(tokens))


class DraftsState(NamedTuple):
    """See `RequestDrafts`."""

    tokens: tuple[int, ...]
    logits: HostRows | None
    drafter: DrafterState | None


@dataclass(slots=True, eq=False)
class RequestDrafts:
    """The drafts of one request: its host's, behind the prompt, or those of its drafter.

    `tokens`: those to run next. `logits`: what a host's drafts were drawn from.
    """

    tokens: tuple[int, ...] = ()
    logits: HostRows | None = None
    drafter: Drafter | None = None

    def state(self) -> DraftsState:
        return DraftsState(
            self.tokens,
            None if self.logits is None else self.logits.without_numbers(),
            None if self.drafter is None else self.drafter.state(),
        )


def _continued(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on; behind the end the copy itself is copied, as in LZ77."""
    copy = list(tokens[start : start + count])
    for index in range(count - len(copy)):
        copy.append(copy[index])
    return copy
