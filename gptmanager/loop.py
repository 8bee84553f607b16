"""`TokenLoop`: the token generation loop, one `iterate()` at a time.

Holds the active requests. Owns no thread, clock, file or model: the world is a `Host`, the
network an `Executor`, so that a manager, a replay, a simulation and the tests drive the very same
object.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from gptmanager.active import ActiveRequest
from gptmanager.admission import Limits, admit
from gptmanager.allocation import Allocator, check_output
from gptmanager.api import InferenceRequest, NamedTensor
from gptmanager.config import FinishReason
from gptmanager.errors import (
    DuplicateRequestIdError,
    InvalidRequestError,
    RequestError,
    SchedulerError,
    response_text,
)
from gptmanager.post_processor import RequestProcessor
from gptmanager.request import LlmRequest, LlmRequestState, insert_by_priority
from gptmanager.responses import final, stream_one_token, stream_tokens
from gptmanager.scheduler import RequestScheduler, SchedulerOutput
from gptmanager.statistics import Counts, Laps, lap
from gptmanager.step import Executor, Failure, Intake, Schedule, StepResult

logger = logging.getLogger("gptmanager")

_PREPARING = LlmRequestState.PREPARING
_TO_COMPLETE = LlmRequestState.GENERATION_TO_COMPLETE

End = tuple[ActiveRequest, FinishReason, int]  # who ends, why, where its output ends


class Host(Protocol):
    """The world around the loop. No method raises because a callback did."""

    def fetch(self, room: int | None, num_active: int) -> Intake:
        """What has come in; `room` requests may be asked for, None: any number."""

    def respond(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        """Deliver a response; a failure to do so enters with the next intake."""

    def prepare(self, request_id: int, processor: RequestProcessor) -> None:
        """See to it that `processor` gets ready; that it is, or fails, enters with an intake."""

    def fail(self, failure: Failure) -> None:
        """An effect has failed; it enters with the next intake."""

    def poll(self) -> None:
        """Ask for stop signals; they enter with the next intake."""

    def report(self, counts: Counts, laps: Laps) -> None:
        """Deliver the statistics of an iteration that ran a forward pass."""


class TokenLoop:
    """In-flight batching of requests over one executor and one KV cache.

    `max_active` None: unbounded. `run_ahead` 1: a request is scheduled again before its last
    token is known.
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
        laps: Laps,
    ) -> None:
        self.host = host
        self.executor = executor
        self.scheduler = scheduler
        self.allocator = allocator
        self.limits = limits
        self.max_active = max_active
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.run_ahead = run_ahead
        self.laps = laps
        self.active: list[ActiveRequest] = []  # by priority, then arrival
        self.requests: dict[int, ActiveRequest] = {}  # the same, by id
        self.pending: Any = None  # under run-ahead: the step whose result is not applied yet
        self._timed: dict[int, ActiveRequest] = {}  # those with a deadline
        self._preparing: set[int] = set()  # those that wait for their logits post-processor
        self._arriving: deque[InferenceRequest] = deque()  # fetched, not admitted yet

    # The loop, in the words and the order of docs/loop.md ----------------------------------

    def iterate(self) -> bool:
        """One iteration; False when there was nothing to do."""
        self.laps.restart()
        schedule = self.schedule(self.fetch())
        num_active = len(self.active)
        step = self.forward(schedule) if schedule else None
        pending, self.pending = self.pending, None
        if pending is not None:
            self.finish(pending)
        if step is not None:
            self.sample(step)
            if self.run_ahead:
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

    @lap
    def fetch(self) -> Intake:
        room = None if self.max_active is None else max(0, self.max_active - len(self.active))
        return self.host.fetch(room, len(self.active))

    @lap
    def schedule(self, intake: Intake) -> Schedule | None:
        """Take the intake in, decide who runs, give out memory; None: nobody runs."""
        self._take_in(intake)
        launched: list[int] = []  # to the end: they hold memory, but have nothing left to run
        if self.pending is not None:
            launched = [r.request_id for r in self.active if r.state is _TO_COMPLETE]
        # a copy: a scheduler may do with its list what it likes
        active: list[LlmRequest] = list(self.active)
        if self._preparing:
            active = [request for request in active if request.state is not _PREPARING]
        if len(launched) == len(active):
            return None
        name = type(self.scheduler).__name__
        try:
            answer = self.scheduler.schedule_request(active, frozenset(launched))
            output = SchedulerOutput(*map(list, answer))
            check_output(
                output,
                self.requests,
                launched,
                name,
                max_batch_size=self.max_batch_size,
                max_num_tokens=self.max_num_tokens,
            )
        except SchedulerError:
            raise
        except Exception as error:
            raise SchedulerError(f"{name} raised {response_text(error)}") from error
        return self.allocator.allocate(output, intake.now, self.limits.max_seq_len, name)

    @lap
    def forward(self, schedule: Schedule) -> Any:
        return self.executor.forward(schedule)

    @lap
    def sample(self, step: Any) -> None:
        self.executor.sample(step)

    def finish(self, step: Any) -> None:
        self.respond(*self.apply(step, self.result(step)))

    @lap
    def result(self, step: Any) -> StepResult:
        return self.executor.result(step)

    @lap
    def apply(self, step: Any, result: StepResult) -> tuple[list[ActiveRequest], list[End]]:
        """Confirm tokens and find ends; gives who streams on and who has finished.

        A row whose request has ended or restarted since the launch is dropped by its epoch.
        """
        streaming: list[ActiveRequest] = []
        finished: list[End] = []
        find = self.requests.get
        rows = step.schedule.sampling_rows
        counts = itertools.repeat(1) if result.num_tokens is None else result.num_tokens.tolist()
        if result.failures:
            self._hand_on(result.failures, {row.request_id: row.epoch for row in rows})
        for row, tokens, count in zip(rows, result.tokens.tolist(), counts, strict=False):
            request = find(row.request_id)
            if request is None or request.epoch != row.epoch:
                continue
            if request.first_token is None:
                request.first_token = result.now
            request.last_token = result.now
            for token in tokens[:count]:
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
                self.host.fail(failure)

    @lap
    def respond(self, streaming: list[ActiveRequest], finished: list[End]) -> None:
        """Send new tokens, then finals."""
        send = self.host.respond
        one_token = []
        for request in streaming:
            end = request.streamable_end
            if end == len(request.tokens) == request.num_sent + 1:
                one_token.append(request)
            elif end > request.num_sent:
                send(request.request_id, stream_tokens(request, end), False, "")
        if one_token:
            for request, tensors in zip(one_token, stream_one_token(one_token), strict=True):
                send(request.request_id, tensors, False, "")
        for request, reason, output_end in finished:
            self.finish_request(request, reason, output_end)

    @lap
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
            paused=len(schedule.paused),
            micro_batch_id=schedule.micro_batch_id,
            free_blocks=kv_cache.get_num_free_blocks(),
            total_blocks=kv_cache.get_max_resource_count(),
            tokens_per_block=kv_cache.tokens_per_block,
            block_reuse=kv_cache.reuse_counts,
        )
        self.host.report(counts, self.laps)

    # Taking in -----------------------------------------------------------------------------

    def _take_in(self, intake: Intake) -> None:
        """Failures, stops and time limits end requests; then the new ones come in.

        An id was free for a new request only if its final response had been sent when Get ran.
        """
        taken = self.requests.keys() & {request.request_id for request in intake.requests}
        self._arriving.extend(intake.requests)
        for failure in intake.failures:
            if failure.request_id in self.requests:
                self.fail_request(self.requests[failure.request_id], failure.error)
        for request_id in sorted(intake.stops):
            request = self.requests.get(request_id)
            if request is None:
                logger.debug("stop signal for request %d, which is not active", request_id)
            else:
                self.finish_request(request, FinishReason.CANCELLED, len(request.tokens))
        for request in [r for r in self._timed.values() if r.is_overdue(intake.now)]:
            self.finish_request(request, FinishReason.TIMED_OUT, len(request.tokens))
        for request_id in self._preparing.intersection(intake.ready):
            self._end_preparing(self.requests[request_id])
        while self._arriving:
            self._admit(self._arriving[0], intake, taken)
            self._arriving.popleft()

    def _end_preparing(self, request: ActiveRequest) -> None:
        self._preparing.discard(request.request_id)
        request.move_to(LlmRequestState.CONTEXT_INIT)

    def _admit(
        self, inference_request: InferenceRequest, intake: Intake, taken: Collection[int]
    ) -> None:
        request_id = inference_request.request_id
        try:
            if request_id in taken or request_id in self.requests:
                raise DuplicateRequestIdError(
                    f"request id {request_id} belongs to a request that is still being processed"
                )
            request = admit(inference_request, self.limits, intake.now)
        except RequestError as error:
            self._reject(request_id, error)
            return
        except Exception as error:  # a tensor that no check foresaw must not cost the others
            self._reject(request_id, InvalidRequestError(response_text(error)))
            return
        self.requests[request_id] = request
        insert_by_priority(self.active, request)
        if request.is_timed:
            self._timed[request_id] = request
        if request.processor is not None and request.state is _PREPARING:
            if request_id in intake.ready:
                self._end_preparing(request)
            else:
                self._preparing.add(request_id)
                self.host.prepare(request_id, request.processor)

    def _reject(self, request_id: int, error: RequestError) -> None:
        logger.warning("Cannot process new request: request %d: %s", request_id, error)
        self.host.respond(request_id, [], True, response_text(error))

    # Ends: what a request holds is free before its final response is sent ------------------

    def finish_request(self, request: ActiveRequest, reason: FinishReason, end: int) -> None:
        """The final response: output up to history position `end`."""
        tensors = final(request, reason, end)  # what fails here is answered by `abort`
        self._drop(request)
        self.host.respond(request.request_id, tensors, True, "")

    def fail_request(self, request: ActiveRequest, error: BaseException) -> None:
        """An error response; every other request goes on."""
        self._drop(request)
        self.host.respond(request.request_id, [], True, response_text(error))

    def abort(self, error: BaseException) -> None:
        """End all requests with an error response: the loop will not iterate again."""
        self.pending = None
        while self._arriving:
            request_id = self._arriving.popleft().request_id
            self.host.respond(request_id, [], True, response_text(error))
        for request in self.active[:]:
            try:
                self._drop(request)
            except Exception:  # accounting that broke the loop must not cost the final response
                logger.exception("request %d could not be freed", request.request_id)
            self.host.respond(request.request_id, [], True, response_text(error))

    def _drop(self, request: ActiveRequest) -> None:
        self.active.remove(request)
        del self.requests[request.request_id]
        self._timed.pop(request.request_id, None)
        self._preparing.discard(request.request_id)
        if request.processor is not None:
            request.processor.end()
        self.allocator.release(request)
        request.finish()
