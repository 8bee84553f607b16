"""Keeps a second call, and steps of a call that was killed, from running beside this one.

They would use the GPU while its steps are timed, and write to the same logs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

_LEAST_BYTES = 1 << 20  # a phase writes more, and does not begin if this does not fit


class Taken(Exception):
    """Another call of a phase runs."""


class NotWritable(Exception):
    """Files cannot be written in a folder of the call."""


def not_writable(folder: Path, error: OSError) -> NotWritable:
    return NotWritable(f"{folder} cannot be written: {error.strerror or error}")


def check_writable(folder: Path) -> None:
    """Raise NotWritable unless a file can be written in `folder`, before a GPU's time is spent."""
    trial = folder / f".trial.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            trial.write_bytes(bytes(_LEAST_BYTES))
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        raise not_writable(folder, error) from error


@contextlib.contextmanager
def only_call(folder: Path) -> Iterator[None]:
    """Hold the folder of all phases. The system frees it if this process is killed.

    Raise Taken if another call holds it, and NotWritable if it cannot be held.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise not_writable(folder, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(file, 20, 0).decode()
        os.close(file)
        raise Taken(
            f"process {pid} runs a phase in {folder}: wait for it, or end it (kill {pid})"
        ) from None
    except OSError:
        pass  # a file system without locks
    try:
        os.ftruncate(file, 0)
        with contextlib.suppress(OSError):  # the disk may be full
            os.pwrite(file, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(file)


class Running:
    """The process groups that run steps now, in a file that outlives this process."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._begins: dict[str, str] = {}  # by process id
        self._lock = threading.Lock()

    def add(self, pid: int) -> None:
        with self._lock:
            self._begins[str(pid)] = _begin(pid)
            self._write()

    def remove(self, pid: int) -> None:
        with self._lock:
            self._begins.pop(str(pid), None)
            self._write()

    def end_left(self) -> list[int]:
        """End the groups that a killed call has left, and return their process ids."""
        if self._file is None:
            return []
        try:
            left = json.loads(self._file.read_text("utf-8"))
        except (OSError, ValueError):
            return []
        ended = []
        for pid, begin in left.items():
            if begin == _begin(int(pid)) != "":  # not another process with its number
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(int(pid), signal.SIGKILL)
                    ended.append(int(pid))
        return ended

    def _write(self) -> None:
        if self._file is not None:
            self._file.write_text(json.dumps(self._begins), "utf-8")


def _begin(pid: int) -> str:
    """Return when a process began, in the system's ticks; "" if there is none."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19]
        )
    except (OSError, IndexError):
        return ""
