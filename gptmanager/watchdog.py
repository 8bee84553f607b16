"""Watching callbacks: how long each took, and which one is overstaying its budget right now."""

from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import dataclass

from gptmanager.clock import perf_counter_ns
from gptmanager.log import logger

NUM_BUCKETS = 32


@dataclass(frozen=True, slots=True)
class CallbackLatency:
    """What one callback has cost so far.

    `histogram[i]` counts the calls that took less than 2**i microseconds (and at least half of
    that); the last bucket is open. `overstays`: calls that the watchdog reported.
    """

    calls: int
    errors: int
    overstays: int
    total_us: int
    max_us: int
    histogram: tuple[int, ...]


class CallbackTimer:
    """Times the calls of one callback. Written by the loop thread, read by any."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.errors = 0
        self.overstays = 0
        self.total_ns = 0
        self.max_ns = 0
        self.histogram = [0] * NUM_BUCKETS
        self.started_ns = 0  # of the call under way; 0: none

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

    @property
    def running_s(self) -> float:
        """Seconds that the call under way has taken so far; 0: none."""
        started = self.started_ns
        return (perf_counter_ns() - started) / 1e9 if started else 0.0

    def snapshot(self) -> CallbackLatency:
        return CallbackLatency(
            self.calls,
            self.errors,
            self.overstays,
            self.total_ns // 1000,
            self.max_ns // 1000,
            tuple(self.histogram),
        )


class Watchdog:
    """A thread that names, with its stack, a callback that overstays `budget_s`; once a call."""

    def __init__(self, timers: list[CallbackTimer], budget_s: float, watched: int) -> None:
        self._timers = timers
        self._budget_s = budget_s
        self._watched = watched  # the loop thread's ident
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gptmanager-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        # half a budget, so that a report comes within 1.5 budgets; 50 ms keeps a small one cheap
        period = min(max(self._budget_s / 2, 0.05), 0.25)
        reported: dict[str, int] = {}
        while not self._ended.wait(period):
            now = perf_counter_ns()
            for timer in self._timers:
                started = timer.started_ns
                taken_s = (now - started) / 1e9
                if started and taken_s > self._budget_s and reported.get(timer.name) != started:
                    reported[timer.name] = started
                    timer.overstays += 1
                    self._report(timer.name, taken_s)

    def _report(self, name: str, taken_s: float) -> None:
        frame = sys._current_frames().get(self._watched)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "(no stack)"
        logger.warning(
            "callback %s has run for %.2f s, its budget is %.2f s (callback_budget_s); no token "
            "is generated meanwhile. It stands at:\n%s",
            *(name, taken_s, self._budget_s, stack),
        )
