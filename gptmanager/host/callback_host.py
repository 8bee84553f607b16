"""`CallbackHost`: the four callbacks of a host application, as the `Host` of a loop.

Errors of callbacks are logged and counted. An error of SendResponse ends the request. Only
GetInferenceRequests, called Get in this package, ends the loop if it fails too often.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from gptmanager.assembly.assemble import Assembly
from gptmanager.config import ModelType
from gptmanager.errors import CallbackError, InvalidRequestError, response_text
from gptmanager.host.adapter_loader import AdapterLoader
from gptmanager.host.broadcast import Broadcast
from gptmanager.host.cache_invalidation import CacheInvalidation
from gptmanager.host.journal_seam import JournalSeam, NoJournal
from gptmanager.host.loop_host import Turn
from gptmanager.host.preparation import Preparation
from gptmanager.host.received_requests import Receiver, collect_ids, items_of, not_iterable
from gptmanager.host.retries import GetFailures
from gptmanager.host.timers import HostTimers
from gptmanager.lifecycle.callables import READY, UnfinishedAnswer, check_answer, optional, required
from gptmanager.lifecycle.clock import monotonic
from gptmanager.lifecycle.latch import Latch
from gptmanager.lifecycle.log import logger
from gptmanager.lifecycle.state import Lifecycle, LoopAbandoned
from gptmanager.lifecycle.watchdog import CallbackTimer
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.request.inference_request import (
    GetInferenceRequestsCallback,
    InferenceRequest,
    NamedTensor,
    PollStopSignalCallback,
    ReturnBatchManagerStatsCallback,
    SendResponseCallback,
)
from gptmanager.statistics import Counts, PhaseTimes, StatisticsReport
from gptmanager.step import Failure, Intake

_T = TypeVar("_T")

_POLL_S = 0.002  # interval of checking whether SendResponse has returned
_STALL_S = 0.01  # pause after an iteration that scheduled no active request


class Fetched(NamedTuple):
    """The result of the last fetch. `is_empty`: Get returned no requests, or may not be called."""

    num_requests: int
    is_empty: bool
    failed: bool


class CallbackHost:
    """Calls the host's callbacks, on the loop's thread except in `answer_abandoned`.

    No lock is held during a call. `max_get_failures` calls of Get in a row may fail, with growing
    pauses between them. One more failure sets `get_failures.fatal`. `wake` ends the pause of an
    idle loop; any thread may call it.
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
        self.timers = HostTimers()
        self.statistics = StatisticsReport(self.timers.all)
        self.preparation = Preparation(wake, self.timers.prepare)
        self.prepare = self.preparation.begin
        self.adapter_loader = AdapterLoader(wake)
        self.load = self.adapter_loader.begin
        self.get_failures = GetFailures(max_get_failures)
        self.is_accepting = True  # whether Get may be called
        self.last_fetch = Fetched(0, is_empty=False, failed=False)
        self._get = required("get_inference_requests_cb", get_inference_requests, may_yield=True)
        self._send: Any = required("send_response_cb", send_response)
        self._poll = optional("poll_stop_signal_cb", poll_stop_signal, may_yield=True)
        self._return_stats = optional("return_batch_manager_stats_cb", return_stats)
        self.receiver = Receiver(self.lifecycle)
        self.journal: JournalSeam = NoJournal()
        self.failures: list[Failure] = []  # for the next intake
        self._stops: set[int] = set()
        self.cache_invalidation = CacheInvalidation()

    def attach(self, assembly: Assembly) -> None:
        """Connect to the parts of a loop. Called once, before the loop iterates."""
        executor = assembly.executor
        is_lock_step = assembly.blueprint.model_type is ModelType.V1
        self.statistics.attach(executor.memory, is_lock_step, executor.take_gil_wait_us)
        self.preparation.device = assembly.device
        peft_config = assembly.blueprint.params.peft_cache_manager_config
        pool, loop_helps = executor.runner.adapter_pool, assembly.ranks is None
        self.adapter_loader.attach(pool, peft_config, executor.mark, loop_helps=loop_helps)
        self.cache_invalidation.follow_weights(assembly.weights_version)

    @property
    def is_broadcast(self) -> bool:
        """Whether the GetInferenceRequests callback is a `Broadcast`."""
        return isinstance(self._get, Broadcast)

    def mute(self) -> None:
        """Stop calling SendResponse and ReturnBatchManagerStats: rank 0 answers the host."""
        self._send = self._return_stats = None

    def await_turn(self, *, ends: bool, aborts: bool, is_active: Callable[[], bool]) -> Turn:
        """Return the next action of the loop; see `LoopHost.await_turn`."""
        if ends or aborts:
            self.is_accepting = False
        if aborts:
            return Turn.ABORT
        if not ends:
            return Turn.ITERATE
        return Turn.DRAIN if is_active() or self.holds_requests else Turn.END

    def pause_s(self, idle_poll_s: float | None, *, is_active: bool) -> float | None:
        """Return how many seconds an idle loop sleeps unless it is woken; None for no limit."""
        if is_active:
            return _STALL_S
        return self.get_failures.pause_s if self.last_fetch.failed else idle_poll_s

    def stop(self, error: BaseException) -> None:
        """Stop calling Get, because the loop has failed with `error`."""
        self.is_accepting = False

    def release(self) -> None:
        """Drop the loop and its executor. The loop no longer iterates."""
        self.preparation.release()
        self.adapter_loader.release()
        self.statistics.release()
        self.cache_invalidation.follow_weights(int)
        self.journal.close()  # last, because the disk may fail

    def peek(self, room: int | None) -> bool:
        """Call Get outside an iteration, for an idle manager. Return whether there are requests.

        If there are, the caller must call `fetch`, which passes the requests to the loop.
        """
        if not self.holds_requests:
            self.ask(room)
        return self.holds_requests

    @property
    def holds_requests(self) -> bool:
        """Whether requests that Get has returned wait for the next fetch."""
        return bool(self.receiver.received or self.receiver.returned)

    # Final responses that the loop does not send ---------------------------------------------

    def answer_lost(self, known: Iterable[int], error: BaseException) -> None:
        """Send an error response to each unanswered request that the loop does not know.

        `known` are the ids that the loop will answer. Requests for the next intake are left out.
        """
        self.journal.flush()
        waiting = [request.request_id for request in self.receiver.received]
        lost = self.receiver.owed.beyond(itertools.chain(known, waiting))
        self.journal.note_ends(lost, response_text(error))
        for request_id in lost:
            self.respond(request_id, [], True, response_text(error))

    def answer_all(self, error: BaseException) -> None:
        """Send an error response to each request that has had no final response."""
        try:
            self._receive()
        finally:
            self.receiver.received = []
            try:
                self.journal.flush()
            finally:  # after an error, the journal no longer holds responses back
                self.answer_lost((), error)

    def answer_abandoned(self, error: BaseException, timeout: float | None = None) -> bool:
        """Answer all requests like `answer_all`, on another thread, after the loop was abandoned.

        With a `timeout`, SendResponse is the only host code that is called. If a SendResponse call
        is in progress and does not return within `timeout` seconds, return False.
        """
        waited_s = 0.0
        while self.timers.send.started_ns:
            if timeout is not None and waited_s > timeout:
                return False
            Latch().wait(_POLL_S)
            waited_s += _POLL_S
        self.receiver.owe_returned(only_plain=timeout is not None)
        owed, text = self.receiver.owed, response_text(error)
        lost = owed.beyond(())
        self.journal.note_ends(lost, text)
        for request_id in lost:
            if owed.settle(request_id) and self._send is not None:
                # the loop's thread may time a call with `timers.send`
                with self._guarded(CallbackTimer("SendResponse")) as raised:
                    check_answer("SendResponse", self._send(request_id, [], True, text))
                self.timers.send.errors += len(raised)
        return True

    def stop_all(self, loop: TokenLoop) -> int:
        """Stop all active requests with the next intake; return their number."""
        self._stops.update(loop.table.by_id)
        return len(loop.table.by_id)

    # Called by the loop --------------------------------------------------------------------

    def fetch(self, room: int | None, num_active: int) -> Intake:
        if self.begin_fetch(room, num_active):
            self.ask(room)
        return self.take_intake()

    def begin_fetch(self, room: int | None, num_active: int) -> bool:
        """Receive what Get has already returned. Return whether Get should be called now."""
        failures = self.get_failures
        if self.receiver.returned:
            self._receive()
            return False
        if self.receiver.received:
            return False
        self.last_fetch = Fetched(0, is_empty=not self.is_accepting, failed=False)
        # in the pause after a failed Get, a busy loop skips Get; an idle manager sleeps instead
        rests = num_active and failures.in_a_row and failures.rests
        return self.is_accepting and room != 0 and not rests

    def take_intake(self) -> Intake:
        """Return the next intake: everything that has arrived since the last intake."""
        receiver, preparation = self.receiver, self.preparation
        if receiver.received or preparation.prepared:
            preparation.collect(filter(receiver.is_alone, receiver.received))
        clears_cache, recomputes = self.cache_invalidation.take()
        intake = Intake(
            monotonic(),
            tuple(receiver.received),
            frozenset(self._stops),
            tuple(preparation.ready),
            (*self.failures, *preparation.failures),
            clears_cache=clears_cache,
            recomputes=recomputes,
            adapters=_taken(self.adapter_loader.done),
            forgotten_adapters=_taken(self.adapter_loader.forgotten),
            resumed=tuple(receiver.resumed),
        )
        # cleared last, so that an error above loses nothing
        receiver.received, self._stops, self.failures = [], set(), []
        receiver.resumed = []
        preparation.ready, preparation.failures = [], []
        return intake

    def take_answers(self) -> tuple[tuple[InferenceRequest, ...], frozenset[int]]:
        """Remove and return this host's requests and stop signals that are in no intake yet."""
        answers = tuple(self.receiver.received), frozenset(self._stops)
        self.receiver.received, self._stops = [], set()
        return answers

    def respond(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        if self._send is None:
            if is_final:
                self.receiver.owed.settle(request_id)
            return
        timer = self.timers.send
        # start before the check: a thread that then abandons the loop waits for this call
        timer.start()
        try:
            if self.lifecycle.is_abandoned:
                raise LoopAbandoned
            if is_final and not self.receiver.owed.settle(request_id):
                return  # its final response has already been sent
            try:
                answer = self._send(request_id, tensors, is_final, error)
                if answer is not None:
                    check_answer("SendResponse", answer)
            except BaseException as raised:  # noqa: B036 - the loop outlives any callback
                timer.errors += 1
                if not is_final:
                    text = f"SendResponse raised {response_text(raised)}"
                    if isinstance(raised, UnfinishedAnswer):
                        text = str(raised)
                    self.fail(Failure(request_id, CallbackError(text)))
                final = " (final)" if is_final else ""
                logger.exception("SendResponse raised for request %d%s", request_id, final)
        finally:
            timer.stop()

    def fail(self, failure: Failure) -> None:
        self.failures.append(failure)

    def poll(self) -> None:
        self._check()
        if self._poll is None:
            return
        with self._guarded(self.timers.poll):
            stops = self._poll()
            if type(stops) not in READY:
                check_answer("PollStopSignal", stops, may_yield=True)
            elif not stops:
                return  # the usual case
            if stops is not None:
                collect_ids(stops, self._stops)

    def report(self, counts: Counts, phase_times: PhaseTimes) -> None:
        self._check()
        self.adapter_loader.jobs.end_step()
        self.statistics.note(counts)
        if self._return_stats is None:
            return
        record = self.statistics.record(counts, phase_times)
        with self._guarded(self.timers.stats):
            answer = self._return_stats(record)
            if answer is not None:
                check_answer("ReturnBatchManagerStats", answer)

    # Calls of callbacks --------------------------------------------------------------------

    def _check(self) -> None:
        if self.lifecycle.is_abandoned:
            raise LoopAbandoned

    def ask(self, room: int | None) -> None:
        """Call Get and receive its requests, including those yielded before an error."""
        self._check()
        receiver, failures = self.receiver, self.get_failures
        before = len(receiver.received)
        with self._guarded(self.timers.get) as raised:
            answer = self._get(-1 if room is None else room)
            # do nothing else here: an error would lose requests that Get has returned
            if type(answer) in READY:
                receiver.returned.extend(answer)
            else:
                check_answer("GetInferenceRequests", answer, may_yield=True)
                try:
                    items = items_of("GetInferenceRequests", answer)
                except TypeError:
                    raise not_iterable(answer) from None
                for item in items:
                    receiver.returned.append(item)
        foreign = self._receive() if receiver.returned else None
        error = raised[0] if raised else foreign
        if error is None:
            failures.in_a_row = 0
        else:
            failures.add(error)
        num_requests = len(receiver.received) - before
        self.last_fetch = Fetched(
            num_requests, is_empty=not num_requests and error is None, failed=error is not None
        )

    def _receive(self) -> CallbackError | None:
        """Read the items that Get has returned. If some are not requests, return an error."""
        foreign = self.receiver.receive(self._refuse)
        if foreign is not None:
            self.timers.get.errors += 1
            logger.error("%s", foreign)
        return foreign

    def _refuse(self, request_id: int, error: InvalidRequestError) -> None:
        self.respond(request_id, [], True, response_text(error))

    @contextmanager
    def _guarded(self, timer: CallbackTimer) -> Iterator[list[BaseException]]:
        """Catch and log an error of the `with` block, and append the error to the yielded list."""
        raised: list[BaseException] = []
        timer.start()
        try:
            yield raised
        except BaseException as error:  # noqa: B036 - the loop outlives any callback
            raised.append(error)
            timer.errors += 1
            logger.exception("callback %s failed; the loop continues", timer.name)
        finally:
            timer.stop()


def _taken(queue: deque[_T]) -> tuple[_T, ...]:
    """Remove and return all items of a queue that other threads fill."""
    return tuple(queue.popleft() for _ in range(len(queue)))
