"""`CallbackHost`: the loop's world, made of the four callbacks of a host application.

Everything that a callback says or does wrong becomes a value here: a log line, a count, a failure
in the next intake. Only a Get that keeps failing ends the loop.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from gptmanager.api import (
    GetInferenceRequestsCallback,
    InferenceRequest,
    NamedTensor,
    PollStopSignalCallback,
    ReturnBatchManagerStatsCallback,
    SendResponseCallback,
)
from gptmanager.clock import monotonic
from gptmanager.errors import (
    CallbackError,
    ConfigError,
    InvalidRequestError,
    ManagerDeadError,
    RequestError,
    response_text,
)
from gptmanager.log import logger
from gptmanager.post_processor import RequestProcessor
from gptmanager.receiving import OwedFinals, iterate, read_id, read_request
from gptmanager.retries import GetFailures
from gptmanager.statistics import (
    Counts,
    Laps,
    Memory,
    SchemeKeys,
    Timestamp,
    in_flight_keys,
    statistics_json,
)
from gptmanager.step import Failure, Intake
from gptmanager.watchdog import CallbackTimer


class Fetched(NamedTuple):
    """How the last fetch went. `is_empty`: the host holds nothing for now."""

    num_requests: int
    is_empty: bool
    failed: bool


class CallbackHost:
    """Calls the host's callbacks on the loop thread, outside any lock.

    `max_get_failures`: calls of Get in a row that may fail, with growing pauses between; one more
    sets `fatal`, whose cause is the last failure.
    """

    def __init__(
        self,
        get_inference_requests: GetInferenceRequestsCallback,
        send_response: SendResponseCallback,
        poll_stop_signal: PollStopSignalCallback | None,
        return_stats: ReturnBatchManagerStatsCallback | None,
        *,
        max_get_failures: int,
    ) -> None:
        self._get = _required(get_inference_requests, "get_inference_requests_cb")
        self._send = _required(send_response, "send_response_cb")
        self._poll = _optional(poll_stop_signal, "poll_stop_signal_cb")
        self._return_stats = _optional(return_stats, "return_batch_manager_stats_cb")
        self.get_failures = GetFailures(max_get_failures)
        self._stops: set[int] = set()
        self._failures: list[Failure] = []
        self._returned: deque[Any] = deque()  # by Get, not looked at yet
        self._received: list[InferenceRequest] = []  # for the next fetch
        self._owed = OwedFinals()
        self._preparing: dict[int, RequestProcessor] = {}
        self._prepared: deque[tuple[int, RequestProcessor, Future[Any]]] = deque()  # any thread's
        self._ready: list[int] = []
        self._clears: deque[None] = deque()  # any thread's
        self._weights_version: Callable[[], int] = lambda: 0
        self._last_weights_version = 0
        self._timestamp = Timestamp()
        self.memory = Memory()
        self.scheme_keys: SchemeKeys = in_flight_keys
        self.device = "cpu"  # on which logits post-processors run
        self.gil_wait_us: Callable[[], int] = lambda: 0
        self.wake: Callable[[], None] = lambda: None  # the loop, from any thread
        self.is_accepting = True  # False: Get is not called any more
        self.last_fetch = Fetched(0, is_empty=False, failed=False)
        self.get_timer = CallbackTimer("GetInferenceRequests")
        self.send_timer = CallbackTimer("SendResponse")
        self.poll_timer = CallbackTimer("PollStopSignal")
        self.stats_timer = CallbackTimer("ReturnBatchManagerStats")
        self.processor_timer = CallbackTimer("LogitsPostProcessor")

    @property
    def fatal(self) -> CallbackError | None:
        """Why the loop must end."""
        return self.get_failures.fatal

    @property
    def timers(self) -> list[CallbackTimer]:
        return [
            *(self.get_timer, self.send_timer, self.poll_timer, self.stats_timer),
            self.processor_timer,
        ]

    def peek(self, room: int | None) -> bool:
        """Ask Get outside an iteration, for an idle manager: has it anything?

        What it gave enters with the next fetch, which the caller owes.
        """
        self._ask(-1 if room is None else room)
        return self.holds_requests

    @property
    def holds_requests(self) -> bool:
        """What Get has returned waits for the next fetch."""
        return bool(self._received or self._returned)

    def answer_lost(self, known: Iterable[int], error: BaseException) -> None:
        """An error response to each request that Get has returned and nobody will answer.

        `known`: the ids of those that somebody will.
        """
        waiting = [request.request_id for request in self._received]
        for request_id in self._owed.beyond(itertools.chain(known, waiting)):
            self.respond(request_id, [], True, response_text(error))

    def answer_all(self, error: BaseException) -> None:
        """An error response to each request that Get has returned and that has had no final one."""
        try:
            self._receive()
        finally:
            self._received = []
            self.answer_lost((), error)

    def release(self) -> None:
        """Let go of the loop and its executor: neither has anything more to say or to ask."""
        self.wake = lambda: None
        self.gil_wait_us = lambda: 0
        self._weights_version = lambda: 0

    # What makes cached blocks stale ----------------------------------------------------------

    def clear_cached(self) -> None:
        """The next intake says so. From any thread."""
        self._clears.append(None)

    def follow_weights(self, version: Callable[[], int]) -> None:
        """`version()` changes when weights have been replaced: what was computed is stale."""
        self._weights_version, self._last_weights_version = version, version()

    def _take_clears(self) -> bool:
        version, count = self._weights_version(), len(self._clears)
        clears = count > 0 or version != self._last_weights_version
        self._last_weights_version = version
        for _ in range(count):
            self._clears.popleft()
        return clears

    # What the loop calls -------------------------------------------------------------------

    def fetch(self, room: int | None, num_active: int) -> Intake:
        if self._returned:
            self._receive()
        elif not self._received:
            self.last_fetch = Fetched(0, is_empty=not self.is_accepting, failed=False)
            # an idle manager keeps the pause itself, and is woken from it
            if self.is_accepting and room != 0 and not (num_active and self.get_failures.rests):
                self._ask(-1 if room is None else room)
        self._collect_ready()
        intake = Intake(
            monotonic(),
            tuple(self._received),
            frozenset(self._stops),
            tuple(self._ready),
            tuple(self._failures),
            clears_cache=self._take_clears(),
        )
        # only now: what raises before must lose nothing
        self._received, self._stops, self._ready, self._failures = [], set(), [], []
        return intake

    def respond(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        timer = self.send_timer
        timer.start()
        try:
            if is_final and not self._owed.settle(request_id):
                return  # it has had its final response
            try:
                self._send(request_id, tensors, is_final, error)
            except BaseException as raised:  # noqa: B036 - the loop outlives any callback
                timer.errors += 1
                if not is_final:
                    failure = CallbackError(f"SendResponse raised {response_text(raised)}")
                    self.fail(Failure(request_id, failure))
                logger.exception(
                    "SendResponse raised for request %d%s",
                    *(request_id, " (final)" if is_final else ""),
                )
        finally:
            timer.stop()

    def prepare(self, request_id: int, processor: RequestProcessor) -> None:
        self._preparing[request_id] = processor
        try:
            future = processor.post_processor.prepare(self.device)
            # a done future calls back at once
            future.add_done_callback(lambda done: self._wake_with(request_id, processor, done))
        except BaseException as raised:  # noqa: B036 - the loop outlives any callback
            del self._preparing[request_id]
            self._fail_to_prepare(request_id, processor, raised)

    def fail(self, failure: Failure) -> None:
        self._failures.append(failure)

    def poll(self) -> None:
        if self._poll is None:
            return
        with self._guarded(self.poll_timer):
            stops = self._poll()
            if stops is not None:
                _collect_ids(stops, self._stops)

    def report(self, counts: Counts, laps: Laps) -> None:
        if self._return_stats is None:
            return
        extra = {
            "iteration_latency_us": laps.microseconds(),
            "gil_wait_us": self.gil_wait_us(),
            "callback_us": {timer.name: timer.total_ns // 1000 for timer in self.timers},
            "callback_errors": {timer.name: timer.errors for timer in self.timers},
        }
        record = statistics_json(counts, self.memory, self._timestamp(), extra, self.scheme_keys)
        with self._guarded(self.stats_timer):
            self._return_stats(record)

    # Logits post-processors that are not ready ----------------------------------------------

    def _wake_with(self, request_id: int, processor: RequestProcessor, done: Future[Any]) -> None:
        self._prepared.append((request_id, processor, done))
        with suppress(ManagerDeadError):
            self.wake()

    def _collect_ready(self) -> None:
        """Requests that need not wait for their processor any more, of those received too."""
        self._ready += self._ready_on_arrival(self._received)
        while self._prepared:
            request_id, processor, done = self._prepared.popleft()
            if self._preparing.get(request_id) is not processor:
                continue  # it ended meanwhile, and another came under its id
            del self._preparing[request_id]
            error = _error_of(done)
            if error is None:
                self._ready.append(request_id)
            else:
                self._fail_to_prepare(request_id, processor, error)

    def _ready_on_arrival(self, requests: list[InferenceRequest]) -> list[int]:
        ready = []
        for request in requests:
            processor = request.logits_post_processor
            if processor is not None and _is_ready(processor, self.device):
                ready.append(request.request_id)
        if not ready:
            return ready
        # under an id that is not alone it could be meant for another one
        counts = Counter(request.request_id for request in requests)
        return [i for i in ready if counts[i] == 1 and i not in self._preparing]

    def _fail_to_prepare(
        self, request_id: int, processor: RequestProcessor, error: BaseException
    ) -> None:
        if isinstance(error, RequestError):
            self.fail(Failure(request_id, error))
            return
        cause = CallbackError(
            f"logits_post_processor {processor.name} cannot be prepared: {response_text(error)}"
        )
        self.fail(Failure(request_id, cause))
        logger.error(
            "logits_post_processor %s of request %d cannot be prepared",
            *(processor.name, request_id),
            exc_info=error,
        )

    # How it calls them ---------------------------------------------------------------------

    def _ask(self, room: int) -> None:
        """Receive what Get returns, also what it yielded before it raised."""
        before = len(self._received)
        with self._guarded(self.get_timer) as raised:
            for item in iterate(self._get(room)):
                self._returned.append(item)
        foreign = self._receive()
        error = raised[0] if raised else foreign
        self.get_failures.note(error)
        num_requests = len(self._received) - before
        self.last_fetch = Fetched(
            num_requests, is_empty=not num_requests and error is None, failed=error is not None
        )

    def _receive(self) -> CallbackError | None:
        """Look at what Get has returned; the error if they were not all requests."""
        num_foreign, first = 0, ""
        while self._returned:
            item = self._returned[0]
            try:
                request_id = read_id(item)
            except CallbackError as error:
                self._returned.popleft()
                num_foreign, first = num_foreign + 1, first or str(error)
                continue
            self._owed.owe(request_id)
            self._returned.popleft()
            try:
                self._received.append(read_request(item, request_id))
            except InvalidRequestError as error:
                self.respond(request_id, [], True, response_text(error))
        if num_foreign:
            self.get_timer.errors += 1
            more = f" (and {num_foreign - 1} more)" if num_foreign > 1 else ""
            logger.error("GetInferenceRequests returned %s%s", first, more)
            return CallbackError(f"GetInferenceRequests returned {first}{more}")
        return None

    @contextmanager
    def _guarded(self, timer: CallbackTimer) -> Iterator[list[BaseException]]:
        """What is raised within is logged, and put into the list."""
        raised: list[BaseException] = []
        timer.start()
        try:
            yield raised
        except BaseException as error:  # noqa: B036 - the loop outlives any callback
            raised.append(error)
            timer.errors += 1
            logger.exception("callback %s failed; the loop goes on", timer.name)
        finally:
            timer.stop()


def _is_ready(processor: Any, device: str) -> bool:
    """What goes wrong here is met again by `prepare`."""
    try:
        prepare = getattr(processor, "prepare", None)
        if not callable(prepare):
            return False
        future = prepare(device)
        return bool(future.done()) and _error_of(future) is None
    except BaseException:  # noqa: B036 - a host's code
        return False


def _error_of(done: Future[Any]) -> BaseException | None:
    """Why what was to be prepared is not, of a future that is done; None: it is."""
    try:
        return CancelledError() if done.cancelled() else done.exception()
    except BaseException as error:  # noqa: B036 - a host's future
        return error


def _required(callback: Any, name: str) -> Any:
    if callback is None:
        raise ConfigError(f"{name} is mandatory")
    return _optional(callback, name)


def _optional(callback: Any, name: str) -> Any:
    if callback is not None and not callable(callback):
        raise ConfigError(f"{name} = {callback!r} is not callable")
    return callback


def _collect_ids(stops: Any, into: set[int]) -> None:
    """Take every id there is; raises CallbackError for the rest."""
    foreign = []
    try:
        for stop in stops:
            try:
                into.add(operator.index(stop))
            except TypeError:
                foreign.append(stop)
    except TypeError:
        foreign.append(stops)
    if foreign:
        raise CallbackError(f"PollStopSignal returned {foreign[0]!r}, expected request ids")
