"""Exports a `Trace` in the trace event format of Perfetto and chrome://tracing.

The export has one track per request, one for the iterations, and counters for requests in the
batch, tokens, KV cache blocks and waiting requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from gptmanager.picture.rows import describe
from gptmanager.picture.trace import Column, RequestRow, Trace

Event = dict[str, Any]

_ITERATIONS, _REQUESTS = 1, 2  # the two "processes" that group the tracks


def chrome_trace(trace: Trace) -> bytes:
    """Return a trace as JSON, with times in microseconds.

    An iteration takes at least one microsecond.
    """
    times = _times_us(trace.columns)
    events = [
        _metadata("process_name", _ITERATIONS, 0, name="iterations"),
        _metadata("process_name", _REQUESTS, 0, name="requests"),
    ]
    for index, column in enumerate(trace.columns):
        events += _iteration(column, times[index], times[index + 1])
    for track, row in enumerate(trace.rows, start=1):
        name = f"request {row.request_id}"
        events.append(_metadata("thread_name", _REQUESTS, track, name=name))
        events.append(_metadata("thread_sort_index", _REQUESTS, track, sort_index=track))
        events += _spans(trace, row, track, times)
    return orjson.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _times_us(columns: tuple[Column, ...]) -> list[float]:
    """Return the start of each column, then the end of the last column.

    Times are in microseconds since the start of the first column, and increase strictly.
    """
    if not columns:
        return [0.0]
    times = [0.0]
    start = columns[0].time_s
    for column in columns[1:]:
        times.append(max(times[-1] + 1.0, (column.time_s - start) * 1e6))
    usual = times[-1] / (len(times) - 1) if len(times) > 1 else 1.0
    return [*times, times[-1] + usual]


def _iteration(column: Column, begin: float, end: float) -> Iterator[Event]:
    yield {
        "name": f"iteration {column.iteration}",
        "ph": "X",
        "pid": _ITERATIONS,
        "tid": 1,
        "ts": begin,
        "dur": end - begin,
        "args": column._asdict(),
    }
    counters = {
        "requests": {"context": column.num_context, "generation": column.num_generation},
        "tokens": {"context": column.context_tokens, "generation": column.num_generation},
        "KV cache blocks": {"used": column.used_blocks},
        "waiting": {"requests": column.num_waiting},
    }
    for name, values in counters.items():
        yield {"name": name, "ph": "C", "pid": _ITERATIONS, "ts": begin, "args": values}


def _spans(trace: Trace, row: RequestRow, track: int, times: list[float]) -> Iterator[Event]:
    for span in row.spans:
        yield {
            "name": span.phase.value,
            "cat": span.phase.value,
            "ph": "X",
            "pid": _REQUESTS,
            "tid": track,
            "ts": times[span.begin],
            "dur": times[span.end] - times[span.begin],
            "args": {
                "what": describe(trace, row, span),
                "tokens": span.num_tokens,
                "reason": span.reason.value,
            },
        }
    if row.end is not None:
        yield {
            "name": f"end: {row.outcome}",
            "ph": "i",
            "s": "t",
            "pid": _REQUESTS,
            "tid": track,
            "ts": times[row.end],
            "args": {"generated": row.num_generated, "pauses": row.num_pauses},
        }


def _metadata(kind: str, process: int, track: int, **values: Any) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": values}
