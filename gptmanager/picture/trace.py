"""`Trace`: the state of every request in every iteration, as frozen values to draw from.

A trace depends neither on how it is drawn nor on the source of the schedules that `builder` reads.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter
from typing import NamedTuple


class Phase(Enum):
    """The phase of a request in consecutive iterations."""

    CONTEXT = "context"  # computes a part of its prompt or, after a pause, of its tokens so far
    GENERATION = "generation"  # computes one token per iteration
    WAITING = "waiting"  # has not started
    PAUSED = "paused"  # has lost its memory since it started, but keeps its tokens
    HELD = "held"  # holds memory, but is not in the iteration's batch


class Reason(Enum):
    """The reason why a request is left out of an iteration; NONE if it runs."""

    NONE = ""
    BATCH = "max_batch_size"
    TOKENS = "max_num_tokens"
    BLOCKS = "KV cache blocks"
    STATIC = "static batch"
    OTHER = "scheduler's choice"


class Span(NamedTuple):
    """The phase of a request in columns `begin` to `end - 1`.

    A span of CONTEXT is one chunk of `num_tokens` positions from `position` on. A span of
    GENERATION computes `num_tokens` positions from `position` on, one per column, or with draft
    tokens several in one column; drafts that were not accepted do not count. For other phases,
    `why` completes a sentence that begins with "waits". Numbers in `why` are those of column
    `begin`.
    """

    phase: Phase
    begin: int
    end: int
    position: int = 0
    num_tokens: int = 0
    reason: Reason = Reason.NONE
    why: str = ""


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request. Lengths are in tokens. `arrival` and `end` are indices of columns.

    `prompt_len` is the length of the prompt that the host sent. The request has ended before column
    `end`. `end` is None if the request has not ended, or if its end is not known. `num_generated`
    counts computed tokens, but no drafts that were not accepted. With run-ahead, a request that
    stops early computes one token more than it returns.
    """

    request_id: int
    prompt_len: int
    max_new_tokens: int
    priority: float
    arrival: int
    end: int | None
    outcome: str
    num_generated: int
    num_pauses: int
    spans: tuple[Span, ...]


class Column(NamedTuple):
    """One iteration.

    `time_s` is the time in seconds at which the iteration was scheduled. `used_blocks` is the
    number of KV cache blocks that requests held while it ran. `num_context` and `num_generation`
    count the requests that the iteration ran in each of the two phases, and `context_tokens` and
    `generation_tokens` their tokens, with all draft tokens. `num_paused` counts those
    that it paused, and `num_waiting` those that it did not run.
    """

    iteration: int
    time_s: float
    num_context: int
    num_generation: int
    context_tokens: int
    generation_tokens: int
    used_blocks: int
    num_paused: int
    num_waiting: int

    @property
    def num_running(self) -> int:
        return self.num_context + self.num_generation

    @property
    def num_tokens(self) -> int:
        return self.context_tokens + self.generation_tokens


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of the scheduler.

    `policy` is the name of a `CapacitySchedulerPolicy`, or the name of the host's scheduler.
    `chunk_unit` is None if contexts are not chunked.
    """

    max_batch_size: int
    max_num_tokens: int
    num_blocks: int
    tokens_per_block: int
    policy: str = ""
    chunk_unit: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a run as `rows`, in order of arrival, and its iterations as `columns`.

    Spans refer to indices of `columns`, not to iteration numbers.
    """

    bounds: Bounds
    rows: tuple[RequestRow, ...]
    columns: tuple[Column, ...]

    @property
    def first_iteration(self) -> int:
        return self.columns[0].iteration if self.columns else 0

    def row(self, request_id: int) -> RequestRow:
        """Return the row of the last request with this id. Raise KeyError for an unknown id."""
        for row in reversed(self.rows):
            if row.request_id == request_id:
                return row
        raise KeyError(request_id)

    def without_idle(self) -> Trace:
        """Return the trace without the requests that never ran."""
        busy = (Phase.CONTEXT, Phase.GENERATION)
        rows = [row for row in self.rows if any(span.phase in busy for span in row.spans)]
        return replace(self, rows=tuple(rows))

    def window(self, first: int, end: int) -> Trace:
        """Return the trace of iterations `first` to `end - 1`, with the requests active in them."""
        number = attrgetter("iteration")
        begin, stop = (bisect_left(self.columns, it, key=number) for it in (first, end))
        rows = [_cut(row, begin, stop) for row in self.rows]
        seen = tuple(row for row in rows if row.spans)
        return replace(self, rows=seen, columns=self.columns[begin:stop])


def _cut(row: RequestRow, begin: int, end: int) -> RequestRow:
    spans = []
    for span in row.spans:
        left, right = max(span.begin, begin), min(span.end, end)
        if left < right:
            moved = span._replace(begin=left - begin, end=right - begin)
            if span.phase is Phase.GENERATION and right - left < span.end - span.begin:
                moved = moved._replace(
                    position=span.position + left - span.begin, num_tokens=right - left
                )
            spans.append(moved)
    ended = row.end is not None and begin <= row.end <= end
    return replace(
        row,
        arrival=max(0, row.arrival - begin),
        end=row.end - begin if ended and row.end is not None else None,
        spans=tuple(spans),
    )
