"""`CallbackHost`: the loop's world, made of the four callbacks of a host application.

Everything that a callback says or does wrong becomes a value here: a log line, a count, a failure
in the next intake. Only a Get that keeps failing ends the loop.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from gptmanager.assembly.assemble import Assembly
from gptmanager.config import ModelType
from gptmanager.errors import (
    CallbackError,
    ConfigError,
    InvalidRequestError,
    response_text,
)
from gptmanager.host.preparation import Preparation
from gptmanager.host.receiving import OwedFinals, not_iterable, read_id, read_request
from gptmanager.host.retries import GetFailures
from gptmanager.lifecycle.clock import monotonic
from gptmanager.lifecycle.latch import Latch
from gptmanager.lifecycle.log import logger
from gptmanager.lifecycle.state import Deposed, Lifecycle
from gptmanager.lifecycle.watchdog import CallbackTimer
from gptmanager.request.inference_request import (
    GetInferenceRequestsCallback,
    InferenceRequest,
    NamedTensor,
    PollStopSignalCallback,
    ReturnBatchManagerStatsCallback,
    SendResponseCallback,
)
from gptmanager.statistics import (
    Counts,
    LockStepKeys,
    Memory,
    PhaseTimes,
    SchemeKeys,
    Timestamp,
    in_flight_keys,
    statistics_json,
)
from gptmanager.step import Failure, Intake

_POLL_S = 0.002  # how often a SendResponse that should return is looked at


class Fetched(NamedTuple):
    """How the last fetch went. `is_empty`: the host holds nothing for now."""

    num_requests: int
    is_empty: bool
    failed: bool


class CallbackHost:
    """Calls the host's callbacks on the loop thread, outside any lock.

    `max_get_failures`: calls of Get in a row that may fail, with growing pauses between; one more
    sets `fatal`, whose cause is the last failure. `wake` ends an idle loop's pause; any thread's.
    """

    def __init__(
        self,
        get_inference_requests: GetInferenceRequestsCallback,
        send_response: SendResponseCallback,
        poll_stop_signal: PollStopSignalCallback | None,
        return_stats: ReturnBatchManagerStatsCallback | None,
        *,
        max_get_failures: int,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.lifecycle = Lifecycle()
        self.preparation = Preparation(self.fail, wake)
        self.prepare = self.preparation.begin
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
        self._clears: deque[None] = deque()  # any thread's
        self._weights_version: Callable[[], int] = lambda: 0
        self._last_weights_version = 0
        self._timestamp = Timestamp()
        self._memory = Memory()
        self._scheme_keys: SchemeKeys = in_flight_keys
        self._gil_wait_us: Callable[[], int] = lambda: 0
        self.is_accepting = True  # False: Get is not called any more
        self.last_fetch = Fetched(0, is_empty=False, failed=False)
        self.get_timer = CallbackTimer("GetInferenceRequests")
        self.send_timer = CallbackTimer("SendResponse")
        self.poll_timer = CallbackTimer("PollStopSignal")
        self.stats_timer = CallbackTimer("ReturnBatchManagerStats")
        self.processor_timer = CallbackTimer("LogitsPostProcessor")
        self.timers = [
            *(self.get_timer, self.send_timer, self.poll_timer, self.stats_timer),
            *(self.processor_timer, self.preparation.timer),
        ]
        self._receiving = threading.Lock()  # held while an item becomes a request that is owed
        self._last_counts: Counts | None = None

    def attach(self, assembly: Assembly) -> None:
        """The loop stands on `assembly`: where processors run, and what statistics tell of it."""
        if assembly.blueprint.model_type is ModelType.V1:
            self._scheme_keys = LockStepKeys()
        self.preparation.device = assembly.device
        self._memory = assembly.executor.memory
        self._gil_wait_us = assembly.executor.take_gil_wait_us
        self.follow_weights(assembly.weights_version)

    @property
    def fatal(self) -> CallbackError | None:
        """Why the loop must end."""
        return self.get_failures.fatal

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
        self.preparation.release()
        self._gil_wait_us = lambda: 0
        self._weights_version = lambda: 0

    def answer_deposed(self, error: BaseException, timeout: float | None = None) -> bool:
        """As `answer_all`, on another thread than the loop's, which is deposed.

        With a `timeout` nothing of the host's is looked at but SendResponse. False: one that is
        under way does not return within so many seconds.
        """
        waited_s = 0.0
        while self.send_timer.started_ns:
            if timeout is not None and waited_s > timeout:
                return False
            Latch().wait(_POLL_S)
            waited_s += _POLL_S
        with self._receiving:
            returned = [self._returned.popleft() for _ in range(len(self._returned))]
            for item in returned:
                if timeout is None or type(item) is InferenceRequest:
                    with suppress(CallbackError):  # it is no request
                        self._owed.owe(read_id(item))
                else:
                    self._returned.append(item)
        for request_id in self._owed.beyond(()):
            if self._owed.settle(request_id):
                with self._guarded(CallbackTimer("SendResponse")):  # the other is the loop's
                    self._send(request_id, [], True, response_text(error))
        return True

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
        self.preparation.collect(self._received)
        intake = Intake(
            monotonic(),
            tuple(self._received),
            frozenset(self._stops),
            tuple(self.preparation.ready),
            tuple(self._failures),
            clears_cache=self._take_clears(),
        )
        # only now: what raises before must lose nothing
        self._received, self._stops, self.preparation.ready, self._failures = [], set(), [], []
        return intake

    def respond(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        timer = self.send_timer
        timer.start()  # first, so that who deposes the loop knows: either it waits, or this raises
        try:
            if self.lifecycle.is_deposed:
                raise Deposed
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

    def fail(self, failure: Failure) -> None:
        self._failures.append(failure)

    def poll(self) -> None:
        self.lifecycle.check()
        if self._poll is None:
            return
        with self._guarded(self.poll_timer):
            stops = self._poll()
            if stops is not None:
                _collect_ids(stops, self._stops)

    def report(self, counts: Counts, phase_times: PhaseTimes) -> None:
        self.lifecycle.check()
        self._last_counts = counts
        if self._return_stats is None:
            return
        record = self._record(counts, phase_times.microseconds(), self._gil_wait_us())
        with self._guarded(self.stats_timer):
            self._return_stats(record)

    def statistics_so_far(self) -> str:
        """The last iteration's record, with what callbacks have cost by now. From any thread."""
        counts = self._last_counts
        return "none: no step has ended" if counts is None else self._record(counts, {}, 0)

    def _record(self, counts: Counts, latency_us: dict[str, int], gil_wait_us: int) -> str:
        extra = {
            "iteration_latency_us": latency_us,
            "gil_wait_us": gil_wait_us,
            "callback_us": {timer.name: timer.total_ns // 1000 for timer in self.timers},
            "callback_errors": {timer.name: timer.errors for timer in self.timers},
        }
        return statistics_json(counts, self._memory, self._timestamp(), extra, self._scheme_keys)

    # How it calls them ---------------------------------------------------------------------

    def _ask(self, room: int) -> None:
        """Receive what Get returns, also what it yielded before it raised."""
        self.lifecycle.check()
        before = len(self._received)
        with self._guarded(self.get_timer) as raised:
            answer = self._get(room)
            try:  # nothing of ours that may fail stands between the answer and its place
                items = iter(answer)
            except TypeError:
                raise not_iterable(answer) from None
            for item in items:
                self._returned.append(item)
        foreign = self._receive() if self._returned else None
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
            with self._receiving:
                self.lifecycle.check()  # or it is answered already
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
