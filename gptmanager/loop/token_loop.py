"""`TokenLoop`: the token generation loop, one `iterate()` at a time.

The loop asks a scheduler which requests run, launches steps, and applies their results. It has no
thread, clock, file or model: it calls a `Host` and an `Executor`, so a manager, a replay, a
simulation and the tests all use the same class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gptmanager.errors import SchedulerError
from gptmanager.kv_cache import LedgerError
from gptmanager.lifecycle.watchdog import CallbackTimer
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.loop.adapters import Adapters, no_adapters
from gptmanager.loop.allocation import Allocator
from gptmanager.loop.confirmation import Confirmation, Finished
from gptmanager.loop.limits import Limits
from gptmanager.loop.request_table import RequestTable, RequestTableState
from gptmanager.loop.responses import MakeFinal, final_tensors
from gptmanager.loop.scheduler_call import blamed, decide
from gptmanager.request.llm_request import LlmRequest, LlmRequestState
from gptmanager.scheduler import RequestScheduler, SchedulerOutput
from gptmanager.statistics import Counts, DraftCounts, PhaseTimes, timed_phase
from gptmanager.step import Executor, Host, Intake, Schedule, StepResult

_PREPARING = LlmRequestState.PREPARING
_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS
_TO_COMPLETE = LlmRequestState.GENERATION_TO_COMPLETE


class LoopState(NamedTuple):
    """The state of a token loop between two iterations. A recording may start from this state.

    A replay restores only these fields. `pending` has the schedules of the launched steps with
    results that are not applied yet, oldest first. `failing` has the ids of active requests that
    failed in a result, and end with the next intake. `drafts` and `num_logits_errors` count since
    the start of the loop.
    """

    request_table: RequestTableState
    pending: tuple[Schedule, ...]
    failing: tuple[int, ...]
    drafts: DraftCounts
    num_logits_errors: int


class TokenLoop:
    """In-flight batching of requests on one executor and one KV cache.

    At most `max_active` requests are active, if it is not None. If `run_ahead` is 1, a step
    is launched before the tokens of the preceding step are known, and may have the same requests.
    If `num_micro_batches` is more than 1, up to this number of micro batches are in flight, and no
    request is in two of them. `adapters` is None if no request has an adapter. `providers` are the
    names of the host's providers of attention and matmuls, for errors. `final` creates the tensors
    of final responses.
    """

    def __init__(
        self,
        host: Host,
        executor: Executor,
        scheduler: RequestScheduler,
        allocator: Allocator,
        limits: Limits,
        *,
        adapters: Adapters | None = None,
        max_active: int | None,
        max_batch_size: int,
        max_num_tokens: int,
        run_ahead: int = 0,
        num_micro_batches: int = 1,
        phase_times: PhaseTimes,
        providers: Sequence[str] = (),
        final: MakeFinal = final_tensors,
    ) -> None:
        self.table = RequestTable(host, allocator, adapters or no_adapters(), limits, final)
        self.confirmation = Confirmation(self.table, allocator, providers)
        self.allocator = allocator
        self.executor = executor
        self.scheduler = scheduler
        self.max_active = max_active
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.run_ahead = run_ahead
        self.num_micro_batches = num_micro_batches
        self.phase_times = phase_times
        self.scheduler_timer = CallbackTimer("Scheduler")
        # launched steps without an applied result, oldest first; always empty if max_pending is 0
        self.pending: tuple[Any, ...] = ()

    @property
    def max_pending(self) -> int:
        """How many steps may be pending when the next step is launched."""
        return max(self.run_ahead, self.num_micro_batches - 1)

    @property
    def active(self) -> list[ActiveRequest]:
        """The requests without a final response, sorted by priority, then arrival."""
        return self.table.active

    @property
    def holds_requests(self) -> bool:
        """Whether a request, admitted or not, still lacks its final response."""
        return self.table.holds_requests

    # The loop: names and order are those of docs/loop.md -----------------------------------

    def iterate(self) -> bool:
        """Run one iteration; return False if there was nothing to do."""
        self.phase_times.restart()
        pending = self.pending
        intake = self.fetch()
        self.take_in(intake)
        self.finish_awaited()
        decision = self.finish_recalled(self.schedule())
        schedule = self.allocate(decision, intake.now, pending)
        num_active = len(self.table.active)
        num_recomputed = _num_recomputed(schedule, self.table.by_id) if schedule else 0
        step = self.forward(schedule) if schedule else None
        if step is None or len(self.pending) == self.max_pending:
            self.finish_pending()
        if step is not None:
            self.sample(step)
            if self.max_pending:
                self.pending += (step,)
            else:
                self.finish(step)
        if self.table.active or step is not None or pending:
            self.poll()
        if step is None and not pending:
            return False
        if schedule is not None:
            self.report(schedule, num_active, num_recomputed)
        return True

    @timed_phase
    def fetch(self) -> Intake:
        """Return the host's input, such as new requests and stop signals."""
        num_active = len(self.table.active)
        room = None if self.max_active is None else max(0, self.max_active - num_active)
        return self.table.host.fetch(room, num_active)

    @timed_phase
    def take_in(self, intake: Intake) -> None:
        """Apply the intake: end requests, and admit new ones."""
        self.confirmation.failing.clear()
        self.table.take_in(intake)

    def finish_awaited(self) -> None:
        """Finish the pending step if a request with beams or drafts needs the step's tokens."""
        if self.table.num_serial and self.num_micro_batches == 1:
            self.finish_pending()  # with run-ahead, at most one step is pending

    @timed_phase
    def schedule(self) -> SchedulerOutput | None:
        """Return the checked decision of the scheduler; None if no active request can be chosen."""
        table, in_flight = self.table, self.in_flight()
        if table.num_serial:
            for request in table.active:
                if request.state is _IN_PROGRESS and request.request_id not in in_flight:
                    request.propose_drafts()
        # a copy, because a scheduler may change the list
        active: list[LlmRequest] = list(table.active)
        if table.must_wait:
            active = [request for request in active if request.state is not _PREPARING]
        if len(in_flight) == len(active):
            return None
        return decide(
            self.scheduler,
            self.scheduler_timer,
            active,
            in_flight,
            table.by_id,
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
        )

    def in_flight(self) -> frozenset[int]:
        """Return the ids of active requests that hold memory but cannot be scheduled now.

        With run-ahead, requests of the pending step can be scheduled unless they are about to end.
        """
        if not self.pending:  # nothing runs; failed requests end only with the next intake
            return frozenset(self.confirmation.failing)
        if self.num_micro_batches == 1:  # run-ahead: requests of the pending step may run again
            return frozenset(r.request_id for r in self.table.active if r.state is _TO_COMPLETE)
        find = self.table.by_id.get
        return frozenset(
            row.request_id
            for step in self.pending
            for row in step.schedule.rows
            if (request := find(row.request_id)) is not None and request.epoch == row.epoch
        )

    def finish_recalled(self, decision: SchedulerOutput | None) -> SchedulerOutput | None:
        """Finish micro batches, oldest first, until none has a request that `decision` pauses.

        Return the decision. If a result has removed blocks from the cache, on which the decision
        relies, no request starts. Requests that a result has paused do not run, either.
        """
        if decision is None or self.num_micro_batches == 1 or not decision.paused_requests:
            return decision
        recalled = {request.request_id for request in decision.paused_requests}
        num_removals = self.confirmation.num_removals
        while self.pending and not recalled.isdisjoint(self.in_flight()):
            self.finish_pending()
        if self.confirmation.num_removals == num_removals:
            return decision
        started = ([r for r in requests if r.slot >= 0] for requests in decision)
        return SchedulerOutput(*started)

    @timed_phase
    def allocate(
        self, decision: SchedulerOutput | None, now: float, pending: tuple[Any, ...]
    ) -> Schedule | None:
        """Allocate memory for the decision, and return the schedule; None if no request runs.

        `pending` are the steps that were in flight when the iteration began.
        """
        if decision is None:
            return None
        micro_batch_id = 0
        if self.num_micro_batches > 1:
            if pending:
                newest: Schedule = pending[-1].schedule
                micro_batch_id = (newest.micro_batch_id + 1) % self.num_micro_batches
            # `finish_recalled` may have applied results that ended some of the paused requests
            paused = [r for r in decision.paused_requests if r.request_id in self.table.by_id]
            decision = decision._replace(paused_requests=paused)
        try:
            most = self.table.limits.max_seq_len
            schedule = self.allocator.allocate(decision, now, most, micro_batch_id)
        except SchedulerError as error:
            raise blamed(self.scheduler, error) from error.__cause__
        for request in decision.paused_requests:
            self.table.adapters.pause(request)
        return schedule

    @timed_phase
    def forward(self, schedule: Schedule) -> Any:
        """Launch the model's step for `schedule`, and return the step."""
        return self.executor.forward(schedule)

    @timed_phase
    def sample(self, step: Any) -> None:
        """Launch the sampling of the step's tokens."""
        self.executor.sample(step)

    def finish_pending(self) -> None:
        """Finish the oldest pending step, if any."""
        if self.pending:
            oldest, *others = self.pending
            self.pending = tuple(others)
            self.finish(oldest)

    def finish(self, step: Any) -> None:
        """Wait for the step's result, apply it, and send responses."""
        self.respond(*self.apply(step, self.result(step)))

    @timed_phase
    def result(self, step: Any) -> StepResult:
        """Wait for the step's result, and return it."""
        return self.executor.result(step)

    @timed_phase
    def apply(self, step: Any, result: StepResult) -> tuple[list[ActiveRequest], list[Finished]]:
        """Confirm tokens and detect ends.

        Return the requests with new tokens to stream, and the finished requests.
        """
        return self.confirmation.apply(step.schedule, result)

    @timed_phase
    def respond(self, streaming: list[ActiveRequest], finished: list[Finished]) -> None:
        """Send the new tokens of streaming requests, then the final responses."""
        if streaming:
            self.table.stream(streaming)
        for request, reason, output_end in finished:
            self.table.finish_request(request, reason, output_end)

    @timed_phase
    def poll(self) -> None:
        self.table.host.poll()

    def report(self, schedule: Schedule, num_active: int, num_recomputed: int) -> None:
        """Report the counts of the iteration to the host."""
        if self.table.adapters.has_changed:
            self.table.adapters.count()
        kv_cache = self.allocator.kv_cache
        counts = Counts(
            iteration=schedule.iteration,
            active=num_active,
            max_active=-1 if self.max_active is None else self.max_active,
            context=len(schedule.context_rows),
            generation=len(schedule.generation_rows),
            context_tokens=schedule.num_context_tokens,
            recomputed_tokens=num_recomputed,
            sampled=schedule.num_sampling_rows,
            paused=len(schedule.paused),
            micro_batch_id=schedule.micro_batch_id,
            free_blocks=kv_cache.get_num_free_blocks(),
            total_blocks=kv_cache.get_max_resource_count(),
            tokens_per_block=kv_cache.tokens_per_block,
            block_reuse=kv_cache.reuse_counts,
            drafts=self.confirmation.drafts,
            logits_errors=self.confirmation.num_logits_errors,
            adapters=self.table.adapters.counts,
            weights_version=self.table.weights_version,
        )
        self.table.host.report(counts, self.phase_times)

    # As data -------------------------------------------------------------------------------

    def state(self) -> LoopState:
        """Return the state as data. Call it between two iterations.

        Lists in the state are shared with the loop; copy them to keep them.
        """
        pending = tuple(step.schedule for step in self.pending)
        confirmed = self.confirmation
        failing, errors = tuple(confirmed.failing), confirmed.num_logits_errors
        return LoopState(self.table.state(), pending, failing, confirmed.drafts, errors)

    def restore(self, state: LoopState, pending: Iterable[Any]) -> None:
        """Restore `state` into a new loop. `pending` are the steps for `state.pending`."""
        self.pending = tuple(pending)
        if len(self.pending) > self.max_pending:
            text = f"{len(self.pending)} steps are pending, the limit is {self.max_pending}"
            raise LedgerError(text)
        self.table.restore(state.request_table)
        self.confirmation.failing = set(state.failing)
        self.confirmation.drafts = state.drafts
        self.confirmation.num_logits_errors = state.num_logits_errors

    # Failure and end -----------------------------------------------------------------------

    def abort(self, error: BaseException) -> None:
        """End all requests with an error response. The loop cannot iterate afterwards."""
        self.pending = ()
        self.table.abort(error)

    def recover(self, error: BaseException) -> None:
        """Recover after an iteration raised an exception: end every request that holds memory.

        Afterwards all memory is free and nothing is cached. The other requests continue.
        """
        self.pending = ()
        self.confirmation.failing.clear()
        self.table.recover(error)

    def release(self) -> None:
        """Drop the executor with its weights and pages. The loop cannot iterate afterwards."""
        self.pending = ()
        del self.executor


def _num_recomputed(schedule: Schedule, by_id: Mapping[int, ActiveRequest]) -> int:
    """Return how many context tokens of `schedule` belong to requests that were paused before."""
    rows = schedule.context_rows
    return sum(row.num_tokens for row in rows if by_id[row.request_id].pause_count)
