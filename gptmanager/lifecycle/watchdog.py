"""Latencies of callbacks, and a watchdog that reports a callback or an iteration over budget."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

from gptmanager.lifecycle.clock import perf_counter_ns
from gptmanager.lifecycle.latch import Latch
from gptmanager.lifecycle.log import logger

NUM_BUCKETS = 32


@dataclass(frozen=True, slots=True)
class CallbackLatency:
    """The cost of one callback so far.

    `histogram[0]` counts the calls that took less than one microsecond, `histogram[i]` the calls
    that took from 2**(i-1) to less than 2**i microseconds; the last bucket also has all longer
    calls. `overstays` counts the calls that the watchdog reported.
    """

    calls: int
    errors: int
    overstays: int
    total_us: int
    max_us: int
    histogram: tuple[int, ...]


class CallbackTimer:
    """Times the calls of one callback.

    The loop's thread writes all fields except `overstays`, and the watchdog's thread writes
    `overstays`. Any thread may read them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.errors = 0
        self.overstays = 0
        self.total_ns = 0
        self.max_ns = 0
        self.histogram = [0] * NUM_BUCKETS
        self.started_ns = 0  # start of the current call; 0 between calls

    def start(self) -> None:
        self.started_ns = perf_counter_ns()

    def stop(self) -> None:
        taken = perf_counter_ns() - self.started_ns
        self.started_ns = 0
        self.calls += 1
        self.total_ns += taken
        if taken > self.max_ns:
            self.max_ns = taken
        bucket = (taken // 1000).bit_length()
        self.histogram[bucket if bucket < NUM_BUCKETS else -1] += 1

    def abandon(self) -> None:
        """Stop timing the current call without counting it."""
        self.started_ns = 0

    @property
    def running_s(self) -> float:
        """Seconds that the current call has taken so far; 0 between calls."""
        started = self.started_ns
        return (perf_counter_ns() - started) / 1e9 if started else 0.0

    def snapshot(self) -> CallbackLatency:
        """Return the numbers so far."""
        return CallbackLatency(
            self.calls,
            self.errors,
            self.overstays,
            self.total_ns // 1000,
            self.max_ns // 1000,
            tuple(self.histogram),
        )


class Hang(NamedTuple):
    """An iteration that takes too long, and the stacks of all threads."""

    text: str
    stacks: str

    def log(self, more: str) -> None:
        """Log the text, followed by `more`, and the stacks."""
        logger.error("%s%s\nAll threads:\n%s", self.text, more, self.stacks)


class Watchdog:
    """A thread that reports a callback that exceeds `budget_s`, with its stack, once per call.

    An iteration that takes more than `step_budget_s` is a hang. `on_hang` is called with a `Hang`
    on the watchdog's thread, once per iteration, and returns whether to continue watching.
    `iteration` times the iterations, and `watched` is the ident of the loop's thread. A budget of
    None disables its check.

    Between two checks at most a quarter of the budget counts, or one and a half periods if these
    are longer. If the process was stopped, the watched call did not run either.
    """

    def __init__(
        self,
        timers: list[CallbackTimer],
        watched: int,
        *,
        budget_s: float | None,
        iteration: CallbackTimer,
        step_budget_s: float | None,
        on_hang: Callable[[Hang], bool],
    ) -> None:
        self._timers = timers
        self._watched = watched
        self._budget_s = budget_s
        self._iteration = iteration
        self._step_budget_s = step_budget_s
        self._on_hang = on_hang
        # timer name -> start and counted nanoseconds of its last call, and whether it is reported
        self._calls: dict[str, tuple[int, int, bool]] = {}
        self._checked_ns = 0  # time of the last check
        self._ended = Latch()
        self._thread = threading.Thread(target=self._watch, name="gptmanager-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        # A call is reported within 1.5 budgets, because a period is at most half a budget. For very
        # small budgets, a minimum period limits the cost, and the report may be later.
        periods = [0.25]
        if self._budget_s is not None:
            periods.append(max(self._budget_s / 2, 0.05))
        if self._step_budget_s is not None:
            periods.append(max(self._step_budget_s / 2, 0.005))
        period = min(periods)
        while not self._ended.wait(period):
            now = perf_counter_ns()
            for timer in self._timers:
                taken_s = self._overstay(timer, self._budget_s, now, period)
                if taken_s:
                    timer.overstays += 1
                    self._report(timer.name, taken_s)
            taken_s = self._overstay(self._iteration, self._step_budget_s, now, period)
            self._checked_ns = now
            if taken_s and not self._on_hang(self._hang(taken_s)):
                return

    def _overstay(
        self, timer: CallbackTimer, budget_s: float | None, now: int, period: float
    ) -> float:
        """Return the counted seconds of the call if it is over budget and unreported, else 0.

        `now` is the time in nanoseconds, `period` the seconds from one check to the next.
        """
        started = timer.started_ns
        if budget_s is None or not started:
            return 0.0
        last, counted, is_reported = self._calls.get(timer.name, (0, 0, False))
        if last != started:
            counted, is_reported = 0, False
        most = int(1e9 * max(budget_s / 4, 1.5 * period))
        counted += min(now - max(started, self._checked_ns), most)
        is_over = counted > budget_s * 1e9 and not is_reported
        self._calls[timer.name] = started, counted, is_reported or is_over
        return counted / 1e9 if is_over else 0.0

    def _report(self, name: str, taken_s: float) -> None:
        logger.warning(
            "callback %s has run for %.2f s, its budget is %.2f s (callback_budget_s); no token "
            "is generated meanwhile. Its stack:\n%s",
            *(name, taken_s, self._budget_s, _stack(sys._current_frames().get(self._watched))),
        )

    def _hang(self, taken_s: float) -> Hang:
        where = whereabouts(self._timers, self._watched)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = "\n".join(
            f"{names.get(thread, 'thread')} ({thread}):\n{_stack(frame)}"
            for thread, frame in sys._current_frames().items()
        )
        return Hang(
            f"the loop hangs: one iteration has taken {taken_s:.3g} s, step_budget_s = "
            f"{self._step_budget_s:g}; {where}",
            stacks,
        )


def whereabouts(timers: Sequence[CallbackTimer], thread: int | None) -> str:
    """Return which callback is running, and the line that `thread` executes."""
    running = [(timer.running_s, timer.name) for timer in timers]
    seconds, name = min((pair for pair in running if pair[0]), default=(0.0, ""))
    frame = None if thread is None else sys._current_frames().get(thread)
    line = ""
    if frame is not None:
        code = frame.f_code
        line = f", at {code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
    if name:
        return f"the loop is inside callback {name}, for {seconds:.1f} s{line}"
    return f"the loop is not inside a callback{line}"


def _stack(frame: FrameType | None) -> str:
    if frame is None:
        return "(no stack)"
    try:
        return "".join(traceback.format_stack(frame))
    except Exception as error:  # formatting reads files; report the hang in any case
        return f"(no stack: {type(error).__name__})"
