"""`Confirmation`: applies the result of a step to the requests that ran in it.

It confirms tokens, and detects finished requests. It ends no request: it returns finished requests
to the caller, and passes failures on to the next intake.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from gptmanager.config import FinishReason
from gptmanager.decoding.end_rule import End
from gptmanager.errors import LogitsError
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.loop.allocation import Allocator
from gptmanager.loop.request_table import RequestTable
from gptmanager.statistics import DraftCounts
from gptmanager.step import NOT_FINITE, BeamCandidates, Failure, Row, Schedule, StepResult

# the request, why it finished, and the history position at which its output ends
Finished = tuple[ActiveRequest, FinishReason, int]


class Confirmation:
    """Applies the results of steps to the requests of a loop.

    `failing` holds the ids of requests that failed in a result. These requests end with the next
    intake. `drafts` and `num_logits_errors` count since the start. `num_removals` is the number of
    times that a result has removed blocks from the cache. `providers` are the names of the host's
    providers, which may have computed NaN.
    """

    def __init__(
        self, table: RequestTable, allocator: Allocator, providers: Sequence[str] = ()
    ) -> None:
        self._providers = providers
        self.failing: set[int] = set()
        self.drafts = DraftCounts()
        self.num_logits_errors = 0
        self.num_removals = 0
        self._table = table
        self._allocator = allocator

    def apply(
        self, schedule: Schedule, result: StepResult
    ) -> tuple[list[ActiveRequest], list[Finished]]:
        """Confirm tokens and detect ends. Return the requests to stream, and those that finished.

        A row is ignored if its request has ended or restarted since the launch. If a request has
        restarted, its epoch differs from that of the row.
        """
        streaming: list[ActiveRequest] = []
        finished: list[Finished] = []
        rows = schedule.sampling_rows
        if result.extras is not None:
            self._table.extras.take(self._table.by_id, rows, result.extras)
        if result.failures:
            self._hand_on(result.failures, schedule)
        if result.stale:
            self._recompute_others(schedule)
        find = self._table.by_id.get
        beams = iter(result.beams)
        counts = itertools.repeat(1) if result.num_tokens is None else result.num_tokens.tolist()
        for row, tokens, count in zip(rows, result.tokens.tolist(), counts, strict=False):
            request = find(row.request_id)
            candidates = next(beams) if row.beam_width > 1 else None
            if request is None or request.epoch != row.epoch or not count:
                continue
            times = request.times
            if times.first_token is None:
                times.first_token = result.now
            times.last_token = result.now
            fault, end = 0, None
            if candidates is not None:
                fault, end = _advance_beams(request, tokens[0], candidates)
            elif count != 1 or row.num_drafts:
                fault, end = self._confirm_several(request, row, tokens[:count])
            elif (token := tokens[0]) < 0:
                fault = token
            else:
                # same as `_confirm_several`, inlined to save a call per row
                request.tokens.append(token)
                length = len(request.tokens) - request.orig_prompt_len
                request.stop_state, end = request.end_rule.find(request.stop_state, token, length)
            if fault:
                self._end_by_fault(request, fault, schedule)
            if end is not None:
                reason, length = end
                finished.append((request, reason, request.orig_prompt_len + length))
            elif request.output.is_streaming and (not fault or candidates is None):
                streaming.append(request)  # tokens before the fault are valid
        return streaming, finished

    def _confirm_several(
        self, request: ActiveRequest, row: Row, tokens: Sequence[int]
    ) -> tuple[int, End | None]:
        """Confirm the accepted drafts and the token after them.

        Return (fault, end): the negative token that reports a fault, or 0 without a fault, and the
        end of the output, or None if the output continues.
        """
        if row.num_drafts:
            self._allocator.settle_drafts(request, row.num_drafts, len(tokens) - 1)
            self.drafts = self.drafts.plus(row.num_drafts, len(tokens) - 1)
        for token in tokens:
            if token < 0:
                return token, None
            request.tokens.append(token)
            request.stop_state, end = request.end_rule.find(
                request.stop_state, token, request.num_output
            )
            if end is not None:
                return 0, end
        return 0, None

    def _recompute_others(self, schedule: Schedule) -> None:
        """Forget all cached blocks, and pause the started requests without a row in `schedule`.

        Since the launch, these requests may have found blocks that the step has not computed.
        """
        self._allocator.kv_cache.clear_cached()
        self.num_removals += 1
        own = {(row.request_id, row.epoch) for row in schedule.rows}
        started = [request for request in self._table.active if request.slot >= 0]
        others = [request for request in started if (request.request_id, request.epoch) not in own]
        for failure in self._table.pause(others):
            self._fail(failure)

    def _hand_on(self, failures: Collection[Failure], schedule: Schedule) -> None:
        """Pass failures on to the next intake, except those of ended or restarted requests."""
        epochs = {row.request_id: row.epoch for row in schedule.rows}
        for failure in failures:
            request = self._table.by_id.get(failure.request_id)
            if request is not None and request.epoch == epochs[failure.request_id]:
                self._fail(failure)

    def _end_by_fault(self, request: ActiveRequest, fault: int, schedule: Schedule) -> None:
        """End a request in the next intake, because its row yielded `fault` instead of a token."""
        if fault == NOT_FINITE:  # its cached blocks may be invalid too
            self._allocator.kv_cache.withdraw(request.request_id)
            self.num_removals += 1
        error = _fault_error(request, fault, schedule.iteration, self._providers)
        self._fail(Failure(request.request_id, error))

    def _fail(self, failure: Failure) -> None:
        self.num_logits_errors += isinstance(failure.error, LogitsError)
        self._table.host.fail(failure)
        self.failing.add(failure.request_id)


def _advance_beams(
    request: ActiveRequest, token: int, candidates: BeamCandidates
) -> tuple[int, End | None]:
    """Append one token to every beam; return (fault, end) as `_confirm_several` does.

    With several beams, the tokens in `request.tokens` after the prompt are placeholders: their
    number is valid, their values are not.
    """
    if request.search is None:
        raise TypeError(f"request {request.request_id} has rows of beams but no search")
    request.confirm_token(token)
    if not request.search.advance(candidates):
        return 0, None
    if request.search.fault:
        return request.search.fault, None
    return 0, (FinishReason.LENGTH, request.num_output)


def _fault_error(
    request: ActiveRequest, fault: int, iteration: int, providers: Sequence[str]
) -> LogitsError:
    """Return the error of a request that got `fault`, NO_TOKEN or NOT_FINITE, as its next token."""
    number = request.num_output + (request.search is None)
    where = f"generated token {number} (iteration {iteration})"
    inputs = ", ".join(_changes(request)) or "none"
    if fault == NOT_FINITE:
        text = f"the logits of {where} hold NaN or +inf"
    else:
        text = f"no token is possible as {where}: every logit is -inf"
    text += f"; inputs of the request that change logits: {inputs}"
    if fault == NOT_FINITE and providers:
        text += f"; providers that computed attention or matmuls: {', '.join(providers)}"
    return LogitsError(text)


def _changes(request: ActiveRequest) -> list[str]:
    """Return the request's options that change logits, in the order in which they apply."""
    sampling = request.sampling
    asked = {
        "embedding_bias": sampling.embedding_bias,
        "repetition_penalty": sampling.repetition_penalty != 1,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "bad_words_list": sampling.bad_words,
        "noRepeatNgramSize": sampling.no_repeat_ngram_size,
        "min_length": sampling.min_length,
    }
    names = [name for name, is_asked in asked.items() if is_asked]
    processor = request.processor
    return names if processor is None else [f"logits_post_processor {processor.name}", *names]
