"""`Trace`: what became of every request in every iteration, as frozen values to draw from.

Knows nothing of how it is drawn, nor of where the schedules came from (`builder`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple


class Phase(Enum):
    """The phase of a request during a run of iterations."""

    CONTEXT = "context"  # a part of its history is computed
    GENERATION = "generation"  # one token an iteration
    WAITING = "waiting"  # has not started
    PAUSED = "paused"  # had started; its memory was taken, what it generated is kept
    HELD = "held"  # holds memory, but is not in this iteration's batch


class Reason(Enum):
    """The reason why the first waiting request is left out of an iteration."""

    NONE = ""
    BATCH = "max_batch_size"
    TOKENS = "max_num_tokens"
    BLOCKS = "KV cache blocks"
    STATIC = "static batch"
    OTHER = "scheduler's choice"


class Span(NamedTuple):
    """A request in columns `begin` to `end`, which is not included.

    CONTEXT: one chunk of `num_tokens` positions from `position` on. GENERATION: `num_tokens`
    positions from `position` on, one a column. Others: `why` it waits, in the numbers of `begin`:
    a text that goes on behind "waits".
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
    """One request. Lengths in tokens, `arrival` and `end` in columns (None: not seen to end).

    `prompt_len` is what the host sent. `num_generated` counts the tokens that were computed for
    it: under run-ahead one more than it got, where it stopped early.
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
    """One iteration. `time_s`: when it was decided. `used_blocks`: held while it ran."""

    iteration: int
    time_s: float
    num_context: int
    num_generation: int
    context_tokens: int
    used_blocks: int
    num_paused: int
    num_waiting: int

    @property
    def num_running(self) -> int:
        return self.num_context + self.num_generation

    @property
    def num_tokens(self) -> int:
        return self.context_tokens + self.num_generation


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits under which was scheduled. `chunk_unit` None: contexts run in one piece.

    `policy`: a name of `CapacitySchedulerPolicy`, or that of a user's class.
    """

    max_batch_size: int
    max_num_tokens: int
    num_blocks: int
    tokens_per_block: int
    policy: str = ""
    chunk_unit: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in the order of arrival; spans count columns, `columns[i].iteration` names one."""

    bounds: Bounds
    rows: tuple[RequestRow, ...]
    columns: tuple[Column, ...]

    @property
    def first_iteration(self) -> int:
        return self.columns[0].iteration if self.columns else 0

    def row(self, request_id: int) -> RequestRow:
        """The last request of that id; KeyError if there is none."""
        for row in reversed(self.rows):
            if row.request_id == request_id:
                return row
        raise KeyError(request_id)

    def without_idle(self) -> Trace:
        """Without the requests of which nothing was computed."""
        busy = (Phase.CONTEXT, Phase.GENERATION)
        rows = [row for row in self.rows if any(span.phase in busy for span in row.spans)]
        return replace(self, rows=tuple(rows))

    def window(self, first: int, end: int) -> Trace:
        """Iterations `first` to `end`, not included, and the requests seen in them."""
        offset = self.first_iteration
        begin, stop = max(0, first - offset), min(len(self.columns), end - offset)
        rows = [_cut(row, begin, stop) for row in self.rows]
        seen = tuple(row for row in rows if row.spans)
        return replace(self, rows=seen, columns=self.columns[begin:stop])


def _cut(row: RequestRow, begin: int, end: int) -> RequestRow:
    spans = []
    for span in row.spans:
        left, right = max(span.begin, begin), min(span.end, end)
        if left < right:
            moved = span._replace(begin=left - begin, end=right - begin)
            if span.phase is Phase.GENERATION:
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
