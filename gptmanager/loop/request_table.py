"""`RequestTable`: the active requests, from their admission to their end.

It admits the requests of an intake, and ends requests because of stop signals, time limits and
failures. The `TokenLoop` that it belongs to decides which requests run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from gptmanager.config import FinishReason
from gptmanager.errors import (
    CapacityError,
    DuplicateRequestIdError,
    InvalidRequestError,
    RequestError,
    StepError,
    response_text,
)
from gptmanager.lifecycle.log import logger
from gptmanager.loop.active_request import FOR_PROCESSOR, ActiveRequest
from gptmanager.loop.active_state import RequestState, request_state, restored_request
from gptmanager.loop.adapter_state import AdaptersState, adapters_state, restore_adapters
from gptmanager.loop.adapters import Adapters
from gptmanager.loop.admission import admit
from gptmanager.loop.allocation import Allocator, AllocatorState
from gptmanager.loop.extras import HeldExtras
from gptmanager.loop.limits import Limits, check_context
from gptmanager.loop.responses import MakeFinal, stream_one_token, stream_tokens
from gptmanager.request.inference_request import InferenceRequest, NamedTensor
from gptmanager.request.llm_request import LlmRequestState, insert_by_priority
from gptmanager.step import Failure, Host, Intake, Progress

_COMPLETE = LlmRequestState.GENERATION_COMPLETE


class RequestTableState(NamedTuple):
    """The state of a `RequestTable`.

    `active` is sorted as in the table. `timed` and `preparing` are ids of active requests.
    `arriving` are requests that are not admitted yet; `resumed` has the progress of those that a
    journal restored.
    """

    active: tuple[RequestState, ...]
    arriving: tuple[InferenceRequest, ...]
    timed: tuple[int, ...]
    preparing: tuple[int, ...]
    allocator: AllocatorState
    adapters: AdaptersState | None = None
    resumed: tuple[Progress, ...] = ()


class RequestTable:
    """The requests between their admission and their final response.

    `active` is sorted by priority, then arrival; `by_id` has the same requests. `preparing` has the
    ids of requests that wait for their logits post-processor; `adapters` has the requests that
    wait for an adapter. `weights_version` is the number of updates of the weights so far.
    `num_serial` is the number of active requests with a next step that depends on the result of the
    last step. `final` creates the tensors of final responses, with the help of `extras`.
    """

    def __init__(
        self,
        host: Host,
        allocator: Allocator,
        adapters: Adapters,
        limits: Limits,
        final: MakeFinal,
    ) -> None:
        self.host = host
        self.adapters = adapters
        self.limits = limits
        self.extras = HeldExtras(limits.vocab_size)
        self.active: list[ActiveRequest] = []
        self.by_id: dict[int, ActiveRequest] = {}
        self.preparing: set[int] = set()
        self.num_serial = 0
        self.weights_version = 0
        self._allocator = allocator
        self._final = final
        self._timed: dict[int, ActiveRequest] = {}  # requests with a deadline
        self._arriving: deque[InferenceRequest] = deque()  # fetched, not admitted yet
        self._resumed: dict[int, Progress] = {}  # progress of requests that a journal restored
        self._intake: Intake | None = None  # the intake that is being applied
        self._stopping: deque[int] = deque()  # stop signals of `_intake` not applied yet
        # a request that is being freed and has not got its final response
        self._ending: ActiveRequest | None = None

    # Intake --------------------------------------------------------------------------------

    def take_in(self, intake: Intake) -> None:
        """End requests because of failures, stop signals and time limits, then admit new requests.

        A new request may reuse the id of an earlier one only if the earlier one's final response
        was sent before GetInferenceRequests was called.
        """
        self._arriving.extend(intake.requests)
        self._resumed.update((it.request_id, it) for it in intake.resumed)
        self._intake = intake
        if intake.adapters or intake.forgotten_adapters:
            self.adapters.note(intake.forgotten_adapters, intake.adapters)
        started = [r for r in self.active if r.slot >= 0] if intake.recomputes else []
        too_long = self.pause(started)
        if intake.clears_cache:
            self._allocator.kv_cache.clear_cached()
        taken: set[int] = set()
        if self._arriving:
            taken = self.by_id.keys() & {request.request_id for request in self._arriving}
        self._end_failed((*intake.failures, *too_long))
        self._stopping.extend(sorted(intake.stops))
        self._stop()
        for request in [r for r in self._timed.values() if r.times.is_overdue(intake.now)]:
            self.finish_request(request, FinishReason.TIMED_OUT, len(request.tokens))
        if intake.ready:
            self._end_preparing_of(intake.ready)
        if self.adapters.has_changed:
            self._end_failed(self.adapters.take_in())
        most = self.most_active() if self._arriving else math.inf
        while self._arriving:
            # not removed earlier: after an error before this line, the request is still unanswered
            newcomer = self._arriving.popleft()
            self._admit(newcomer, intake, taken, most)
            taken.add(newcomer.request_id)
        self._intake = None
        if self.adapters.has_changed:
            self._end_failed(self.adapters.settle(self.active))

    def pause(self, requests: Iterable[ActiveRequest]) -> list[Failure]:
        """Pause these started requests. Return failures of those that cannot start again."""
        too_long = []
        for request in requests:
            self._allocator.pause(request, self.limits.max_seq_len)
            self.adapters.pause(request)
            try:
                check_context(request.num_tokens, self.limits)
            except CapacityError as error:
                too_long.append(Failure(request.request_id, error))
        return too_long

    def _stop(self) -> None:
        while self._stopping:
            request_id = self._stopping.popleft()
            request = self.by_id.get(request_id)
            if request is None:
                logger.debug("stop signal for request %d, which is not active", request_id)
            else:
                self.finish_request(request, FinishReason.CANCELLED, len(request.tokens))

    def _end_failed(self, failures: Iterable[Failure]) -> None:
        for failure in failures:
            if failure.request_id in self.by_id:
                self.fail_request(self.by_id[failure.request_id], failure.error)

    def _end_preparing_of(self, request_ids: Iterable[int]) -> None:
        for request_id in self.preparing.intersection(request_ids):
            self._end_preparing(self.by_id[request_id])

    def _end_preparing(self, request: ActiveRequest) -> None:
        self.preparing.discard(request.request_id)
        request.clear_wait(FOR_PROCESSOR)

    def note_weights(self, version: int) -> None:
        """Record that all later steps use the weights of `version`."""
        self.weights_version = version
        for request in self.active:
            first, _ = request.weights_versions
            has_begun = request.times.first_scheduled is not None
            request.weights_versions = first if has_begun else version, version

    @property
    def must_wait(self) -> bool:
        """Whether a request waits for its logits post-processor or its adapter."""
        return bool(self.preparing or self.adapters.waiting)

    def most_active(self) -> float:
        """Return how many requests may be active; infinity without a limit.

        The limit is `max_waiting`, plus the larger of `max_num_requests` and the number of started
        requests.
        """
        if self.limits.max_waiting is None:
            return math.inf
        started = sum(request.times.first_scheduled is not None for request in self.active)
        return max(started, self.limits.max_num_requests) + self.limits.max_waiting

    def require_room(self, most_active: float) -> None:
        """Raise CapacityError if `most_active` requests are active already."""
        if len(self.active) >= most_active:
            waiting = len(self.active) - (most_active - (self.limits.max_waiting or 0))
            raise CapacityError(
                f"{waiting:g} requests wait already, max_waiting_requests = "
                f"{self.limits.max_waiting}"
            )

    def _admit(
        self,
        inference_request: InferenceRequest,
        intake: Intake,
        taken: Collection[int],
        most_active: float,
    ) -> None:
        request_id = inference_request.request_id
        progress = self._resumed.pop(request_id, None)
        try:
            if request_id in taken:
                raise DuplicateRequestIdError(
                    f"request id {request_id} belongs to a request that is still being processed: "
                    "use another id"
                )
            if progress is None:
                self.require_room(most_active)
            request = admit(inference_request, self.limits, intake.now)
            request.weights_versions = self.weights_version, self.weights_version
            if progress is not None:
                request.resume(progress, intake.now)
                request.arrival_time = request.times.arrival
                check_context(request.num_tokens, self.limits)
        except RequestError as error:
            self._reject(request_id, error)
            return
        except BaseException as error:  # noqa: B036 - a tensor's error must not end other requests
            self._reject(request_id, InvalidRequestError(response_text(error)))
            return
        self.by_id[request_id] = request
        insert_by_priority(self.active, request)
        if progress is not None and request.has_extras:
            self.extras.resume(progress)
        self.num_serial += request.is_serial
        if request.times.is_limited:
            self._timed[request_id] = request
        if progress is not None and progress.renews_adapter and request.lora_task_id is not None:
            self.adapters.forget(request.lora_task_id)
        self.adapters.add(request)
        if request.processor is not None and request.awaited & FOR_PROCESSOR:
            if request_id in intake.ready:
                self._end_preparing(request)
            else:
                self.preparing.add(request_id)
                self.host.prepare(request_id, request.processor)

    def _reject(self, request_id: int, error: RequestError) -> None:
        self.host.respond(request_id, [], True, response_text(error))
        logger.warning("Cannot process new request: request %d: %s", request_id, error)

    def stream(self, requests: Iterable[ActiveRequest]) -> None:
        """Send each request's new output, up to the position that may be streamed."""
        send = self.host.respond
        one_token = []
        for request in requests:
            end = request.streamable_end
            if end == len(request.tokens) == request.num_sent + 1 and not request.has_extras:
                one_token.append(request)
            elif end > request.num_sent:
                send(request.request_id, stream_tokens(request, end, self.extras), False, "")
        if one_token:
            for request, tensors in zip(one_token, stream_one_token(one_token), strict=True):
                send(request.request_id, tensors, False, "")

    # Ends: the memory of a request is freed before its final response is sent ---------------

    def finish_request(self, request: ActiveRequest, reason: FinishReason, end: int) -> None:
        """Free a request, and send its final response, with the output before position `end`.

        If the response cannot be created, end the request with an error response.
        """
        try:
            tensors = self._final(request, reason, end, self.extras)
        except Exception as error:
            cause = StepError(f"the final response cannot be created: {response_text(error)}")
            self.fail_request(request, cause)
            return
        self._drop(request)
        self._respond_final(request, tensors)

    def fail_request(self, request: ActiveRequest, error: BaseException) -> None:
        """End a request with an error response; all other requests continue."""
        self._drop(request)
        self._respond_final(request, [], response_text(error))

    def abort(self, error: BaseException) -> None:
        """End all requests with an error response. The loop cannot iterate afterwards."""
        text = response_text(error)
        while self._arriving:
            self.host.respond(self._arriving.popleft().request_id, [], True, text)
        for request in self.active[:]:
            try:
                self._drop(request)
            except Exception:  # broken accounting must not prevent the response
                logger.exception("request %d could not be freed", request.request_id)
                self._forget(request)
            self._respond_final(request, [], text)

    def recover(self, error: BaseException) -> None:
        """End every request that has started, then apply the rest of an interrupted intake.

        The memory accounting is reset, because an iteration that raised may have left it
        inconsistent.
        """
        text = response_text(error)
        ended = [r for r in self.active if r.has_started or r is self._ending]
        for request in ended:
            self._forget(request)
        self._ending = None
        self._timed = {r.request_id: r for r in self.active if r.times.is_limited}
        self.num_serial = sum(r.is_serial for r in self.active)
        self.preparing = {r.request_id for r in self.active if r.awaited & FOR_PROCESSOR}
        self.by_id = {r.request_id: r for r in self.active}
        self._allocator.reset()
        for request in ended:
            self.host.respond(request.request_id, [], True, text)
        intake, self._intake = self._intake, None
        if intake is not None:
            self._end_failed(intake.failures)
            self._stop()
            self._end_preparing_of(intake.ready)
        self._end_failed(self.adapters.take_in())

    @property
    def holds_requests(self) -> bool:
        """Whether any request, admitted or not, has not got its final response."""
        return bool(self.active or self._arriving)

    @property
    def unanswered(self) -> Iterator[int]:
        """The ids of all requests that will get a final response."""
        yield from self.by_id
        for request in self._arriving:
            yield request.request_id

    def _respond_final(
        self, request: ActiveRequest, tensors: list[NamedTensor], error: str = ""
    ) -> None:
        self.host.respond(request.request_id, tensors, True, error)
        self._ending = None

    def _drop(self, request: ActiveRequest) -> None:
        # set first: if freeing memory fails, the request still gets a final response
        self._ending = request
        self._allocator.release(request)
        self.num_serial -= request.is_serial
        self._forget(request)

    def _forget(self, request: ActiveRequest) -> None:
        request_id = request.request_id
        self._timed.pop(request_id, None)
        self.extras.pop(request_id, None)
        self.preparing.discard(request_id)
        self.adapters.release(request_id)
        if request.processor is not None:
            request.processor.end()
        if request.state is not _COMPLETE:
            request.finish()
        self.active.remove(request)
        self.by_id.pop(request_id, None)

    # As data -------------------------------------------------------------------------------

    def state(self) -> RequestTableState:
        """Return the state as data. Call it between two iterations.

        `arriving` is empty unless an iteration has failed.
        """
        return RequestTableState(
            tuple(map(request_state, self.active)),
            tuple(self._arriving),
            tuple(self._timed),
            tuple(self.preparing),
            self._allocator.state(),
            adapters_state(self.adapters),
            tuple(self._resumed.values()),
        )

    def restore(self, state: RequestTableState) -> None:
        """Restore `state` into an empty table. Raise an error if the state is inconsistent."""
        self.active = [restored_request(request, self.limits) for request in state.active]
        self.by_id = {request.request_id: request for request in self.active}
        if len(self.by_id) != len(self.active):
            raise DuplicateRequestIdError("a request is active twice")
        self._timed = {request_id: self.by_id[request_id] for request_id in state.timed}
        self.preparing = {self.by_id[i].request_id for i in state.preparing}
        self._arriving.extend(state.arriving)
        self._resumed.update((it.request_id, it) for it in state.resumed)
        self.num_serial = sum(request.is_serial for request in self.active)
        self._allocator.restore(state.allocator, self.by_id)
        if state.adapters is not None:
            restore_adapters(self.adapters, state.adapters, self.by_id)
