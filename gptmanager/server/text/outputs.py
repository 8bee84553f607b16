"""`Output`: decodes the tokens of one generated text, and detects its end.

It decides which text may be sent and why the output ended, independently of requests and protocols.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Tokenizer

from gptmanager import FinishReason
from gptmanager.callbacks import TextStream
from gptmanager.callbacks.text.stop_strings import StopStrings
from gptmanager.server.engine.call import FINISH_REASONS
from gptmanager.server.text.log_probs import TokenLogProb


@dataclass(frozen=True)
class Ends:
    """The tokens and texts that end an output, after its first `min_tokens` tokens.

    `end_ids` are the model's end tokens; their text is never part of an answer. `stop_ids` and
    `stops` are tokens and texts from the request. With `keeps_stop`, the text of a stop is part of
    the answer.
    """

    end_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    keeps_stop: bool = False
    min_tokens: int = 0


class Delta(NamedTuple):
    """The next piece of an output; the joined deltas are the whole output.

    `token_ids` are the new tokens, including tokens that ended the output. `log_probs` has an
    entry for each token that begins in the text sent so far and had no entry in an earlier delta.
    `finish_reason` is None before the last delta.
    """

    text: str
    token_ids: list[int]
    log_probs: list[TokenLogProb]
    finish_reason: str | None

    @staticmethod
    def joined(deltas: Sequence[Delta]) -> Delta:
        """Join consecutive deltas of an output into one."""
        return Delta(
            "".join(one.text for one in deltas),
            [token for one in deltas for token in one.token_ids],
            [log_prob for one in deltas for log_prob in one.log_probs],
            deltas[-1].finish_reason,
        )


class Output:
    """Decodes tokens into text. The text does not depend on how calls of `push` split the tokens.

    `offset` is the number of characters of the echoed prompt, which precedes this text in the
    answer. With `lists_end`, the log probability of the token that ended the output is also listed.
    `skip_special_tokens` and `special_texts` are those of `TextStream`. Without a tokenizer, texts
    are empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        ends: Ends,
        *,
        offset: int,
        skip_special_tokens: bool = True,
        lists_end: bool = False,
        special_texts: Mapping[int, str] | None = None,
    ) -> None:
        self.token_ids: list[int] = []
        self.token_starts: list[int] = []  # for each token, the length of `text` before it
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._ends = ends
        self._offset = offset
        self._lists_end = lists_end
        self._stops = StopStrings(ends.stops)
        self._stream = tokenizer and TextStream(
            tokenizer,
            prompt,
            skip_special_tokens=skip_special_tokens,
            special_texts=special_texts,
        )
        self._log_probs: list[TokenLogProb] = []
        self._is_cut = False
        # The numbers of items that `take` has returned.
        self._num_characters = self._num_log_probs = self._num_tokens = 0

    def push(self, tokens: Sequence[int], log_probs: Sequence[TokenLogProb] = ()) -> None:
        """Add new tokens, with their log probabilities if the request asks for them. Tokens after
        the end are ignored.
        """
        for index, token in enumerate(tokens):
            if self.finish_reason is not None:
                return
            self.token_ids.append(token)
            self.token_starts.append(len(self.text))
            may_end = len(self.token_ids) > self._ends.min_tokens
            is_end = may_end and token in self._ends.end_ids
            if is_end or (may_end and token in self._ends.stop_ids and not self._ends.keeps_stop):
                self._end("stop", None if is_end else token)
                if log_probs and self._lists_end and not self._is_cut:
                    self._list(log_probs[index])
            else:
                if log_probs:
                    self._list(log_probs[index])
                self._read("" if self._stream is None else self._stream.push(token), may_end)
                if may_end and token in self._ends.stop_ids and self.finish_reason is None:
                    self._end("stop", token)

    def finish(self, reason: FinishReason) -> None:
        """Record that the engine has ended the output, unless the output has already ended."""
        if self.finish_reason is None:
            self._end(FINISH_REASONS[reason])

    def take(self) -> Delta:
        """Return the delta since the last call. Text that may begin a stop is held back."""
        reason, end = self.finish_reason, len(self.text)
        if reason is None and self._ends.stops:
            end -= self._stops.num_held
        text, self._num_characters = self.text[self._num_characters : end], end
        tokens, self._num_tokens = self.token_ids[self._num_tokens :], len(self.token_ids)
        log_probs = self._take_log_probs(end) if self._log_probs else []
        return Delta(text, tokens, log_probs, reason)

    def _take_log_probs(self, end: int) -> list[TokenLogProb]:
        """Return the unsent log probabilities of tokens that begin before character `end`.

        When the output has ended without a stop string, return all unsent ones.
        """
        first, count = self._num_log_probs, len(self._log_probs)
        if self.finish_reason is None or self._is_cut:
            count = first
            while count < len(self._log_probs) and self._starts_before(end, count):
                count += 1
        self._num_log_probs = count
        return self._log_probs[first:count]

    def _list(self, log_prob: TokenLogProb) -> None:
        self._log_probs.append(log_prob._replace(start=self._offset + len(self.text)))

    def _starts_before(self, end: int, index: int) -> bool:
        return self._log_probs[index].start - self._offset < end

    def _read(self, text: str, may_end: bool) -> None:
        self.text += text
        found = self._stops.push(text, may_end=may_end) if self._ends.stops else None
        if found is not None:
            self.text = self.text[: found.end if self._ends.keeps_stop else found.begin]
            self.finish_reason, self.stop_reason, self._is_cut = "stop", found.stop, True

    def _end(self, reason: str, stop_reason: int | None = None) -> None:
        if self._stream is not None:
            self._read(self._stream.flush(), True)
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason = reason, stop_reason
