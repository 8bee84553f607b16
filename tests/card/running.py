"""Runs steps within the time of their phase: each in a process of its own, with a log and a record.

A step is done when it has ended by itself, or ran to its own limit; done steps are not run again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from card_steps import Step
from exclusive import Running

PHASE_S = 540.0  # a phase, unless it is given another time
PROBE_S = 60.0  # at its begin
# of `timeout`, where its first signal sufficed and where the second one ended itself, too
TIMED_OUT = (124, 137, -signal.SIGKILL)
_KILL_S = 5.0  # from the first signal to the second
_STUCK_S = 10.0  # after both: a process that waits inside the driver may outlive them
_ARCHIVE_S = 10.0  # kept for the summary and the archive
RESERVED_S = _KILL_S + _STUCK_S + _ARCHIVE_S  # no step runs in the last seconds of a phase
# notes of steps that the next run begins, or goes on with
NO_TIME, ENDED = "no time left", "the phase was ended"
CUT_OFF = "cut off by the end of the phase"
CANNOT_RUN = "its log cannot be written"


@dataclass(frozen=True)
class Record:
    """How a step went. `status` None: it did not run, and `note` says why. `code`: a fingerprint
    of the source that it ran.
    """

    name: str
    status: int | None = None
    seconds: float = 0.0
    note: str = ""
    is_done: bool = False
    code: str = ""

    @property
    def is_right(self) -> bool:
        return self.status == 0

    @property
    def is_left(self) -> bool:
        """Whether the step is left for the next run because the time was up."""
        return self.note in (NO_TIME, ENDED, CUT_OFF)


class Phase:
    """The steps of one phase. `environment`: of each command, on top of the step's own.

    `on_record`: gets all records after each step. `clock`: seconds. `running`: the file in which
    `Running` keeps what runs.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        folder: Path,
        *,
        seconds: float,
        environment: Mapping[str, str],
        root: Path,
        code: str = "",
        num_lanes: int = 4,
        say: Callable[[str], None] = print,
        on_record: Callable[[Sequence[Record]], None] = lambda records: None,
        clock: Callable[[], float] = time.monotonic,
        running: Path | None = None,
    ) -> None:
        self._steps = steps
        self._folder = folder
        self._environment = dict(environment)
        self._root = root
        self._code = code
        self._num_lanes = num_lanes
        self._say = say
        self._on_record = on_record
        self._clock = clock
        self._end = clock() + seconds - RESERVED_S
        self._started = clock()
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._known = Running(running)
        self._is_ending = False
        self.records: dict[str, Record] = {}

    def run(self, no_gpu: str = "") -> list[Record]:
        """Run what is not done. `no_gpu`: why no step can run, which is then noted for each."""
        for step in self._steps:
            kept = read_record(self._folder, step.name)
            if kept is not None and kept.is_done:
                self.records[step.name] = kept
        for lane, steps in itertools.groupby(self._steps, key=lambda step: step.lane):
            todo = [step for step in steps if step.name not in self.records]
            if no_gpu:
                for step in todo:
                    self._note(step, no_gpu)
            elif lane:
                with ThreadPoolExecutor(self._num_lanes) as threads:
                    list(threads.map(self._run, todo))
            else:
                for step in todo:
                    self._run(step)
        return [self.records[step.name] for step in self._steps]

    def end(self) -> None:
        """End what runs, from a signal handler: steps that it cuts off are not done."""
        self._is_ending = True
        for process in list(self._running.values()):
            _kill(process, signal.SIGTERM)

    def _run(self, step: Step) -> None:
        left = self._end - self._clock()
        if self._is_ending:
            self._note(step, ENDED)
        elif step.tool and shutil.which(step.tool) is None:
            self._note(step, f"{step.tool} is not installed")
        elif left < step.least_s:
            self._note(step, NO_TIME)
        else:
            try:
                self._start(step, min(step.limit_s, left))
            except OSError as error:  # as on a full disk: the next run begins the step anew
                self._note(step, f"{CANNOT_RUN}: {error.strerror or error}")

    def _start(self, step: Step, limit_s: float) -> None:
        settings = " ".join(f"{name}={value}" for name, value in step.environment.items())
        self._tell(f"{step.name}: {settings} {shlex.join(step.command)}".replace("  ", " "))
        command = ["timeout", f"--kill-after={_KILL_S:g}", f"{math.ceil(limit_s)}", *step.command]
        started = self._clock()
        with open(self._folder / f"{step.name}.log", "wb") as log:
            log.write(f"$ {settings} {shlex.join(command)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command,
                cwd=self._root,
                env={**os.environ, **self._environment, **step.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running[process.pid] = process
            try:
                self._known.add(process.pid)
                status = process.wait(limit_s + _KILL_S + _STUCK_S)
            except subprocess.TimeoutExpired:  # it cannot even be killed: the others go on
                status = -signal.SIGKILL
            finally:
                del self._running[process.pid]
                _kill(process, signal.SIGKILL)  # whatever it has left behind
                self._known.remove(process.pid)
        seconds = self._clock() - started
        is_late = status in TIMED_OUT and seconds > limit_s - 1
        was_cut = is_late and limit_s < step.limit_s
        note = "ran to its limit" if is_late else ""
        record = Record(
            step.name,
            status,
            round(seconds, 1),
            CUT_OFF if was_cut or self._is_ending else note,
            is_done=not was_cut and not self._is_ending,
            code=self._code,
        )
        self._keep(record)
        self._tell(f"{step.name}: {describe(record)}")

    def _note(self, step: Step, why: str) -> None:
        self._keep(Record(step.name, note=why))

    def _keep(self, record: Record) -> None:
        with self._lock:
            self.records[record.name] = record
            if record.status is not None:
                file = self._folder / f"{record.name}.record"
                file.write_text(json.dumps(asdict(record)), "utf-8")
                self._on_record([self.records[step.name] for step in self._steps
                                 if step.name in self.records])  # fmt: skip

    def _tell(self, line: str) -> None:
        self._say(f"{self._clock() - self._started:5.0f} s  {line}")


def status_of(records: Sequence[Record]) -> int:
    """Return the exit status of a phase that had a GPU."""
    if all(record.is_right or record.is_left for record in records):
        return 3 if any(record.is_left for record in records) else 0
    return 1


def describe(record: Record) -> str:
    if record.status is None:
        return f"not run: {record.note}"
    told = "ok" if record.is_right else f"status {record.status}"
    return f"{told}, {record.seconds:.0f} s" + (f", {record.note}" if record.note else "")


def read_record(folder: Path, name: str) -> Record | None:
    try:
        return Record(**json.loads((folder / f"{name}.record").read_text("utf-8")))
    except (OSError, ValueError, TypeError):  # none, or one that a killed run has left half
        return None


def _kill(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
