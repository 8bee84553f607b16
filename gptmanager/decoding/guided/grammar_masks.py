"""`Grammar` is a request's guided decoding; `GuidedSession` makes the token masks of a step.

The session decides which tokens may follow, and applies the masks to the logits. This module does
not compile grammars, and does not sample tokens. A sampled token is checked in the next step, as
part of the history.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gptmanager.cuda.device.streams import Stream
from gptmanager.cuda.device.uploads import Uploads
from gptmanager.cuda.sampling import token_masks
from gptmanager.decoding.guided.grammar_matcher import GrammarSource, fault_of
from gptmanager.decoding.guided.grammar_start import GrammarStart
from gptmanager.decoding.processors.rows import Errors, ProcessedSequence, Rows, RowSession
from gptmanager.errors import InvalidRequestError, LogitsError, RequestError
from gptmanager.kernels.token_masks import mask_logits
from gptmanager.request.post_processor import BoundProcessor

_NUM_BUFFERS = 4  # buffers of masks; more than the steps in flight
Words = npt.NDArray[np.int32]


class TextBans(Protocol):
    """A processor that bans tokens by the text before them, and can be combined with a grammar."""

    def prepare(self, device: str) -> Future[Any]: ...

    def banned_after(self, history: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the token ids that may not follow `history`, which has the prompt and output."""
        ...


class CompiledGrammar(Future[Any]):
    """A future of a grammar's matcher in its initial state.

    If the grammar cannot be compiled, all requests that wait get the same error. The error's
    traceback is dropped each time, because it would keep objects of all these requests alive.
    """

    unenforced: tuple[str, ...] = ()

    def __init__(self, source: GrammarSource) -> None:
        super().__init__()
        self.source = source

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        return None if error is None else error.with_traceback(None)

    def result(self, timeout: float | None = None) -> Any:
        error = self.exception(timeout)
        if error is not None:
            raise error
        return super().result()


