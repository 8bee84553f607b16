"""Faults of a journal, planted into a life of `marathon_kill.py`: each must be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gptmanager.host.callback_host import CallbackHost
from gptmanager.journal import segments
from gptmanager.journal.journaled_host import JournaledHost
from gptmanager.journal.records import RecordReader
from gptmanager.loop.active_request import ActiveRequest


def write_late() -> None:
    """The journal writes after it sends."""
    flush = JournaledHost.flush

    def late(self: Any) -> None:
        respond = self._respond
        for response in self.held:
            respond(*response)
        self._respond = lambda *response: None
        try:
            flush(self)
        finally:
            self._respond = respond

    JournaledHost.flush = late  # type: ignore[method-assign]


def lose_last() -> None:
    """The last record of a journal is not read."""

    class Short(RecordReader):
        def __iter__(self) -> Iterator[Any]:
            found = [*super().__iter__()]
            return iter(found[:-1] if len(found) > 1 else found)

    segments.RecordReader = Short  # type: ignore[misc]


def resume_late() -> None:
    """A request continues one token later than it should."""
    resume = ActiveRequest.resume

    def late(self: Any, progress: Any, now: float) -> None:
        resume(self, progress._replace(num_sent=progress.num_sent + bool(progress.tokens)), now)

    ActiveRequest.resume = late  # type: ignore[method-assign]


def resume_with_a_gap() -> None:
    """A request continues without the last token that it had."""
    resume = ActiveRequest.resume

    def gap(self: Any, progress: Any, now: float) -> None:
        resume(self, progress._replace(tokens=progress.tokens[1:]), now)

    ActiveRequest.resume = gap  # type: ignore[method-assign]


def repeat_finals() -> None:
    """Each request that continues gets its final response twice."""
    respond = CallbackHost.respond

    def twice(self: Any, request_id: int, tensors: Any, is_final: bool, error: str) -> None:
        if is_final:
            self._send(request_id, tensors, is_final, error)
        respond(self, request_id, tensors, is_final, error)

    CallbackHost.respond = twice  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "write_late": write_late,
    "lose_last": lose_last,
    "resume_late": resume_late,
    "resume_with_a_gap": resume_with_a_gap,
    "repeat_finals": repeat_finals,
}
