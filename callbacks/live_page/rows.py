"""`LiveRows`: the requests of a watched loop as rows of spans, and their changes for a page.

A page first gets `snapshot`, then the result of each `take_changes`. `docs/live_page.md` describes
the format of both.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from gptmanager import REQUEST_METRICS
from gptmanager.callbacks.live_page.tap import Change, Step
from gptmanager.errors import DuplicateRequestIdError
from gptmanager.manager.watching import Arrival, Beginning, Ending, Ran

# The kind of a span is the state of the request. A HELD request does not run, but keeps its memory.
WAITING, CONTEXT, GENERATION, PAUSED, HELD = "w", "c", "g", "p", "h"

_NO_IDS: frozenset[int] = frozenset()
_MAX_SPANS = 256  # spans of a row; if there are more, the oldest half is dropped
_MAX_ENDED = 256  # ended rows in a snapshot, in addition to the active ones
_MAX_NEW = 64  # rows in one result of `take_changes` that began and ended since the previous call
_TIMES = ("queue_s", "first_token_s", "last_token_s")  # metrics that are sent to pages
_request_id = itemgetter(0)  # gets the request id from a `Row` of gptmanager.step


class LiveRow:
    """The row of one request.

    Changes identify the row by `number`, because request ids may be long, and may be reused.
    `spans` is a list of [kind, first iteration, context tokens]; each span lasts until the next
    begins. `num_pauses` counts the pauses so far. `generated` is the number of tokens generated so
    far, and `reported` the number that was last sent to pages.
    """

    __slots__ = (
        *("arrival", "begin", "end", "generated", "kind", "num_pauses", "number", "reported"),
        "spans",
    )

    def __init__(self, number: int, arrival: Arrival, begin: int) -> None:
        self.number = number
        self.arrival = arrival
        self.begin = begin
        self.kind = HELD if arrival.holds_memory else PAUSED if arrival.pause_count else WAITING
        self.spans: list[list[Any]] = [[self.kind, begin, 0]]
        self.num_pauses = arrival.pause_count
        self.generated = self.reported = arrival.num_generated
        self.end: list[Any] | None = None

    def shown(self) -> list[Any]:
        """Return the row as a list for a page. The id is a string: JavaScript rounds large ints."""
        it = self.arrival
        lengths = it.prompt_len, it.max_new_tokens, self.reported
        head = [self.number, str(it.request_id), *lengths, it.priority, it.beam_width]
        return [*head, self.num_pauses, self.begin, self.spans, self.end]


class LiveRows:
    """The rows of one watch. `feed` must be called with all changes, in order.

    `kinds` has the number of active rows of each kind, and `outcomes` the number of ended requests
    with each outcome.
    """

    def __init__(self) -> None:
        self.beginning: Beginning | None = None
        self.kinds: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.endings: list[Ending] = []  # since the last `take_endings`
        self._num_rows = 0
        self._active: dict[int, LiveRow] = {}
        self._ended: deque[LiveRow] = deque(maxlen=_MAX_ENDED)
        self._running: dict[int, frozenset[int]] = {}  # request ids by micro batch
        self._new: list[LiveRow] = []
        self._changed: list[list[Any]] = []
        self._ends: list[LiveRow] = []

    def feed(self, change: Change) -> None:
        column, event = change
        if isinstance(event, Step):
            self._run(event)
        elif isinstance(event, Arrival):
            self._arrive(event, column)
        elif isinstance(event, Ending):
            self._finish(event, column)
        else:
            self.beginning = event

    def row_number(self, request_id: int) -> int | None:
        """Return the number of a request's row; None if the request is not active."""
        row = self._active.get(request_id)
        return None if row is None else row.number

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests, including paused ones."""
        return self.kinds[WAITING] + self.kinds[PAUSED]

    # For a page ------------------------------------------------------------------------------

    def snapshot(self) -> list[list[Any]]:
        """Return all rows to draw, oldest first."""
        rows = [*self._ended, *self._active.values()]
        return [row.shown() for row in sorted(rows, key=lambda row: row.number)]

    def take_changes(self) -> dict[str, list[Any]]:
        """Return the changes since the last call.

        "n" lists new rows, with all their spans. "c" lists [row number, kind, iteration, tokens]
        for each span that began in an older row, and "e" lists [row number, *end] for each older
        row that ended. Empty lists are omitted. If more than 64 rows both began and ended since the
        last call, only the newest 64 of these rows are included.
        """
        short_lived = [row.number for row in self._new if row.end is not None][:-_MAX_NEW]
        hidden, changes = frozenset(short_lived), dict[str, list[Any]]()
        new = [row for row in self._new if row.number not in hidden]
        excluded = hidden.union(row.number for row in new)
        if new:
            changes["n"] = [row.shown() for row in new]
        changed = [it for it in self._changed if it[0] not in excluded]
        if changed:
            changes["c"] = changed
        ends = [row for row in self._ends if row.number not in excluded]
        if ends:
            changes["e"] = [[row.number, *(row.end or ())] for row in ends]
        self._new, self._changed, self._ends = [], [], []
        return changes

    def take_progress(self, last: Iterable[Ran]) -> list[list[Any]]:
        """Return the active rows that have new generated tokens since the last call.

        An item is [number of new tokens per row, row numbers as `ranges`]. `last` has the last
        iteration of each micro batch.
        """
        grown: dict[int, list[int]] = {}
        for ran in last:
            for step in (*ran.context_rows, *ran.generation_rows):
                row = self._active.get(step.request_id)
                if row is not None and step.samples:
                    length = step.position + step.num_tokens - step.num_drafts + 1
                    row.generated = max(row.generated, length - row.arrival.prompt_len)
        for row in self._active.values():
            if row.generated > row.reported:
                grown.setdefault(row.generated - row.reported, []).append(row.number)
                row.reported = row.generated
        return [[tokens, ranges(numbers)] for tokens, numbers in grown.items()]

    def take_endings(self) -> list[Ending]:
        endings, self.endings = self.endings, []
        return endings

    # From the loop ---------------------------------------------------------------------------

    def _arrive(self, arrival: Arrival, column: int) -> None:
        row = LiveRow(self._num_rows, arrival, column)
        self._num_rows += 1
        self._active[arrival.request_id] = row
        self.kinds[row.kind] += 1
        self._new.append(row)

    def _run(self, step: Step) -> None:
        iteration, batch = step.iteration, step.micro_batch_id
        for request_id in step.paused:
            self._move(request_id, PAUSED, iteration)
        for row in step.context_rows:
            self._move(row.request_id, CONTEXT, iteration, row.num_tokens)
        for request_id in step.generation:
            self._move(request_id, GENERATION, iteration)
        running = frozenset(step.generation).union(map(_request_id, step.context_rows))
        before, self._running[batch] = self._running.get(batch, _NO_IDS), running
        elsewhere = (ids for other, ids in self._running.items() if other != batch)
        for request_id in before.difference(running, step.paused, *elsewhere):
            self._move(request_id, HELD, iteration)

    def _move(self, request_id: int, kind: str, iteration: int, num_tokens: int = 0) -> None:
        row = self._active.get(request_id)
        if row is None or (row.kind == kind != CONTEXT):
            return
        self.kinds[row.kind] -= 1
        self.kinds[kind] += 1
        row.kind = kind
        row.num_pauses += kind == PAUSED
        if row.spans[-1][1] == iteration:  # a span without duration
            row.spans.pop()
        row.spans.append([kind, iteration, num_tokens])
        if len(row.spans) > _MAX_SPANS:
            del row.spans[: _MAX_SPANS // 2]
        self._changed.append([row.number, kind, iteration, num_tokens])

    def _finish(self, ending: Ending, column: int) -> None:
        self.outcomes[ending.outcome] += 1
        self.endings.append(ending)
        if ending.outcome == DuplicateRequestIdError.__name__:
            return  # the row belongs to the other request with this id, which continues
        row = self._active.pop(ending.request_id, None)
        if row is None:  # the request was refused
            return
        self.kinds[row.kind] -= 1
        metrics = dict(zip(REQUEST_METRICS, ending.metrics, strict=False))  # empty with an error
        row.generated = int(metrics.get("generated_tokens", row.generated))
        times = [metrics[name] for name in _TIMES if name in metrics]
        seconds = [None if value != value else round(value, 4) for value in times]
        cached = int(metrics.get("cached_tokens", 0))
        row.end = [column, ending.outcome[:80], row.generated, cached, *seconds]
        self._ended.append(row)
        self._ends.append(row)


def ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as ranges, such as "3-9,12"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
