"""`RequestTimes`: when the events of a request happened, and its deadlines."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple


class TimesState(NamedTuple):
    """The state of a `RequestTimes`."""

    arrival: float
    deadline: float | None
    queue_deadline: float | None
    first_scheduled: float | None
    first_token: float | None
    last_token: float | None


_read = attrgetter(*TimesState._fields)


@dataclass(slots=True)
class RequestTimes:
    """The times of a request, in seconds of the clock of `Intake.now`.

    The request must be finished by `deadline`, and its first computation must have started by
    `queue_deadline`. A deadline is None if the request has no such limit. `first_scheduled`,
    `first_token` and `last_token` are None until the event has happened.
    """

    arrival: float
    deadline: float | None = None
    queue_deadline: float | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def is_limited(self) -> bool:
        """Whether the request has a deadline of either kind."""
        return self.deadline is not None or self.queue_deadline is not None

    def is_overdue(self, now: float) -> bool:
        """Return whether the request has missed a deadline."""
        return (self.deadline is not None and now > self.deadline) or (
            self.queue_deadline is not None
            and self.first_scheduled is None
            and now > self.queue_deadline
        )

    def state(self) -> TimesState:
        return TimesState(*_read(self))
