"""Events of a running loop: which requests arrived, ran and ended.

Taps report the events. A tap is an object in front of the loop's host or executor that passes every
call on unchanged. Taps are placed for the first watcher, and taken away when the last
watcher is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gptmanager.errors import ManagerDeadError, error_class
from gptmanager.lifecycle.callables import check_answer, ordinary
from gptmanager.lifecycle.clock import monotonic
from gptmanager.lifecycle.log import logger
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.loop.responses import finish_reason_name
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.recorder.taps import ExecutorTap, HostTap
from gptmanager.request.inference_request import NamedTensor
from gptmanager.statistics import Counts, PhaseTimes
from gptmanager.step import Executor, Host, Intake, Row, Schedule, Step


class Beginning(NamedTuple):
    """The first event of a watch: the limits of the loop, and the number of the next iteration.

    An `Arrival` for each active request follows. In all events lengths are in tokens, and `time_s`
    is in seconds of a monotonic clock.
    """

    time_s: float
    iteration: int
    max_batch_size: int
    max_num_tokens: int
    num_blocks: int
    tokens_per_block: int


class Arrival(NamedTuple):
    """A request that was accepted, or that was active when the watch began.

    `num_generated` (tokens) and `pause_count` are the progress of a request that was active, or
    that a journal has restored.
    `holds_memory`: whether the request has started and is not paused.
    """

    time_s: float
    request_id: int
    prompt_len: int
    max_new_tokens: int
    priority: float
    beam_width: int
    holds_memory: bool = False
    num_generated: int = 0
    pause_count: int = 0


class Ran(NamedTuple):
    """One iteration, decided at `time_s`.

    The rows are those of its `Schedule`. `paused` has the ids of paused requests.
    """

    time_s: float
    iteration: int
    micro_batch_id: int
    context_rows: tuple[Row, ...]
    generation_rows: tuple[Row, ...]
    paused: tuple[int, ...]


class Ending(NamedTuple):
    """The final response of a request.

    `outcome` is the name of a `FinishReason`, or of the error's class. `metrics` has the values
    of `REQUEST_METRICS`; it is empty with an error. After "DuplicateRequestIdError" the other
    request with the id continues.
    """

    request_id: int
    outcome: str
    metrics: tuple[float, ...] = ()


Event = Beginning | Arrival | Ran | Counts | Ending
WatchCallback = Callable[[Event], object]


class Watchers:
    """The watchers of one loop. Only the loop's thread calls the methods while the loop runs."""

    def __init__(self) -> None:
        self._sees: tuple[WatchCallback, ...] = ()
        self._has_taps = False

    def add(self, loop: TokenLoop, see: WatchCallback) -> None:
        """Call `see` with a `Beginning` and the active requests, then with events as they happen.

        Raise ManagerDeadError if the loop has ended, and ConfigError if `ordinary` refuses `see`.
        Exceptions that `see` raises before `add` returns are not caught.
        """
        if not hasattr(loop, "executor"):
            raise ManagerDeadError("watch: the loop has ended")
        ordinary("see", see)
        now, kv_cache = monotonic(), loop.allocator.kv_cache
        see(
            Beginning(
                now,
                loop.allocator.num_schedules,
                loop.max_batch_size,
                loop.max_num_tokens,
                kv_cache.get_max_resource_count(),
                kv_cache.tokens_per_block,
            )
        )
        for request in loop.active:
            see(_arrival(request, now))
        if not self._has_taps:
            _put_taps(loop, self.report_event)
            self._has_taps = True
        # once only: an earlier call may have timed out and yet have had its effect
        self._sees = *(other for other in self._sees if other != see), see

    def remove(self, loop: TokenLoop, see: WatchCallback) -> None:
        """Stop calling `see`; do nothing if it is not a watcher."""
        left = tuple(other for other in self._sees if other != see)
        if self._has_taps and not left and hasattr(loop, "executor"):
            _take_taps_away(loop)
            self._has_taps = False
        self._sees = left

    def report_event(self, event: Event) -> None:
        """Call all watchers; drop a watcher that raises an exception."""
        for see in self._sees:
            try:
                check_answer("it", see(event))
            except BaseException:  # noqa: B036 - the loop outlives any watcher
                # the taps remain, because this may be inside a call that they pass on
                logger.exception("%r raised, and gets no more events of the loop", see)
                self._sees = tuple(other for other in self._sees if other != see)


class _WatchedHost(HostTap):
    """A tap in front of the host `behind`."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.behind = host


class _WatchedExecutor(ExecutorTap):
    """A tap in front of the executor `behind`."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.behind = executor


def _put_taps(loop: TokenLoop, report_event: WatchCallback) -> None:
    table, host, executor = loop.table, loop.table.host, loop.executor
    host_tap, executor_tap = _WatchedHost(host), _WatchedExecutor(executor)
    now, arrived = 0.0, dict[int, None]()  # a set in order

    def report_arrivals() -> None:
        """Report arrivals that the loop has accepted. It may accept others of the intake later."""
        for request_id in [*arrived]:
            request = table.by_id.get(request_id)
            if request is not None:
                del arrived[request_id]
                report_event(_arrival(request, now))

    def fetch(room: int | None, num_active: int) -> Intake:
        nonlocal now
        if arrived:  # no request ran in the previous iteration
            report_arrivals()
        intake = host_fetch(room, num_active)
        now = intake.now
        if intake.requests:
            # a request with the id of an active one is refused
            new = [r.request_id for r in intake.requests if r.request_id not in table.by_id]
            arrived.update(dict.fromkeys(new))
        return intake

    def forward(schedule: Schedule) -> Step:
        if arrived:
            report_arrivals()
        rows = schedule.context_rows, schedule.generation_rows
        report_event(Ran(now, schedule.iteration, schedule.micro_batch_id, *rows, schedule.paused))
        return executor_forward(schedule)

    def respond(request_id: int, tensors: list[NamedTensor], is_final: bool, error: str) -> None:
        if is_final:
            if arrived:
                report_arrivals()
                arrived.pop(request_id, None)  # it is refused
            report_event(_ending(request_id, tensors, error))
        host_respond(request_id, tensors, is_final, error)

    def report(counts: Counts, phase_times: PhaseTimes) -> None:
        report_event(counts)
        host_report(counts, phase_times)

    host_fetch, host_respond, host_report = host.fetch, host.respond, host.report
    executor_forward, executor_tap.forward = executor.forward, forward
    host_tap.fetch, host_tap.respond, host_tap.report = fetch, respond, report
    table.host, loop.executor = host_tap, executor_tap


def _take_taps_away(loop: TokenLoop) -> None:
    host, executor = loop.table.host, loop.executor
    if isinstance(host, _WatchedHost) and isinstance(executor, _WatchedExecutor):
        loop.table.host, loop.executor = host.behind, executor.behind


def _arrival(request: ActiveRequest, now: float) -> Arrival:
    return Arrival(
        now,
        request.request_id,
        request.orig_prompt_len,
        request.end_rule.max_new_tokens,
        request.priority,
        request.beam_width,
        request.slot >= 0,
        request.num_tokens - request.orig_prompt_len,
        request.pause_count,
    )


def _ending(request_id: int, tensors: list[NamedTensor], error: str) -> Ending:
    metrics = dict(tensors).get("request_metrics")
    outcome = error_class(error) if error else finish_reason_name(tensors, "")
    return Ending(request_id, outcome, () if metrics is None else tuple(metrics.flatten().tolist()))