class Grammar(BoundProcessor):
    """A grammar that is compiled, or being compiled; several requests may use the same one."""

    def __init__(
        self,
        owner: Any,
        kind: str,
        compiled: CompiledGrammar,
        bans: TextBans | None = None,
        start: GrammarStart | None = None,
    ) -> None:
        super().__init__(owner)
        self.kind = kind
        self._compiled, self._process = compiled, os.getpid()
        self.bans = bans
        self.start = start

    @property
    def name(self) -> str:
        return self.kind

    @property
    def compiled(self) -> CompiledGrammar:
        """The grammar. A forked process compiles it again, because threads are not forked."""
        if self._process != os.getpid():
            self._compiled = self.owner.compiled(self._compiled.source)
            self._process = os.getpid()
        return self._compiled

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Pointers to the keywords of a lenient schema that are not enforced.

        There are none before the grammar is compiled. For `lark` each pointer begins with the name
        of its rule.
        """
        return self.compiled.unenforced

    def without(self, bans: TextBans) -> Grammar:
        """Return this grammar, restricted to texts without a banned word.

        `bans` is a result of `BannedTexts.bind`: `grammar.without(banned_texts.bind(words))`.
        """
        return Grammar(self.owner, self.kind, self.compiled, bans, self.start)

    def after(self, start: GrammarStart) -> Grammar:
        """Return this grammar for the text after a thought."""
        return Grammar(self.owner, self.kind, self.compiled, self.bans, start)

    def prepare(self, device: str) -> Future[Any]:
        if self.bans is None:
            return self.compiled
        return _both(self.compiled, self.bans.prepare(device))


@dataclass(slots=True, eq=False)
class _Progress:
    """The position of a sequence in its grammar.

    All numbers count output tokens. `num_tokens`: up to the last token that the matcher has
    consumed. `ended_at`: up to the end id that ended the grammar's text, or None if the text has
    not ended. `start` finds where the text begins; None if the text begins with the output.
    `num_before`: the tokens before the text, or None if the text has not begun.
    """

    matcher: Any
    num_tokens: int = 0
    ended_at: int | None = None
    start: GrammarStart | None = None
    num_before: int | None = 0

    def copy(self) -> _Progress:
        return replace(self, matcher=self.matcher.deep_copy())

    @property
    def may_open(self) -> bool:
        """Whether the next token may open a thought. Only the first token of an output may."""
        return self.num_tokens == 0 and self.start is not None and self.start.opens is not None

    def follow(self, generated: npt.NDArray[np.int32], end_ids: frozenset[int]) -> None:
        """Consume the new tokens of the output, or roll back if a pause has shortened it.

        Raise InvalidRequestError for a token that the grammar does not permit at its position, and
        LogitsError if no text can follow.
        """
        count = len(generated)
        if self.ended_at is not None and count < self.ended_at:
            self.ended_at = None
        if count < self.num_tokens:
            kept = max(count, self.num_before or 0)
            if not self.matcher.rollback(self.num_tokens - kept):
                raise InvalidRequestError(self.matcher.get_error())
            self.num_tokens = count if count >= (self.num_before or 0) else 0
        if self.start is not None and not self.num_tokens:
            self.num_before = self.start.num_before(generated)
            if self.num_before is None:
                return
            self.num_tokens = self.num_before
        if count == self.num_tokens or self.ended_at is not None:
            return
        tokens = generated[self.num_tokens :].tolist()
        for index, token in enumerate(tokens):
            if token in end_ids:
                self.ended_at = self.num_tokens + index + 1
                tokens = tokens[:index]
                break
        taken = self.matcher.try_consume_tokens(tokens)
        self.num_tokens += taken
        if taken < len(tokens) and self.matcher.is_error():
            raise _dead_end(self)
        if taken < len(tokens):
            raise InvalidRequestError(
                f"token {tokens[taken]} at index {self.num_tokens} of the output does not continue "
                "the grammar; other inputs (min_length, bad words) may have banned all that do"
            )


class _Beams:
    """The positions of the beams of one request in their grammar.

    The key of a position is the beam's output tokens, so that beams may fork freely. A beam
    continues with a copy of its position in the previous step. After a pause, a new matcher
    consumes all tokens of the beam again.
    """

    def __init__(self) -> None:
        self._length = -1
        self._last: dict[bytes, _Progress] = {}
        self._now: dict[bytes, _Progress] = {}

    def follow(
        self, bound: Grammar, generated: npt.NDArray[np.int32], end_ids: frozenset[int]
    ) -> _Progress:
        """Return the position of the beam `generated`. Raise the errors of `_Progress.follow`."""
        if len(generated) != self._length:
            self._length = len(generated)
            self._last, self._now = self._now, {}
        text = generated.tobytes()
        progress = self._now.get(text)
        if progress is None:
            before = self._last.get(text[: -generated.itemsize])
            progress = _started(bound) if before is None else before.copy()
            progress.follow(generated, end_ids)
            self._now[text] = progress
        return progress


class GuidedSession(RowSession):
    """Computes and applies the masks of a step, on the loop's thread.

    A mask takes about 20 us. llguidance could use threads, but waiting for them would release the
    interpreter lock, which costs milliseconds if a host thread is busy. On a device a kernel
    applies the masks, and the loop does not wait for it.
    """

    def __init__(self, vocab_size: int, end_ids: frozenset[int], stream: Stream | None) -> None:
        self._stream = stream
        self._uploads = None if stream is None else Uploads(stream, _NUM_BUFFERS)
        self._end_ids = end_ids
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._masks: Words = np.empty((0, 0), dtype=np.int32)
        self._address = 0  # address of `_masks`: NumPy takes 3 us to return it

    def load(self, line: int, bound: Grammar) -> None:
        """Do nothing, because the state of a sequence is kept with its request."""

    def process(self, rows: Rows) -> Errors:
        errors: dict[int, BaseException] = {}
        masks = self._masks_for(rows)
        progresses: dict[int, _Progress] = {}  # only rows that have not failed
        lines, lengths = rows.lines.tolist(), rows.lengths.tolist()
        for index, sequence in enumerate(rows.sequences):
            try:
                history = rows.tokens[lines[index], sequence.orig_prompt_len : lengths[index]]
                progress = self._followed(sequence, history)
                self._compute(masks, index, sequence.end_ids, progress)
                if sequence.bound.bans is not None:
                    text = rows.tokens[lines[index], : lengths[index]]
                    _clear_bits(masks[index], sequence.bound.bans.banned_after(text))
                progresses[index] = progress
            except BaseException as error:  # noqa: B036 - includes panics of llguidance
                errors[index] = error
                masks[index] = 0
        if self._apply(masks, rows) > len(errors):  # a row without an error has an empty mask
            for index in np.flatnonzero(~masks.any(axis=1)).tolist():
                if index in progresses:
                    bound = rows.sequences[index].bound
                    errors[index] = _dead_end(progresses[index], has_bans=bound.bans is not None)
        # If the grammar permits fewer texts than the beam width, a beam search also has beams of
        # probability 0 with arbitrary tokens. The errors of these beams must not end the request.
        return {
            index: error
            for index, error in errors.items()
            if not (rows.sequences[index].is_searched and isinstance(error, RequestError))
        }

    def _apply(self, masks: Words, rows: Rows) -> int:
        """Apply the masks to the logits; return the number of masks that permit nothing."""
        if self._stream is None or self._uploads is None:
            return mask_logits(rows.logits, rows.index, masks)
        index, sent = self._uploads.upload((rows.index.astype(np.int32), masks))
        token_masks.mask_logits(self._stream.launcher, rows.logits, index, sent)
        return len(masks) - int(masks.any(axis=1).sum())

    def _masks_for(self, rows: Rows) -> Words:
        """Return an array of one mask per row, which still contains masks of an earlier step."""
        count = len(rows.sequences)
        if len(self._masks) < count:
            # The model and the tokenizer may have vocabularies of different sizes.
            width = max(-(-rows.logits.shape[1] // 32), self._num_words)
            self._masks = np.zeros((count, width), dtype=np.int32)
            self._address = self._masks.ctypes.data
        return self._masks[:count]

    def _compute(
        self, masks: Words, index: int, end_ids: frozenset[int], progress: _Progress
    ) -> None:
        """Compute the mask of one row. Tokens beyond the tokenizer's vocabulary are not permitted.

        The request's `end_ids` are permitted where the grammar's text is complete. After an end id,
        only end ids are permitted.
        """
        width = masks.shape[1]
        if width > self._num_words:
            masks[index, self._num_words :] = 0
        if progress.ended_at is not None:
            masks[index] = 0
            for token in end_ids or self._end_ids:
                _set_bit(masks[index], token, True)
            return
        if progress.num_before is None:
            may_end = progress.start is not None and progress.start.may_end
            self._permit_thought(masks[index], frozenset() if may_end else self._end_ids | end_ids)
            return
        address = self._address + index * width * 4
        progress.matcher.unsafe_compute_mask_ptr(address, self._num_words * 4)
        if progress.matcher.is_error():  # the mask then permits an end id, contrary to the grammar
            raise _dead_end(progress)
        for token in end_ids - self._end_ids:
            _set_bit(masks[index], token, progress.matcher.is_accepting())
        if progress.may_open:
            assert progress.start is not None and progress.start.opens is not None
            _set_bit(masks[index], progress.start.opens, True)

    def _permit_thought(self, mask: Words, banned: frozenset[int]) -> None:
        """Permit all tokens of the tokenizer except `banned`."""
        mask[: self._num_words] = -1
        beyond = np.arange(self._vocab_size, 32 * self._num_words)
        _clear_bits(mask, np.array([*banned, *beyond], dtype=np.int64))

    def _followed(self, sequence: ProcessedSequence, history: npt.NDArray[np.int32]) -> _Progress:
        kept, ends = sequence.request.kept, self._end_ids | sequence.end_ids
        if sequence.beam_width > 1:
            beams: _Beams = kept or _Beams()
            sequence.request.kept = beams
            return beams.follow(sequence.bound, history, ends)
        progress: _Progress = kept or _started(sequence.bound)
        sequence.request.kept = progress
        progress.follow(history, ends)
        return progress


def _set_bit(mask: Words, token: int, is_permitted: bool) -> None:
    bits, bit = mask.view(np.uint8), 1 << (token & 7)
    bits[token >> 3] = bits[token >> 3] & (255 - bit) | (bit if is_permitted else 0)


def _clear_bits(mask: Words, tokens: npt.NDArray[np.int64]) -> None:
    bits = mask.view(np.uint8)
    tokens = tokens[tokens < 8 * len(bits)]
    np.bitwise_and.at(bits, tokens >> 3, 255 - (1 << (tokens & 7)).astype(np.uint8))


def _dead_end(progress: _Progress, *, has_bans: bool = False) -> LogitsError:
    text = f"no token continues the grammar as generated token {progress.num_tokens + 1}"
    text += " without a bad word" if has_bans else ""
    fault = fault_of(progress.matcher)
    return LogitsError(f"{text}: {fault}" if fault else text)


def _both(first: Future[Any], second: Future[Any]) -> Future[Any]:
    """Return a future that is done when both are, or when `first` has failed."""
    joined: Future[Any] = Future()
    joined.set_running_or_notify_cancel()  # callers cannot cancel a running future

    def then(done: Future[Any], go_on: Callable[[], None]) -> None:
        error = CancelledError() if done.cancelled() else done.exception()
        if error is None:
            go_on()
        else:
            joined.set_exception(error)

    def end(done: Future[Any]) -> None:
        then(done, lambda: joined.set_result(None))

    first.add_done_callback(lambda done: then(done, lambda: second.add_done_callback(end)))
    return joined


def _started(bound: Grammar) -> _Progress:
    return _Progress(bound.compiled.result().deep_copy(), start=bound.start)
