"""The figures of a simulated run. `Tally` counts during the run, and returns `Figures`."""

from __future__ import annotations

import dataclasses
import math
from array import array
from typing import NamedTuple

import numpy as np

from gptmanager.loop.active_request import ActiveRequest
from gptmanager.statistics import Counts
from gptmanager.step import Schedule


class Percentiles(NamedTuple):
    """Percentiles of a time over the finished requests; NaN if no finished request has a value."""

    p50: float
    p99: float


class KvUse(NamedTuple):
    """The mean and the peak, over all iterations, of the fraction of KV cache blocks in use."""

    mean: float
    peak: float


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a simulated run. Times are virtual seconds; latencies cover finished requests.

    `requests` is the number of requests that finished or failed. `ttft_s` is the time from arrival
    to first token, and `per_token_s` each request's mean time between tokens. A batch is counted in
    requests. `recomputed_tokens` is the number of context tokens of requests that had been paused.
    `request_steps` is the sum of all iterations' batches. `first_error` is the error of the first
    request that failed, or "".
    """

    requests: int
    failed: int
    iterations: int
    makespan_s: float
    output_tokens: int
    ttft_s: Percentiles
    per_token_s: Percentiles
    mean_batch: float
    max_batch: int
    kv_use: KvUse
    pauses: int
    recomputed_tokens: int
    context_tokens: int
    request_steps: int
    first_error: str

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.makespan_s if self.makespan_s else 0.0


class Tally:
    """Counts schedules and requests as the simulation reports them."""

    def __init__(self) -> None:
        self.num_ended = 0
        self._failed = 0
        self._first_error = ""
        self._iterations = self._rows = self._output_tokens = self._max_batch = 0
        self._context_tokens = self._recomputed = self._pauses = 0
        self._used_blocks = self._max_used = self._total_blocks = 0
        self._arrived: dict[int, float] = {}
        self._paused: set[int] = set()  # active requests that have been paused
        self._ttft = array("d")
        self._per_token = array("d")

    def arrived(self, request_id: int, when: float) -> None:
        self._arrived.setdefault(request_id, when)

    def scheduled(self, schedule: Schedule) -> None:
        self._pauses += len(schedule.paused)
        self._paused.update(schedule.paused)
        if self._paused and schedule.context_rows:
            self._recomputed += sum(
                row.num_tokens for row in schedule.context_rows if row.request_id in self._paused
            )

    def reported(self, counts: Counts) -> None:
        batch = counts.context + counts.generation
        self._iterations += 1
        self._rows += batch
        self._max_batch = max(self._max_batch, batch)
        self._context_tokens += counts.context_tokens
        used = counts.total_blocks - counts.free_blocks
        self._used_blocks += used
        self._max_used = max(self._max_used, used)
        self._total_blocks = counts.total_blocks

    def failed(self, request_id: int, error: str, *, was_duplicate: bool) -> None:
        """Count a failed request. If it `was_duplicate`, another request with its id continues."""
        self.num_ended += 1
        self._failed += 1
        self._first_error = self._first_error or error
        if not was_duplicate:
            self._arrived.pop(request_id, None)
            self._paused.discard(request_id)

    def finished(self, request: ActiveRequest) -> None:
        self.num_ended += 1
        self._paused.discard(request.request_id)
        num_tokens = len(request.tokens) - request.orig_prompt_len
        self._output_tokens += num_tokens
        arrived = self._arrived.pop(request.request_id)
        first, last = request.times.first_token, request.times.last_token
        if first is not None and last is not None:
            self._ttft.append(first - arrived)
            if num_tokens > 1:
                self._per_token.append((last - first) / (num_tokens - 1))

    def figures(self, makespan_s: float) -> Figures:
        iterations, blocks = max(1, self._iterations), max(1, self._total_blocks)
        return Figures(
            requests=self.num_ended,
            failed=self._failed,
            iterations=self._iterations,
            makespan_s=makespan_s,
            output_tokens=self._output_tokens,
            ttft_s=_percentiles(self._ttft),
            per_token_s=_percentiles(self._per_token),
            mean_batch=self._rows / iterations,
            max_batch=self._max_batch,
            kv_use=KvUse(self._used_blocks / iterations / blocks, self._max_used / blocks),
            pauses=self._pauses,
            recomputed_tokens=self._recomputed,
            context_tokens=self._context_tokens,
            request_steps=self._rows,
            first_error=self._first_error,
        )


def _percentiles(values: array[float]) -> Percentiles:
    if not values:
        return Percentiles(math.nan, math.nan)
    return Percentiles(*np.percentile(np.frombuffer(values), (50, 99)).tolist())
