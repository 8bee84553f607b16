"""The counts for metrics. The loop's thread updates them, and any thread may read them.

A scrape during an update may miss that update. `RequestCounts` has a lock, because an application
may end requests on another thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from gptmanager import FinishReason, NamedTensor
from gptmanager.callbacks.sinks.metric_names import METRIC, METRICS
from gptmanager.errors import DuplicateRequestIdError, error_class

_logger = logging.getLogger(__name__)

_FINISH_REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "timeout",
    FinishReason.CANCELLED: "cancelled",
}
# Of a request with `is_ended_by_caller`, this number of the latest streamed tokens is not counted
# yet, because the application may still decide that the request ends before them.
_LAG = 32
Totals = dict[tuple[str, tuple[str, ...]], float]


class Histogram:
    """Observations by bucket, and their sum. Upper bounds are inclusive."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of observations up to this bound), ending with "+Inf"."""
        total, found = 0, []
        counts = list(self.counts)  # a consistent copy
        for bound, count in zip((*self.bounds, math.inf), counts, strict=True):
            total += count
            found.append(("+Inf" if bound == math.inf else str(float(bound)), float(total)))
        return found


class IterationCounts:
    """Counts from statistics records. `last` is the last record, parsed."""

    def __init__(self) -> None:
        self.last: dict[str, Any] | None = None
        self.iterations = 0
        self.context_tokens = 0
        self.recomputed_tokens = 0
        self.pauses = 0
        self.gil_wait_us = 0
        self.tokens = Histogram(METRIC["iteration_tokens"].buckets)
        self.latency = Histogram(METRIC["iteration_latency_seconds"].buckets)
        self._carried: Totals = {}  # totals of earlier managers
        self._is_failing = False

    def add(self, record: str) -> None:
        """Add a record. Never raise: the first of a series of unreadable records is logged."""
        try:
            self._add(orjson.loads(record))
            self._is_failing = False
        except (ValueError, TypeError, KeyError) as error:
            if not self._is_failing:
                self._is_failing = True
                _logger.warning("a statistics record cannot be read: %r", error)

    def _add(self, record: dict[str, Any]) -> None:
        own, context_tokens = record["gptmanager"], record["Total Context Tokens"]
        generated = record.get("Generation Requests")
        if generated is None:  # V1 batching
            generated = record["Total Generation Tokens"]
        latency_us, gil_wait_us = own["iteration_latency_us"]["total"], own["gil_wait_us"]
        recomputed_tokens = own["recomputed_tokens"]
        paused, last = record["Paused Requests"], self.last
        if last is not None and record["Iteration Counter"] <= last["Iteration Counter"]:
            self._carried = self.totals()  # a new manager: its totals start at 0
        self.last = record
        self.iterations += 1
        self.context_tokens += context_tokens
        self.recomputed_tokens += recomputed_tokens
        self.pauses += paused
        self.gil_wait_us += gil_wait_us
        self.tokens.observe(context_tokens + generated)
        self.latency.observe(latency_us / 1e6)

    def totals(self) -> Totals:
        """Return the totals that managers keep since their start: (metric, labels) -> number."""
        found = dict(self._carried)
        if self.last is None:
            return found
        for key, value in _since_start(self.last["gptmanager"]).items():
            found[key] = found.get(key, 0) + value
        return found


def _since_start(own: dict[str, Any]) -> Totals:
    reuse, adapters, drafts = own["block_reuse"], own["adapters"], own["draft_tokens"]
    found: Totals = {
        ("draft_tokens", ()): drafts["drafted"],
        ("accepted_draft_tokens", ()): drafts["accepted"],
        ("offloaded_blocks", ()): reuse["offloaded_blocks"],
        ("onboarded_blocks", ()): reuse["onboarded_blocks"],
        ("adapter_cache_hits", ()): adapters["hits"],
        ("adapter_cache_misses", ()): adapters["misses"],
        ("logits_errors", ()): own["logits_errors"],
    }
    for callback, microseconds in own["callback_us"].items():
        found["callback_seconds", (callback,)] = microseconds / 1e6
    for callback, errors in own["callback_errors"].items():
        found["callback_errors", (callback,)] = errors
    return found


class _Open:
    """A request that has not ended.

    `wait_s` is the time from its arrival until GetInferenceRequests returned it. `num_counted` of
    its `num_streamed` tokens are counted. With `is_scoring`, its generated tokens do not count.
    With `is_ended_by_caller`, the request ends when it has its final response (`final`) and the
    application has called `end_as` (`is_decided`). `num_kept` is the number of generated tokens
    that count; None for all.
    """

    __slots__ = (
        *("arrival", "wait_s", "num_streamed", "num_counted", "finish_reason", "is_scoring"),
        *("is_ended_by_caller", "is_decided", "num_kept", "final"),
    )

    def __init__(self) -> None:
        self.arrival: float | None = None
        self.wait_s = 0.0
        self.num_streamed = self.num_counted = 0
        self.finish_reason: str | None = None
        self.is_scoring = self.is_ended_by_caller = self.is_decided = False
        self.num_kept: int | None = None
        self.final: dict[str, Any] | None = None


