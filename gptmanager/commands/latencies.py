"""Latencies that clients see: from the submission of a request to its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gptmanager.request.inference_request import InferenceRequest


class FetchTimes:
    """Wraps a Get callback and records when the callback returned each request.

    The times in request metrics count from this moment. The latencies that clients see count from
    the submission.
    """

    def __init__(self, get: Callable[[int], Sequence[InferenceRequest]]) -> None:
        self._get = get
        self.by_id: dict[int, float] = {}  # request ID -> time.monotonic()

    def __call__(self, max_num_requests: int) -> Sequence[InferenceRequest]:
        requests = self._get(max_num_requests)
        now = time.monotonic()
        for request in requests:
            self.by_id[request.request_id] = now
        return requests


def latencies(
    metrics: Sequence[Mapping[str, float]], waits: Sequence[float]
) -> dict[str, dict[str, float]]:
    """Return percentiles of the requests' latencies in milliseconds.

    The time to the first token and the time in the queue count from the submission. `metrics` and
    `waits` have an item per request: its request metrics, and the seconds from its submission until
    the Get callback returned it.
    """
    pairs = list(zip(metrics, waits, strict=True))
    return {
        "time_to_first_token_ms": _percentiles([m["first_token_s"] + wait for m, wait in pairs]),
        "time_per_output_token_ms": _percentiles(
            [
                (m["last_token_s"] - m["first_token_s"]) / (m["generated_tokens"] - 1)
                for m in metrics
                if m["generated_tokens"] > 1
            ]
        ),
        "queue_ms": _percentiles([m["queue_s"] + wait for m, wait in pairs]),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles in milliseconds, without NaN values; {} if no value is left."""
    values = [value * 1e3 for value in seconds if not np.isnan(value)]
    if not values:
        return {}
    cuts = np.percentile(values, (50, 90, 99)).tolist()
    return {name: round(cut, 2) for name, cut in zip(("p50", "p90", "p99"), cuts, strict=True)}
