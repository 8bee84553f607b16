"""`ModelStatistics`: counts a model's calls and measures how long they take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

_NOT_MEASURED = (
    *("queue", "compute_input", "compute_infer", "compute_output"),
    *("cache_hit", "cache_miss"),
)


class CallRecord:
    """A call with `num_rows` rows. `succeeded`: whether all rows were answered in full."""

    num_rows: int
    succeeded = False


class ModelStatistics:
    """The statistics of one model since the server started, as Triton reports them."""

    def __init__(self, name: str, version: str) -> None:
        self._name = name
        self._version = version
        self._last_ms = 0  # start of the last successful call, in ms since the epoch
        self._num_rows = 0
        self._counts = {"success": 0, "fail": 0}
        self._ns = {"success": 0, "fail": 0}

    @contextlib.contextmanager
    def call(self) -> Iterator[CallRecord]:
        """Record a call that lasts until the end of the block."""
        record, begin_ns, begin_ms = CallRecord(), time.perf_counter_ns(), time.time_ns() // 10**6
        try:
            yield record
        finally:
            kind = "success" if record.succeeded else "fail"
            self._counts[kind] += 1
            self._ns[kind] += time.perf_counter_ns() - begin_ns
            if record.succeeded:
                self._num_rows += record.num_rows
                self._last_ms = max(self._last_ms, begin_ms)

    def as_json(self) -> dict[str, Any]:
        """Return the statistics as JSON values.

        `inference_count` is the number of rows of successful calls, `execution_count` the number of
        successful calls. Failed and cancelled calls are counted only as `fail`. Durations that are
        not measured have the count 0.
        """
        durations = {kind: {"count": self._counts[kind], "ns": self._ns[kind]} for kind in self._ns}
        nothing = {kind: {"count": 0, "ns": 0} for kind in _NOT_MEASURED}
        return {
            "name": self._name,
            "version": self._version,
            "last_inference": self._last_ms,
            "inference_count": self._num_rows,
            "execution_count": self._counts["success"],
            "inference_stats": {**durations, **nothing},
            "batch_stats": [],
            "memory_usage": [],
        }
