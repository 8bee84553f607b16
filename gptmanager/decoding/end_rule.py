"""`EndRule`: decides where an output ends, for a single sequence and each beam of a search."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gptmanager.config import FinishReason
from gptmanager.decoding.stop_words import StopWords

End = tuple[FinishReason, int]  # the reason, and the number of generated tokens to output


class EndRuleState(NamedTuple):
    """The parameters of an `EndRule` that are stored in recordings. `words` are its stop words.

    The end ids are missing, because they are stored with the `SamplingParams`.
    """

    max_new_tokens: int
    words: tuple[tuple[int, ...], ...] | None
    include_stop: bool


@dataclass(slots=True, eq=False)
class EndRule:
    """An output ends with one of `end_ids`, with a stop word, or when it is `max_new_tokens` long.

    With `include_stop`, the end id or stop word is part of the output. Lengths count generated
    tokens, including tokens that are then cut off. A stop state is the state that
    `StopWords.advance` returned last, or 0 before the first token.
    """

    max_new_tokens: int
    end_ids: frozenset[int] = frozenset()
    stop_words: StopWords | None = None
    include_stop: bool = False

    def find(self, stop_state: int, token: int, length: int) -> tuple[int, End | None]:
        """Return the stop state after `token`, and the `End` if the output ends with `token`.

        `token` is the `length`-th generated token.
        """
        if token in self.end_ids:
            return 0, (FinishReason.END_ID, length - (not self.include_stop))
        if self.stop_words is not None:
            stop_state, matched = self.stop_words.advance(stop_state, token)
            if matched:
                kept = 0 if self.include_stop else matched
                return stop_state, (FinishReason.STOP_WORDS, length - kept)
        if length >= self.max_new_tokens:
            return stop_state, (FinishReason.LENGTH, length)
        return stop_state, None

    def num_final(self, stop_state: int, length: int) -> int:
        """Return how many of `length` generated tokens cannot be cut off by a stop word later."""
        if self.stop_words is None or self.include_stop:
            return length
        return length - self.stop_words.held(stop_state, self.max_new_tokens - length)

    @property
    def num_last_tokens(self) -> int:
        """The number of distinct tokens that can end an output before `max_new_tokens`."""
        last = set() if self.stop_words is None else set(self.stop_words.last_tokens)
        return len(last | self.end_ids)

    def state(self) -> EndRuleState:
        words = None if self.stop_words is None else self.stop_words.words
        return EndRuleState(self.max_new_tokens, words, self.include_stop)


def restored_end_rule(state: EndRuleState, end_ids: Iterable[int]) -> EndRule:
    """Return the end rule with the parameters `state` and the end ids `end_ids`."""
    words = None if state.words is None else StopWords(state.words)
    return EndRule(state.max_new_tokens, frozenset(end_ids), words, state.include_stop)