class RequestCounts:
    """Counts from responses. `finished` has the number of requests that ended, by finish reason.

    A request is open from `arrive`, `fetch`, or its first response until its final response or
    `withdraw`. A request with `is_ended_by_caller` that does not fail stays open until both its
    final response and `end_as`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.finished = {"stop": 0, "length": 0, "cancelled": 0}
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cache_queries = 0  # tokens of prompts that ran
        self.cache_hits = 0  # tokens of `cache_queries` that were in the KV cache
        self.histograms = {
            metric.name: Histogram(metric.buckets)
            for metric in METRICS
            if metric.kind == "histogram" and not metric.name.startswith("iteration_")
        }
        self._clock = clock
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()

    @property
    def num_open(self) -> int:
        """Number of open requests."""
        return len(self._open)

    def arrive(
        self, request_id: int, *, is_scoring: bool = False, is_ended_by_caller: bool = False
    ) -> bool:
        """Open a request that begins to wait, as `PrometheusSink.arrived` describes."""
        with self._lock:
            request = self._of(request_id)
            if request.arrival is not None:
                return False
            request.is_scoring, request.is_ended_by_caller = is_scoring, is_ended_by_caller
            request.arrival = self._clock()
            return True

    def fetch(self, request_id: int) -> None:
        """Record that GetInferenceRequests returns a request."""
        request = self._of(request_id)
        if request.arrival is not None:
            request.wait_s = self._clock() - request.arrival

    def end_as(
        self, request_id: int, finish_reason: str | None, num_tokens: int | None = None
    ) -> None:
        """Record that the application ends a request, as `PrometheusSink.ends_as` describes."""
        with self._lock:
            request = self._open.get(request_id)
            if request is None:
                return
            request.is_decided = True
            if finish_reason is not None:
                request.finish_reason = finish_reason
            if num_tokens is not None:
                request.num_kept = num_tokens
            if request.final is not None:
                del self._open[request_id]
                self._end(request, request.final)

    def withdraw(self, request_id: int, finish_reason: str | None) -> None:
        """Close a request that is never fetched; with None as `finish_reason`, do not count it."""
        with self._lock:
            if self._open.pop(request_id, None) is not None and finish_reason is not None:
                self._finish(finish_reason)

    def respond(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        """Count a response, with the arguments of SendResponse."""
        with self._lock:
            if error_class(error) == DuplicateRequestIdError.__name__:
                self._finish("error")  # the other request with this id stays open
                return
            request = self._of(request_id)
            if not is_final:
                self._stream(request, tensors[0].tensor.shape[-1])
            elif request.is_ended_by_caller and not request.is_decided and not error:
                request.final = dict(tensors)
            else:
                del self._open[request_id]
                if error:
                    self._finish("error")
                else:
                    self._end(request, dict(tensors))

    def _stream(self, request: _Open, num_tokens: int) -> None:
        if request.is_scoring:
            return
        request.num_streamed += num_tokens
        lag = _LAG if request.is_ended_by_caller else 0
        counted = max(request.num_streamed - lag, 0)
        self.generation_tokens += counted - request.num_counted
        request.num_counted = counted

    def _of(self, request_id: int) -> _Open:
        request = self._open.get(request_id)
        if request is None:
            request = self._open[request_id] = _Open()
        return request

    def _finish(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def _end(self, request: _Open, by_name: dict[str, Any]) -> None:
        reason = by_name["finish_reasons"].tolist()[0][0]
        self._finish(request.finish_reason or _FINISH_REASONS[reason])
        metrics = by_name["request_metrics"].tolist()
        queue_s, first_s, last_s, _, cached, prompt, generated, *_ = metrics
        num_generated = 0 if request.is_scoring else int(generated)
        if request.num_kept is not None:
            num_generated = request.num_kept
        self.prompt_tokens += int(prompt)
        self.generation_tokens += max(num_generated - request.num_counted, 0)
        observe = self._observe
        observe("request_prompt_tokens", prompt)
        observe("request_generation_tokens", num_generated)
        if math.isnan(queue_s):  # the request never ran
            return
        self.cache_queries += int(prompt)
        self.cache_hits += int(cached)
        observe("request_queue_time_seconds", request.wait_s + queue_s)
        if math.isnan(first_s):
            return
        if num_generated:
            observe("time_to_first_token_seconds", request.wait_s + first_s)
        observe("e2e_request_latency_seconds", request.wait_s + last_s)
        observe("request_prefill_time_seconds", first_s - queue_s)
        observe("request_decode_time_seconds", last_s - first_s)
        observe("request_inference_time_seconds", last_s - queue_s)
        if num_generated > 1:
            mean = (last_s - first_s) / (num_generated - 1)
            observe("time_per_output_token_seconds", mean, num_generated - 1)
            observe("request_time_per_output_token_seconds", mean)

    def _observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)
