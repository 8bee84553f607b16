"""`TraceBuilder`: builds a `Trace` from schedules, arrivals and ends, in order of time.

Blocks are counted from the schedules' block appends. The reasons why requests wait may be passed
with each schedule. The builder uses no scheduler, loop or clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gptmanager.picture.trace import Bounds, Column, Phase, Reason, RequestRow, Span, Trace
from gptmanager.picture.wait_reporter import reason_of
from gptmanager.scheduler.wait_reasons import Wait, unreported_wait
from gptmanager.step import BlockAppend, Row, Schedule, StepResult


@dataclass(slots=True, eq=False)
class _Request:
    """The data of a request up to the last column.

    `slot` is -1 while the request waits. The wait begins in the column `waiting_since`.
    `first_wait` is the reason that was reported in this column, or None.
    """

    request_id: int
    prompt_len: int
    max_new_tokens: int
    priority: float
    arrival: int
    waiting_since: int
    first_wait: Wait | None = None
    slot: int = -1
    num_pauses: int = 0
    generated: int = 0
    end: int | None = None
    outcome: str = ""
    blocks: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def add(self, span: Span) -> None:
        """Append `span`, or extend the last span if `span` continues it.

        Spans of generation are one span only while each column computes one token.
        """
        last = self.spans[-1] if self.spans else None
        if (
            last is not None
            and last.phase is span.phase is not Phase.CONTEXT
            and last.end == span.begin
            and last.reason is span.reason
            and (
                span.phase is not Phase.GENERATION
                or (last.num_tokens == last.end - last.begin and span.num_tokens == 1)
            )
        ):
            self.spans[-1] = last._replace(
                end=span.end, num_tokens=last.num_tokens + span.num_tokens
            )
        else:
            self.spans.append(span)

    def confirm(self, row: Row, count: int) -> None:
        """Record that a row with drafts has generated `count` tokens."""
        length = row.position + row.num_tokens - row.num_drafts + count
        self.generated = max(self.generated, length - self.prompt_len)
        for index in reversed(range(len(self.spans))):
            span = self.spans[index]
            if span.phase is Phase.GENERATION:
                if span.position == row.position:
                    self.spans[index] = span._replace(num_tokens=max(count, 1))
                break


class _Wait(NamedTuple):
    """The reasons why requests wait in the column `begin`.

    `head` is the first of these requests, and `wait` its reason. If the previous `_Wait` has a
    reason of the same kind, `waits` is empty. Otherwise `waits` has the reported reasons of all
    requests, by request id.
    """

    begin: int
    head: _Request
    wait: Wait | None
    waits: Mapping[int, Wait]
    free_blocks: int

    @property
    def reason(self) -> Reason:
        return Reason.OTHER if self.wait is None else reason_of(self.wait)

    def of(self, request: _Request) -> Wait | None:
        """Return why a request waits, as reported or as it follows from the head's reason."""
        if request is self.head or self.wait is None:
            return self.wait
        behind = self.wait.of_those_behind(self.head.request_id)
        return self.waits.get(request.request_id, behind)


