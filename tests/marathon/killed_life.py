"""One life of a manager with a journal: a forked process, until it is killed or all has ended.

Some lives kill themselves, at a point that a timer would hardly hit: a line of the journal's code,
a write that is cut short, or the end of a SendResponse call.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kill_record import Record, line_of, outputs_of, returned
from kill_requests import Life, Requests, start

import gptmanager.journal.journal as journal_module
from gptmanager import Delivered
from gptmanager.journal import opening, segments

PACE_S = 0.001  # of SendResponse, so that timers hit all states
_JOURNAL = str(Path(journal_module.__file__).parent)


class Point(NamedTuple):
    """Where a life ends: `kind` is "line", "torn" or "send", each at the `number`-th; or "none"."""

    kind: str = "none"
    number: int = 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Host:
    """Keeps a record of all that it gets. Without `restores` it returns no request twice."""

    def __init__(self, requests: Requests, record: Record, *, restores: bool, dies_at: int) -> None:
        requests.compile()
        self._requests, self._record, self._dies_at = requests, record, dies_at
        self._had = outputs_of(record.lines)
        self._first = set(returned(record.lines))
        ended = {number for number, it in self._had.items() if it.last is not None}
        without = ended if restores else self._first
        self._waiting = [number for number in range(requests.count) if number not in without]
        self._has_adapter = False
        self._num_sent = 0

    def get(self, room: int) -> list[Any]:
        taken, self._waiting = self._waiting[:room], self._waiting[room:]
        if not taken:
            return []
        self._record.add(got=taken)
        made = [self._requests.make(it, has_adapter=self._has_adapter) for it in taken]
        self._has_adapter = self._has_adapter or any(
            self._requests.kind(it) == "adapter" for it in taken
        )
        return made

    def send(self, request_id: int, tensors: Any, is_final: bool, error: str) -> None:
        self._record.add(**line_of(request_id, tensors, is_final, error))
        if is_final and not error.startswith("DuplicateRequestIdError"):
            self._waiting = [it for it in self._waiting if it != request_id]  # it was resumed
        self._num_sent += 1
        if self._num_sent == self._dies_at:
            die()
        time.sleep(PACE_S)

    def restore(self, request_id: int) -> Delivered | None:
        if request_id not in self._had:
            return Delivered(0) if request_id in self._first else None
        output = self._had[request_id]
        streams = self._requests.streams(request_id)
        return Delivered(output.num_tokens if streams else 0, output.last is not None)


def die_at_line(number: int) -> None:
    """Have the loop's thread die when it has run `number` lines of the journal's code."""
    left = number

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if not left:
            die()
        return count

    def begin(frame: Any, event: str, argument: Any) -> Any:
        return count if frame.f_code.co_filename.startswith(_JOURNAL) else None

    threading.settrace(begin)


def die_in_write(number: int) -> None:
    """Have the `number`-th write of the journal stop in its middle."""
    left, whole = number, segments.write_all

    def write(file: int, data: bytes) -> None:
        nonlocal left
        left -= 1
        if not left:
            whole(file, data[: len(data) // 2])
            die()
        whole(file, data)

    segments.write_all = journal_module.write_all = write


def live(
    place: Path,
    requests: Requests,
    life: Life,
    point: Point,
    *,
    restores: bool,
    fault: Callable[[], None] = lambda: None,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Run a manager in this process, until nothing is left. `on_start` is called when it runs."""
    record = Record(place / "record")
    fault()
    opening.Journal = functools.partial(opening.Journal, segment_bytes=life.segment_bytes)
    if point.kind == "line":
        die_at_line(point.number)
    elif point.kind == "torn":
        die_in_write(point.number)
    dies_at = point.number if point.kind == "send" else 0
    host = Host(requests, record, restores=restores, dies_at=dies_at)
    manager = start(host, life, journal=place / "journal", restores=restores)
    on_start()
    manager.wait_idle()
    manager.shutdown()


def fork(work: Callable[[Callable[[], None]], None], log: Path) -> tuple[int, int]:
    """Run `work(on_start)` in a new process; its output is added to `log`.

    Returns the process, and a file that can be read once `on_start` is called. The calling process
    must have one thread.
    """
    reads, writes = os.pipe()
    process = os.fork()
    if process:
        os.close(writes)
        return process, reads
    status = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        work(lambda: os.close(writes))
        status = 0
    except BaseException:  # noqa: B036 - this process must not continue as its parent
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)
