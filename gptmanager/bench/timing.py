"""Times calls, on the host or on a device, within the time budget of a benchmark.

On a device, calls are captured in a CUDA graph if possible, so that launches are not measured.
Consecutive calls use different sets of inputs. With enough sets, no call finds its inputs in the
cache.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

Run = Callable[[int], object]  # argument: the number of a set of inputs
_MIN_ROUNDS = 3
_HOST_ROUNDS = 20


@dataclass(frozen=True, eq=False)
class Stopwatch:
    """A prepared measurement: `seconds()` repeats the call and returns the mean time in seconds."""

    seconds: Callable[[], float]
    timed_by: Literal["graph", "events", "clock"]


class Timer(Protocol):
    """Prepares the measurement of calls."""

    def prepare(self, run: Run, num_sets: int) -> Stopwatch:
        """Return a stopwatch for `run`, after one call of `run` on each set of inputs.

        These first calls compile all code, so that the stopwatch measures no compilation.
        """


@dataclass(frozen=True, slots=True)
class DeviceTimer:
    """Times with CUDA events on the current stream. A measurement lasts about `seconds`.

    A measurement may be shorter, because it has at most `max_calls` calls, or one per set of inputs
    if there are more sets than `max_calls`.
    """

    seconds: float = 0.004
    max_calls: int = 512

    def prepare(self, run: Run, num_sets: int) -> Stopwatch:
        for number in range(num_sets):
            run(number)
        torch.cuda.synchronize()
        once = self._mean(lambda: run(0), 1)()
        calls = max(num_sets, min(self.max_calls, int(self.seconds / max(once, 1e-7)) + 1))

        def several() -> None:
            for number in range(calls):
                run(number % num_sets)

        graph = _capture(several)
        if graph is None:
            return Stopwatch(self._mean(several, calls), "events")
        graph.replay()  # the first launch uploads the graph
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


def _capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    """Capture calls in a CUDA graph. Returns None if they cannot be captured."""
    before, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.set_stream(before)  # after a failed capture, the capture stream is still current
        torch.cuda.synchronize()
        return None
    return graph


class ClockTimer:
    """Times calls with the CPU's clock. The calls must return only when their work is done."""

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
    """Return the median host time per call, in seconds, of several measurements.

    Each measurement begins when the device is idle, and makes `calls` calls in a row.
    """
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
    """The spread of repeated measurements, in seconds, with the first and the third quartile."""

    median: float
    best: float
    quartiles: tuple[float, float]
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Return the spread of the measured `seconds`. Raises ValueError if there are none."""
        if not seconds:
            raise ValueError("nothing was measured")
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], (seconds[0], seconds[0]), 1)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, min(seconds), (low, high), len(seconds))


class Budget:
    """A time limit of `seconds` from now on; None means no limit."""

    def __init__(
        self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self._clock = clock
        self._started = clock()

    @property
    def used(self) -> float:
        """The seconds since the budget was created."""
        return self._clock() - self._started

    @property
    def left(self) -> float:
        """The seconds until the limit. Negative once the limit is past."""
        return self.seconds - self.used

    @property
    def is_spent(self) -> bool:
        return self.left <= 0

    def share(self, num_left: int) -> Budget:
        """Return the budget for one of `num_left` equal pieces of work."""
        return Budget(self.left / max(1, num_left), self._clock)


def measure_all(
    watches: dict[str, Stopwatch], rounds: int, budget: Budget
) -> dict[str, list[float]]:
    """Measure `rounds` times with each stopwatch; return the measured seconds per stopwatch name.

    Each round measures once with each stopwatch, and every second round in reverse order. Once the
    budget is spent and three rounds are done, no further round begins.
    """
    seconds: dict[str, list[float]] = {name: [] for name in watches}
    for number in range(rounds):
        if number >= _MIN_ROUNDS and budget.is_spent:
            break
        for name in watches if number % 2 == 0 else reversed(list(watches)):
            seconds[name].append(watches[name].seconds())
    return seconds
