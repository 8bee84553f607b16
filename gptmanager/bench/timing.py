"""How long one call takes, and how much time a benchmark may still take.

Knows nothing of what is called. On a device calls are recorded as a CUDA graph where they can be,
so that the time to launch them is not measured, each on another set of inputs, so that none finds
its inputs in the cache.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

Run = Callable[[int], object]  # on the set of inputs of that number
_MIN_ROUNDS = 3
_HOST_ROUNDS = 20


@dataclass(frozen=True, eq=False)
class Stopwatch:
    """`seconds()` calls once more, several times, and tells the mean time of a call."""

    seconds: Callable[[], float]
    how: Literal["graph", "events", "clock"]


class Timer(Protocol):
    def prepare(self, run: Run, num_sets: int) -> Stopwatch:
        """Call `run` on each set of inputs, so that all is compiled; and what times it."""


@dataclass(frozen=True, slots=True)
class DeviceTimer:
    """CUDA events on the current stream. A measurement lasts about `seconds`."""

    seconds: float = 0.004
    most: int = 512  # calls of a measurement

    def prepare(self, run: Run, num_sets: int) -> Stopwatch:
        for number in range(num_sets):
            run(number)
        torch.cuda.synchronize()
        once = self._mean(lambda: run(0), 1)()
        calls = max(num_sets, min(self.most, int(self.seconds / max(once, 1e-7)) + 1))

        def several() -> None:
            for number in range(calls):
                run(number % num_sets)

        graph = _recorded(several)
        if graph is None:
            return Stopwatch(self._mean(several, calls), "events")
        graph.replay()  # a first launch uploads it
        return Stopwatch(self._mean(graph.replay, calls), "graph")

    def _mean(self, run: Callable[[], object], calls: int) -> Callable[[], float]:
        events: Any = torch.cuda.Event
        start, end = events(enable_timing=True), events(enable_timing=True)

        def seconds() -> float:
            start.record()
            run()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / calls

        return seconds


def _recorded(run: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    """None of what cannot be recorded: it waits for the device, or asks it for memory."""
    before, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.set_stream(before)  # torch stays on the recording's where its end fails
        torch.cuda.synchronize()
        return None
    return graph


class ClockTimer:
    """The clock around calls that return when they are done."""

    def prepare(self, run: Run, num_sets: int) -> Stopwatch:
        for number in range(num_sets):
            run(number)

        def seconds() -> float:
            started = time.perf_counter()
            for number in range(num_sets):
                run(number)
            return (time.perf_counter() - started) / num_sets

        return Stopwatch(seconds, "clock")


def host_seconds(work: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Median time of a call until it returns, of so many `calls` that begin on an idle device."""
    costs = []
    for _ in range(_HOST_ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            work()
        costs.append((time.perf_counter() - started) / calls)
    return statistics.median(costs)


@dataclass(frozen=True)
class Spread:
    """The spread of repeated measurements, in seconds. `quartiles`: half of them are between."""

    median: float
    best: float
    quartiles: tuple[float, float]
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        if not seconds:
            raise ValueError("nothing was measured")
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], (seconds[0], seconds[0]), 1)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, min(seconds), (low, high), len(seconds))


class Budget:
    """`seconds` from now on; None: as long as it takes."""

    def __init__(
        self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self._clock = clock
        self._started = clock()

    @property
    def used(self) -> float:
        return self._clock() - self._started

    @property
    def left(self) -> float:
        return self.seconds - self.used

    @property
    def is_spent(self) -> bool:
        return self.left <= 0

    def share(self, num_left: int) -> Budget:
        """Return the budget of one of `num_left` equal pieces of work."""
        return Budget(self.left / max(1, num_left), self._clock)


def take_turns(
    watches: dict[str, Stopwatch], rounds: int, budget: Budget
) -> dict[str, list[float]]:
    """Measure all in turn, `rounds` times, fewer (three at least) where the budget ends before."""
    seconds: dict[str, list[float]] = {name: [] for name in watches}
    for number in range(rounds):
        if number >= _MIN_ROUNDS and budget.is_spent:
            break
        for name in watches if number % 2 == 0 else reversed(list(watches)):
            seconds[name].append(watches[name].seconds())
    return seconds
