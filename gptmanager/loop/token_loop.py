"""`TokenLoop`: the token generation loop, one `iterate()` at a time.

Decides who runs, and takes what comes of it. Owns no thread, clock, file or model: the world is a
`Host`, the network an `Executor`, so that a manager, a replay, a simulation and the tests drive the
very same object.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from gptmanager.config import FinishReason
from gptmanager.errors import LogitsError, SchedulerError, response_text
from gptmanager.lifecycle.watchdog import CallbackTimer
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.loop.admission import Limits
from gptmanager.loop.allocation import Allocator, check_output
from gptmanager.loop.logits_faults import fault_error
from gptmanager.loop.loop_state import LoopState
from gptmanager.loop.request_table import RequestTable
from gptmanager.loop.responses import stream_one_token, stream_tokens
from gptmanager.request.llm_request import LlmRequest, LlmRequestState
from gptmanager.scheduler import RequestScheduler, SchedulerOutput
from gptmanager.statistics import Counts, DraftCounts, PhaseTimes, timed_phase
from gptmanager.step import NOT_FINITE, Executor, Failure, Host, Intake, Schedule, StepResult

_PREPARING = LlmRequestState.PREPARING
_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS
_TO_COMPLETE = LlmRequestState.GENERATION_TO_COMPLETE

End = tuple[ActiveRequest, FinishReason, int]  # who ends, why, where its output ends


class TokenLoop(RequestTable):
    """In-flight batching of requests over one executor and one KV cache.

    `max_active` None: unbounded. `run_ahead` 1: a request is scheduled again before its last
    token is known. `num_micro_batches` 2: a micro batch of other requests is launched before the
    result of the one in flight.
    """

    def __init__(
        self,
        host: Host,
        executor: Executor,
        scheduler: RequestScheduler,
        allocator: Allocator,
        limits: Limits,
        *,
        max_active: int | None,
        max_batch_size: int,
        max_num_tokens: int,
        run_ahead: int = 0,
        num_micro_batches: int = 1,
        phase_times: PhaseTimes,
    ) -> None:
        super().__init__(host, allocator, limits)
        self.executor = executor
        self.scheduler = scheduler
        self.max_active = max_active
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.run_ahead = run_ahead
        self.num_micro_batches = num_micro_batches
        self.phase_times = phase_times
        self.scheduler_timer = CallbackTimer("Scheduler")
        self.drafts = DraftCounts()
        self.num_logits_errors = 0
        self.pending: Any = None  # run-ahead, overlap: the step whose result is not applied yet
        self._failing: set[int] = set()  # they failed in a result and end with the next intake

    # The loop, in the words and the order of docs/loop.md ----------------------------------

    def iterate(self) -> bool:
        """One iteration; False when there was nothing to do."""
        self.phase_times.restart()
        pending = self.pending
        intake = self.fetch()
        self.take_in(intake)
        self.finish_awaited()
        decision = self.schedule()
        self.finish_recalled(decision)
        schedule = self.allocate(decision, intake.now, pending)
        num_active = len(self.active)
        step = self.forward(schedule) if schedule else None
        self.finish_pending()
        if step is not None:
            self.sample(step)
            if self.run_ahead or self.num_micro_batches > 1:
                self.pending = step
            else:
                self.finish(step)
        if self.active or step is not None or pending is not None:
            self.poll()
        if step is None and pending is None:
            return False
        if schedule is not None:
            self.report(schedule, num_active)
        return True

    @timed_phase
    def fetch(self) -> Intake:
        room = None if self.max_active is None else max(0, self.max_active - len(self.active))
        return self.host.fetch(room, len(self.active))

    @timed_phase
    def take_in(self, intake: Intake) -> None:
        self._failing.clear()
        super().take_in(intake)

    def finish_awaited(self) -> None:
        """Beams and drafts: what they run next depends on the result that is pending."""
        if self._num_serial and self.num_micro_batches == 1:
            self.finish_pending()

    @timed_phase
    def schedule(self) -> SchedulerOutput | None:
        """Decide who runs, checked; None: there is nobody to ask about."""
        in_flight = self.in_flight()
        if self._num_serial:
            for request in self.active:
                if request.state is _IN_PROGRESS and request.request_id not in in_flight:
                    request.propose_drafts()
        # a copy: a scheduler may do with its list what it likes
        active: list[LlmRequest] = list(self.active)
        if self._preparing:
            active = [request for request in active if request.state is not _PREPARING]
        if len(in_flight) == len(active):
            return None
        return self._decide(active, in_flight, type(self.scheduler).__name__)

    def finish_recalled(self, decision: SchedulerOutput | None) -> None:
        """Overlap: who is to pause while in flight pauses when its micro batch has returned."""
        if decision is None or self.num_micro_batches == 1 or not decision.paused_requests:
            return
        in_flight = self.in_flight()
        if any(request.request_id in in_flight for request in decision.paused_requests):
            self.finish_pending()

    @timed_phase
    def allocate(
        self, decision: SchedulerOutput | None, now: float, pending: Any
    ) -> Schedule | None:
        """Give out memory; None: nobody runs. `pending`: the step in flight when it was decided."""
        if decision is None:
            return None
        micro_batch_id = 0
        if self.num_micro_batches > 1:
            if pending is not None:
                micro_batch_id = 1 - pending.schedule.micro_batch_id
            # not those whose micro batch has returned with their end
            paused = [r for r in decision.paused_requests if r.request_id in self.requests]
            decision = decision._replace(paused_requests=paused)
        name = type(self.scheduler).__name__
        return self.allocator.allocate(decision, now, self.limits.max_seq_len, name, micro_batch_id)

    def in_flight(self) -> frozenset[int]:
        """The active requests that hold memory, but must not run now."""
        if self.pending is None:  # a token that failed is launched, but will never be confirmed
            return frozenset(self._failing)
        if self.num_micro_batches == 1:  # what is launched may be launched again, but at its end
            return frozenset(r.request_id for r in self.active if r.state is _TO_COMPLETE)
        schedule: Schedule = self.pending.schedule
        find = self.requests.get
        return frozenset(
            row.request_id
            for row in (*schedule.context_rows, *schedule.generation_rows)
            if (request := find(row.request_id)) is not None and request.epoch == row.epoch
        )

    def _decide(
        self, active: list[LlmRequest], in_flight: frozenset[int], name: str
    ) -> SchedulerOutput:
        """The checked answer of the scheduler, whose class is called `name`."""
        self.scheduler_timer.start()
        try:
            answer = self.scheduler.schedule_request(active, in_flight)
        except (SchedulerError, MemoryError):  # that it has no memory is not its doing
            raise
        except Exception as error:
            raise SchedulerError(f"{name} raised {response_text(error)}") from error
        finally:
            self.scheduler_timer.stop()
        try:
            output = SchedulerOutput(*map(list, answer))
            check_output(
                output,
                self.requests,
                in_flight,
                name,
                max_batch_size=self.max_batch_size,
                max_num_tokens=self.max_num_tokens,
            )
        except (SchedulerError, MemoryError):
            raise
        except Exception as error:
            shown = reprlib.repr(answer)
            raise SchedulerError(f"{name} returned {shown}, expected lists of requests") from error
        return output

    @timed_phase
    def forward(self, schedule: Schedule) -> Any:
        return self.executor.forward(schedule)

    @timed_phase
    def sample(self, step: Any) -> None:
        self.executor.sample(step)

    def finish_pending(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            self.finish(pending)

    def finish(self, step: Any) -> None:
        self.respond(*self.apply(step, self.result(step)))

    @timed_phase
    def result(self, step: Any) -> StepResult:
        return self.executor.result(step)

    @timed_phase
    def apply(self, step: Any, result: StepResult) -> tuple[list[ActiveRequest], list[End]]:
        """Confirm tokens and find ends; gives who streams on and who has finished.

        A row whose request has ended or restarted since the launch is dropped by its epoch.
        """
        streaming: list[ActiveRequest] = []
        finished: list[End] = []
        find = self.requests.get
        rows = step.schedule.sampling_rows
        beams = iter(result.beams)
        if result.extras is not None:
            self.outputs.take(self.requests, rows, result.extras)
        counts = itertools.repeat(1) if result.num_tokens is None else result.num_tokens.tolist()
        if result.failures:
            every = (*step.schedule.context_rows, *step.schedule.generation_rows)
            self._hand_on(result.failures, {row.request_id: row.epoch for row in every})
        if result.stale:
            self.allocator.kv_cache.clear_cached()
        for row, tokens, count in zip(rows, result.tokens.tolist(), counts, strict=False):
            request = find(row.request_id)
            candidates = next(beams) if row.beam_width > 1 else None
            if request is None or request.epoch != row.epoch or not count:
                continue
            if request.first_token is None:
                request.first_token = result.now
            request.last_token = result.now
            if request.search is not None and candidates is not None:
                request.confirm_token(tokens[0])
                if request.search.advance(candidates):
                    if request.search.fault:
                        self._end_by_fault(request, request.search.fault, step.schedule)
                        continue
                    finished.append((request, FinishReason.LENGTH, len(request.tokens)))
                elif request.is_streaming:
                    streaming.append(request)
                continue
            if row.num_drafts:
                self.allocator.settle_drafts(request, row.num_drafts, count - 1)
                self.drafts = self.drafts.plus(row.num_drafts, count - 1)
            for token in tokens[:count]:
                if token < 0:
                    self._end_by_fault(request, token, step.schedule)
                    if request.is_streaming:  # guesses before it were right
                        streaming.append(request)
                    break
                request.confirm_token(token)
                end = request.find_end(token)
                if end is not None:
                    finished.append((request, *end))
                    break
            else:
                if request.is_streaming:
                    streaming.append(request)
        return streaming, finished

    def _hand_on(self, failures: Collection[Failure], epochs: Mapping[int, int]) -> None:
        """What failed in a step ends its request with the next intake, if it is the same still."""
        for failure in failures:
            request = self.requests.get(failure.request_id)
            if request is not None and request.epoch == epochs[failure.request_id]:
                self._fail(failure)

    def _end_by_fault(self, request: ActiveRequest, fault: int, schedule: Schedule) -> None:
        """A row of `schedule` has no token, and its request ends with the next intake."""
        if fault == NOT_FINITE:  # what was computed for it may be as wrong
            self.allocator.kv_cache.withdraw(request.request_id)
        self._fail(Failure(request.request_id, fault_error(request, fault, schedule.iteration)))

    def _fail(self, failure: Failure) -> None:
        self.num_logits_errors += isinstance(failure.error, LogitsError)
        self.host.fail(failure)
        self._failing.add(failure.request_id)

    @timed_phase
    def respond(self, streaming: list[ActiveRequest], finished: list[End]) -> None:
        """Send new tokens, then finals."""
        send = self.host.respond
        one_token = []
        for request in streaming:
            end = request.streamable_end
            if end == len(request.tokens) == request.num_sent + 1 and not request.has_extras:
                one_token.append(request)
            elif end > request.num_sent:
                send(request.request_id, stream_tokens(request, end, self.outputs), False, "")
        if one_token:
            for request, tensors in zip(one_token, stream_one_token(one_token), strict=True):
                send(request.request_id, tensors, False, "")
        for request, reason, output_end in finished:
            self.finish_request(request, reason, output_end)

    @timed_phase
    def poll(self) -> None:
        self.host.poll()

    def report(self, schedule: Schedule, num_active: int) -> None:
        kv_cache = self.allocator.kv_cache
        counts = Counts(
            iteration=schedule.iteration,
            active=num_active,
            max_active=-1 if self.max_active is None else self.max_active,
            context=len(schedule.context_rows),
            generation=len(schedule.generation_rows),
            context_tokens=schedule.num_context_tokens,
            sampled=schedule.num_sampling_rows,
            paused=len(schedule.paused),
            micro_batch_id=schedule.micro_batch_id,
            free_blocks=kv_cache.get_num_free_blocks(),
            total_blocks=kv_cache.get_max_resource_count(),
            tokens_per_block=kv_cache.tokens_per_block,
            block_reuse=kv_cache.reuse_counts,
            drafts=self.drafts,
            logits_errors=self.num_logits_errors,
        )
        self.host.report(counts, self.phase_times)

    # As data -------------------------------------------------------------------------------

    def state(self) -> LoopState:
        """Between two iterations. Its lists may be copied when it is written only."""
        pending = None if self.pending is None else self.pending.schedule
        failing, errors = tuple(self._failing), self.num_logits_errors
        return LoopState(self.table_state(), pending, failing, self.drafts, errors)

    def restore(self, state: LoopState, pending: Any) -> None:
        """Bring a new loop to `state`; `pending`: the step of its pending schedule."""
        self.restore_table(state.request_table)
        self.pending = pending
        self._failing, self.drafts = set(state.failing), state.drafts
        self.num_logits_errors = state.num_logits_errors

    # The end of all ------------------------------------------------------------------------

    def abort(self, error: BaseException) -> None:
        """End all requests with an error response: the loop will not iterate again."""
        self.pending = None
        super().abort(error)

    def recover(self, error: BaseException) -> None:
        """After an iteration that raised: end what it may have left half done, go on with the rest.

        That is every request that holds memory. What they held is free, and nothing is cached.
        """
        self.pending = None
        self._failing.clear()
        super().recover(error)

    def release(self) -> None:
        """Let go of the executor, its weights and pages: the loop will not iterate again."""
        self.pending = None
        del self.executor
