"""`LiveTap`: records changes of the schedule on the loop's thread, with as little work as possible.

Most iterations run the same requests as the previous iteration of their micro batch. Of such
iterations, the tap keeps only the latest, so that nothing accumulates for other threads to process.
All other changes are added to a bounded deque.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from operator import itemgetter
from typing import NamedTuple

from gptmanager import GptManager
from gptmanager.errors import ManagerDeadError
from gptmanager.manager.watching import Arrival, Beginning, Ending, Event, Ran
from gptmanager.statistics import Counts
from gptmanager.step import Row

_MAX_EVENTS = 1 << 14  # changes are lost if more arrive between two calls of `take`
_ANSWER_S = 0.5  # the longest wait for the end of an iteration, in seconds
_request_id = itemgetter(0)  # gets the id from a `Row`


class Step(NamedTuple):
    """An iteration that differs from the previous iteration of its micro batch.

    `generation` has the ids of the requests in the generation phase, and `paused` the ids of the
    requests that were paused.
    """

    iteration: int
    micro_batch_id: int
    context_rows: tuple[Row, ...]
    generation: tuple[int, ...]
    paused: tuple[int, ...]


Change = tuple[int, Beginning | Arrival | Step | Ending]  # (number of the next iteration, event)


class LiveTap:
    """One watch of a manager, which begins with `open`.

    `column` is the number of the next iteration. `latest` has the counts of the last iteration that
    has ended, and `ran` the last iteration of each micro batch. `context_tokens` and
    `generated_tokens` count the tokens since the watch began.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.column = 0
        self.context_tokens = 0
        self.generated_tokens = 0
        self.latest: Counts | None = None
        self.ran: dict[int, Ran] = {}
        self._accepted_drafts = 0
        self._changes: deque[Change] = deque(maxlen=_MAX_EVENTS)
        # by micro batch; None if the last iteration had context rows or paused requests
        self._generation: dict[int, tuple[int, ...] | None] = {}

    def open(self, manager: GptManager) -> bool:
        """Begin to watch; return False if the loop is too busy to answer, or has ended."""
        with suppress(TimeoutError, ManagerDeadError):
            manager.watch(self.see, _ANSWER_S)
            self.is_open = True
        return self.is_open

    def close(self, manager: GptManager) -> None:
        """End the watch, also one that `open` has begun too late. The tap is not used again."""
        with suppress(TimeoutError):
            manager.unwatch(self.see, _ANSWER_S)

    def see(self, event: Event) -> None:
        """Record an event. Called on the loop's thread."""
        if isinstance(event, Ran):
            self._see_iteration(event)
        elif isinstance(event, Counts):
            self._count(event)
        else:
            if isinstance(event, Beginning):
                self.column = event.iteration
            self._changes.append((self.column, event))

    def take(self) -> list[Change] | None:
        """Return the changes since the last call. After too many changes, always return None."""
        changes = self._changes
        if len(changes) == changes.maxlen:
            return None
        return [changes.popleft() for _ in range(len(changes))]

    def _see_iteration(self, ran: Ran) -> None:
        batch, contexts, paused = ran.micro_batch_id, ran.context_rows, ran.paused
        self.ran[batch] = ran
        self.column = ran.iteration + 1
        generation = tuple(map(_request_id, ran.generation_rows))
        if contexts or paused:
            self._generation[batch] = None
        elif generation == self._generation.get(batch):
            return
        else:
            self._generation[batch] = generation
        step = Step(ran.iteration, batch, contexts, generation, paused)
        self._changes.append((self.column, step))

    def _count(self, counts: Counts) -> None:
        if self.latest is None:
            self._accepted_drafts = counts.drafts.accepted
        accepted, self.latest = counts.drafts.accepted, counts
        self.context_tokens += counts.context_tokens
        self.generated_tokens += counts.sampled + accepted - self._accepted_drafts
        self._accepted_drafts = accepted
