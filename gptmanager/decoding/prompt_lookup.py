"""Proposes draft tokens, so that one step computes several positions of a sequence.

The proposed tokens are copied from the request's own tokens. Their number depends on the results of
earlier drafts, which the caller reports. A wrong draft costs computation, but never changes the
output.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gptmanager.config import PromptLookup
from gptmanager.request.input_rows import HostRows

_LONGEST_REST = 32  # the most steps without drafts after a rejected draft
_START = 4  # tokens proposed first; doubled after a draft that was fully accepted


class DrafterState(NamedTuple):
    """The state of a `Drafter` except its n-grams, which are rebuilt from the tokens."""

    length: int
    wrong: int
    rest: int


class Drafter:
    """Proposes the drafts of one request by prompt lookup (see `config.PromptLookup`).

    After a draft that was fully accepted, the next draft is up to twice as long; otherwise the next
    draft has up to one token more than were accepted. After a fully rejected draft, one step runs
    without a draft; each further full rejection in a row doubles the number of these steps, up to
    32. Text without repeats thus costs little. Virtual tokens (ids from `vocab_size` on) are looked
    up but never proposed, because they are never sampled.
    """

    __slots__ = ("_config", "_length", "_found", "_rest", "_seen", "_vocab_size", "_wrong")

    def __init__(self, config: PromptLookup, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._length = min(_START, config.max_draft_tokens)  # the most tokens of the next draft
        self._found: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after it
        self._seen = 0  # number of tokens that `_found` covers
        self._wrong = 0  # number of fully rejected drafts in a row
        self._rest = 0  # number of steps left without a draft

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return at most `limit` draft tokens to follow `tokens`, which only grow between calls."""
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
        """Restore a state. Raise ValueError if a value is out of range."""
        longest = self._config.max_draft_tokens
        if (
            not 0 <= state.length <= longest
            or state.wrong < 0
            or not 0 <= state.rest <= _LONGEST_REST
        ):
            raise ValueError(f"drafter state {state} is out of range")
        self._length, self._wrong, self._rest = state

    def learn_result(self, num_drafts: int, num_accepted: int) -> None:
        """Adapt to the last draft: `num_accepted` of its `num_drafts` tokens were accepted."""
        if num_accepted:
            self._wrong = 0
            grown = 2 * num_drafts if num_accepted == num_drafts else num_accepted + 1
            self._length = min(grown, self._config.max_draft_tokens)
        else:
            self._rest = 1 << min(self._wrong, _LONGEST_REST.bit_length() - 1)
            self._wrong += 1
            self._length = 1

    def _learn(self, tokens: Sequence[int]) -> None:
        """Index the new n-grams, except any that ends with the last token: no token follows it."""
        found, config = self._found, self._config
        for end in range(max(self._seen, config.min_ngram), len(tokens)):
            for size in range(config.min_ngram, min(config.max_ngram, end) + 1):
                found[tuple(tokens[end - size : end])] = end
        self._seen = max(self._seen, len(tokens))


class DraftsState(NamedTuple):
    """The state of `RequestDrafts`."""

    tokens: tuple[int, ...]
    logits: HostRows | None
    drafter: DrafterState | None


@dataclass(slots=True, eq=False)
class RequestDrafts:
    """The draft tokens of one request.

    `tokens` run in the next step. The host gave them, for the request's first step only, or
    `drafter` proposed them. `logits` has all drafts of the host with the logits from which the host
    sampled them, as rows of `drawn_draft`; None if the host did not pass the logits.
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
    """Return `count` tokens from `start` on. Past the end, repeat the copy, as in LZ77."""
    copy = list(tokens[start : start + count])
    for index in range(count - len(copy)):
        copy.append(copy[index])
    return copy