class TraceBuilder:
    """Builds a `Trace`. Call `arrive` before a request's first `step`, and `end` after its last.

    `max_work` is the limit of the number of updates for requests that hold memory or wait, or None.
    Beyond the limit, methods raise ValueError.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._all: list[_Request] = []
        self._active: list[_Request] = []  # by priority, then arrival
        self._by_id: dict[int, _Request] = {}
        self._by_slot: dict[int, _Request] = {}
        self._owners: Counter[int] = Counter()  # block -> how many requests hold it
        self._columns: list[Column] = []
        self._waits: list[_Wait] = []  # an entry per column in which a request has no memory
        self._changes: list[int] = []  # indices into _waits where the reason changes
        self._new_waiters: list[_Request] = []  # requests that begin to wait in the next column
        self._unknown = 0  # the lowest invented block id; invented ids are negative
        self._work = 0  # number of updates for requests that hold memory or wait
        self.max_work: int | None = None

    def __contains__(self, request_id: int) -> bool:
        """Return whether the request has arrived and has not ended."""
        return request_id in self._by_id

    def arrive(
        self, request_id: int, prompt_len: int, max_new_tokens: int, priority: float = 0.5
    ) -> None:
        """Add a request that waits from the next column on."""
        column = len(self._columns)
        request = _Request(request_id, prompt_len, max_new_tokens, priority, column, column)
        self._all.append(request)
        self._new_waiters.append(request)
        self._by_id[request_id] = request
        insort_right(self._active, request, key=lambda other: -other.priority)

    def step(
        self, schedule: Schedule, time_s: float, waits: Mapping[int, Wait] | None = None
    ) -> None:
        """Add the iteration that was scheduled at `time_s`.

        `waits` has the scheduler's reasons for leaving requests out, by request id, or is None if
        they were not reported.
        """
        column = len(self._columns)
        for request_id in schedule.paused:
            self._pause(request_id)
        rows = schedule.rows
        started = {start.slot for start in schedule.starts}
        for row in rows:
            self._enter_slot(self._find(row), row, row.slot in started)
        self._append_blocks(schedule.block_appends)
        for row in schedule.context_rows:
            self._run(row, Phase.CONTEXT, column)
        for row in schedule.generation_rows:
            self._run(row, Phase.GENERATION, column)
        num_waiting = self._wait(column, {row.request_id for row in rows}, waits or {})
        self._columns.append(
            Column(
                iteration=schedule.iteration,
                time_s=time_s,
                num_context=len(schedule.context_rows),
                num_generation=len(schedule.generation_rows),
                context_tokens=schedule.num_context_tokens,
                generation_tokens=sum(row.num_tokens for row in schedule.generation_rows),
                used_blocks=len(self._owners),
                num_paused=len(schedule.paused),
                num_waiting=num_waiting,
            )
        )

    def confirm(self, schedule: Schedule, result: StepResult) -> None:
        """Record how many draft tokens of a step were accepted, before its requests end."""
        counts = [] if result.num_tokens is None else result.num_tokens.tolist()
        for row, count in zip(schedule.sampling_rows, counts, strict=False):
            request = self._by_id.get(row.request_id) if row.num_drafts else None
            if request is not None:
                request.confirm(row, count)

    def end(self, request_id: int, outcome: str) -> None:
        """End a request, when it gets its final response. Unknown requests are ignored."""
        request = self._by_id.pop(request_id, None)
        if request is not None:
            self._end_wait(request, len(self._columns))
            self._release(request)
            self._active.remove(request)
            request.end, request.outcome = len(self._columns), outcome

    def build(self) -> Trace:
        """Return the trace up to the last column."""
        for request in self._active:
            self._end_wait(request, len(self._columns))
        rows = tuple(
            RequestRow(
                request_id=request.request_id,
                prompt_len=request.prompt_len,
                max_new_tokens=request.max_new_tokens,
                priority=request.priority,
                arrival=request.arrival,
                end=request.end,
                outcome=request.outcome,
                num_generated=request.generated,
                num_pauses=request.num_pauses,
                spans=tuple(request.spans),
            )
            for request in self._all
        )
        return Trace(self.bounds, rows, tuple(self._columns))

    # Inside ---------------------------------------------------------------------------------

    def _find(self, row: Row) -> _Request:
        """Return the row's request. Add it if its arrival was not recorded."""
        if row.request_id not in self._by_id:
            self.arrive(row.request_id, row.position + row.num_tokens, 0)
        return self._by_id[row.request_id]

    def _enter_slot(self, request: _Request, row: Row, is_start: bool) -> None:
        """Record that a request has the slot of its row. Its wait, if any, ends."""
        if request.slot == row.slot:
            return
        self._end_wait(request, len(self._columns))
        last = self._by_slot.get(row.slot)
        if last is not None:  # its end was not recorded, but the slot is reused
            self.end(last.request_id, "")
        request.slot = row.slot
        self._by_slot[row.slot] = request
        if not is_start:  # it started before the first schedule, so its block ids are unknown
            most = self.bounds.num_blocks - len(self._owners)
            count = max(0, min(self._blocks(row.position), most))
            self._unknown -= count
            request.blocks = list(range(self._unknown, self._unknown + count))
            self._owners.update(request.blocks)

    def _append_blocks(self, appends: Iterable[BlockAppend]) -> None:
        for append in appends:
            request = self._by_slot.get(append.slot)
            if request is not None:
                request.blocks.extend(append.block_ids)
                self._owners.update(append.block_ids)

    def _pause(self, request_id: int) -> None:
        request = self._by_id.get(request_id)
        if request is not None:
            self._release(request)
            request.num_pauses += 1
            request.waiting_since = len(self._columns)
            self._new_waiters.append(request)

    def _release(self, request: _Request) -> None:
        for block in request.blocks:
            self._owners[block] -= 1
            if not self._owners[block]:
                del self._owners[block]
        request.blocks = []
        self._by_slot.pop(request.slot, None)
        request.slot = -1

    def _run(self, row: Row, phase: Phase, column: int) -> None:
        request = self._by_id[row.request_id]
        request.add(Span(phase, column, column + 1, row.position, row.num_tokens))
        if row.samples:
            length = row.position + row.num_tokens - row.num_drafts + 1
            request.generated = max(request.generated, length - request.prompt_len)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.bounds.tokens_per_block)

    def _wait(self, column: int, running: set[int], waits: Mapping[int, Wait]) -> int:
        """Record why requests wait in this column. Return the number of requests that do not run.

        Requests with memory get a span now. Requests without memory get their spans when the wait
        ends, because most requests of a long list wait for the same reason as the first request.
        """
        self._spend(len(self._by_slot))
        for request in self._by_slot.values():
            if request.request_id not in running:
                wait = waits.get(request.request_id)
                reason = Reason.OTHER if wait is None else reason_of(wait)
                text = "for another batch" if wait is None else wait.text
                request.add(Span(Phase.HELD, column, column + 1, 0, 0, reason, text))
        for request in self._new_waiters:
            request.first_wait = waits.get(request.request_id)
        self._new_waiters.clear()
        if len(self._active) > len(self._by_slot):
            head = next(request for request in self._active if request.slot < 0)
            free_blocks = self.bounds.num_blocks - len(self._owners)
            entry = _Wait(column, head, waits.get(head.request_id), waits, free_blocks)
            if not self._waits or self._waits[-1].reason is not entry.reason:
                self._changes.append(len(self._waits))
            else:
                entry = entry._replace(waits={})
            self._waits.append(entry)
        return len(self._active) - len(running)

    def _end_wait(self, request: _Request, end: int) -> None:
        """Add the spans of a request's wait up to the column `end`, one for each reason."""
        if request.slot >= 0 or request.waiting_since >= end:
            return
        phase = Phase.PAUSED if request.num_pauses else Phase.WAITING
        since, request.waiting_since = request.waiting_since, end
        first, count = bisect_left(self._waits, since, key=lambda wait: wait.begin), end - since
        changes = self._changes[bisect_right(self._changes, first) :]
        self._spend(len(changes))
        starts = [0, *(change - first for change in changes if change < first + count)]
        for start, stop in zip(starts, (*starts[1:], count), strict=True):
            entry = self._waits[first + start]
            wait = entry.of(request)
            if not start and request.first_wait is not None:
                wait = request.first_wait
            reason = Reason.OTHER if wait is None else reason_of(wait)
            text = self._unreported(request, entry.free_blocks) if wait is None else wait.text
            request.add(Span(phase, since + start, since + stop, 0, 0, reason, text))

    def _spend(self, work: int) -> None:
        self._work += work
        if self.max_work is not None and self._work > self.max_work:
            raise ValueError("far more requests wait or hold memory than run")

    def _unreported(self, request: _Request, free_blocks: int) -> str:
        needed = self._blocks(request.prompt_len + request.max_new_tokens)
        return unreported_wait(self.bounds.policy or "the scheduler", needed, free_blocks)
