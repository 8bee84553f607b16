"""`Roster`: the active requests; who comes in, and who ends.

Admits what an intake brings and ends requests by stops, time limits and failures. Decides nothing
about who runs: `TokenLoop` does, which is a roster that iterates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Protocol

from gptmanager.active import ActiveRequest
from gptmanager.admission import Limits, admit
from gptmanager.allocation import Allocator
from gptmanager.api import InferenceRequest, NamedTensor
from gptmanager.config import FinishReason
from gptmanager.errors import (
    DuplicateRequestIdError,
    InvalidRequestError,
    RequestError,
    response_text,
)
from gptmanager.log import logger
from gptmanager.outputs import Outputs
from gptmanager.post_processor import RequestProcessor
from gptmanager.request import LlmRequestState, insert_by_priority
from gptmanager.responses import final
from gptmanager.statistics import Counts, Laps
from gptmanager.step import Failure, Intake

_PREPARING = LlmRequestState.PREPARING


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


class Roster:
    """The requests between their admission and their final response."""

    def __init__(self, host: Host, allocator: Allocator, limits: Limits) -> None:
        self.host = host
        self.allocator = allocator
        self.limits = limits
        self.outputs = Outputs(limits.vocab_size)
        self.active: list[ActiveRequest] = []  # by priority, then arrival
        self.requests: dict[int, ActiveRequest] = {}  # the same, by id
        self._timed: dict[int, ActiveRequest] = {}  # those with a deadline
        self._num_serial = 0  # those whose next step depends on the last result
        self._preparing: set[int] = set()  # those that wait for their logits post-processor
        self._arriving: deque[InferenceRequest] = deque()  # fetched, not admitted yet

    # Taking in -----------------------------------------------------------------------------

    def take_in(self, intake: Intake) -> None:
        """Failures, stops and time limits end requests; then the new ones come in.

        An id was free for a new request only if its final response had been sent when Get ran.
        """
        if intake.clears_cache:
            self.allocator.kv_cache.clear_cached()
        taken = set(self.requests.keys() & {request.request_id for request in intake.requests})
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
            taken.add(self._arriving.popleft().request_id)

    def _end_preparing(self, request: ActiveRequest) -> None:
        self._preparing.discard(request.request_id)
        request.move_to(LlmRequestState.CONTEXT_INIT)

    def _admit(
        self, inference_request: InferenceRequest, intake: Intake, taken: Collection[int]
    ) -> None:
        request_id = inference_request.request_id
        try:
            if request_id in taken:
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
        self._num_serial += request.is_serial
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
        # what fails here is answered by `abort`
        tensors = final(request, reason, end, self.outputs)
        self._drop(request)
        self.host.respond(request.request_id, tensors, True, "")

    def fail_request(self, request: ActiveRequest, error: BaseException) -> None:
        """An error response; every other request goes on."""
        self._drop(request)
        self.host.respond(request.request_id, [], True, response_text(error))

    def abort(self, error: BaseException) -> None:
        """End all requests with an error response: the loop will not iterate again."""
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
        self.outputs.forget(request.request_id)
        self._num_serial -= request.is_serial
        self._preparing.discard(request.request_id)
        if request.processor is not None:
            request.processor.end()
        self.allocator.release(request)
        request.finish()
