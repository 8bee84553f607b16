"""`ChildProcess`: runs a module in a separate process, with limited time and memory.

Code that takes too much time or memory, or crashes, affects only that process. Every wait has a
time limit, even if the process is stopped, reads nothing, or cannot be started.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from gptmanager.lifecycle import child_loop
from gptmanager.lifecycle.clock import monotonic

_START_S = 30.0  # time limit for the interpreter to start and import the module
_LOOK_S = 0.1  # longest interval between calls of `is_wanted`
_MOST_KEPT_BYTES = 8 << 20  # growth since its start that a process may keep after an answer
_PACKAGE = __name__.split(".")[0]  # its `__path__` has two folders in a checkout


class NoAnswerError(Exception):
    """The process did not answer. The text is a reason such as "it takes more than 3 s"."""


class TooSlowError(NoAnswerError):
    """The answer takes too long."""


class NotStartedError(NoAnswerError):
    """No process can be started. The question is not the cause. The text is a full sentence."""


class RefusedError(Exception):
    """The module raised an error. The text is the text of this error."""


class ChildProcess:
    """Sends questions to a function in a child process. Use it from one thread.

    The process calls `answerer(**given)` of `module` once, and passes each question to the function
    that this call returns. The first question starts the process, and so does a question after the
    process has ended. On Linux, the process may allocate `max_bytes` of memory after its start. If
    it still holds more than 8 MiB of this memory after an answer, it is ended, so that no question
    affects later questions.
    """

    def __init__(self, module: str, given: Mapping[str, Any], max_bytes: int) -> None:
        self._start_line = json.dumps(  # orjson refuses paths that are not UTF-8
            {
                "path": sys.path,
                "roots": list(sys.modules[_PACKAGE].__path__),
                "module": module,
                "given": given,
                "max_bytes": max_bytes,
            }
        ).encode()
        self._max_bytes = max_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._first_size = 0  # resident bytes after its start
        self._end: weakref.finalize[..., ChildProcess] | None = None

    def ask(
        self, question: bytes, max_seconds: float, is_wanted: Callable[[], bool] = lambda: True
    ) -> Any:
        """Return the answer. `question` is one line of JSON without the newline.

        If the process must be started first, the start may take 30 s more. While the answer is
        awaited, `is_wanted` is called at least ten times a second. Raise RefusedError if the module
        raised an error, which may be a MemoryError. All other errors end the process:
        NotStartedError if no process can be started, TooSlowError after `max_seconds`, and
        NoAnswerError if the process has ended, for example for lack of memory, or if `is_wanted`
        returns False.
        """
        try:
            answer = self._exchange(self._running(), question, max_seconds, is_wanted)
        except BaseException:
            self.stop()
            raise
        if self._process is not None:
            if _resident_bytes(self._process.pid) - self._first_size > _MOST_KEPT_BYTES:
                self.stop()
        if "error" in answer:
            raise RefusedError(answer["error"])
        return answer["answer"]

    def stop(self) -> None:
        """End the process. The next question starts a new one."""
        self._process = None
        if self._end is not None:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.stop()
        command = [sys.executable or "python", "-I", "-S", str(Path(child_loop.__file__))]
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # Ctrl-C on a terminal does not reach the child
            )
        except (OSError, MemoryError) as error:
            raise NotStartedError(f"no process can be started: {error}") from None
        self._process = process
        self._end = weakref.finalize(self, _end, process)
        try:
            self._exchange(process, self._start_line, _START_S, lambda: True)
        except NoAnswerError as error:
            raise NotStartedError(f"no process can be started: {_why(process, error)}") from None
        self._first_size = _resident_bytes(process.pid)
        return process

    def _exchange(
        self,
        process: subprocess.Popen[bytes],
        line: bytes,
        max_seconds: float,
        is_wanted: Callable[[], bool],
    ) -> dict[str, Any]:
        """Write one line and return the object of the line that is read, within `max_seconds`."""
        assert process.stdin is not None and process.stdout is not None
        give_up = monotonic() + max_seconds
        writing, reading, found = process.stdin.fileno(), process.stdout.fileno(), [b""]
        os.set_blocking(writing, False)
        left, ready = memoryview(line + b"\n"), select.poll()
        ready.register(reading, select.POLLIN)
        ready.register(writing, select.POLLOUT)
        while not found[-1].endswith(b"\n"):
            seconds = give_up - monotonic()
            if seconds <= 0:
                raise TooSlowError(f"it takes more than {max_seconds:g} s")
            if not is_wanted():
                raise NoAnswerError("it is not wanted any more")
            files = [file for file, _ in ready.poll(min(seconds, _LOOK_S) * 1000)]
            if writing in files:
                left = left[_write(writing, left) :]
                if not left:
                    ready.unregister(writing)
            if reading in files:
                found.append(os.read(reading, 1 << 20))
                if not found[-1]:
                    most = f"{self._max_bytes} bytes of memory"
                    raise NoAnswerError(f"it takes more than {most}, or its process was killed")
        answer: dict[str, Any] = orjson.loads(b"".join(found))
        return answer


def _why(process: subprocess.Popen[bytes], error: NoAnswerError) -> str:
    """Return why a process has not started. It cannot answer if its imports fail."""
    if isinstance(error, TooSlowError) or process.wait() <= 0:  # a signal has ended it
        return str(error)
    return (
        f"it ended with status {process.returncode} before its first answer; if the library was "
        "replaced while this program runs, start this program again"
    )


def _write(file: int, data: memoryview) -> int:
    """Write some of `data`; return the number of bytes written.

    If the pipe is closed, return the length of `data`: the read that follows reports the end of the
    process.
    """
    try:
        return os.write(file, data)
    except BlockingIOError:
        return 0
    except OSError:
        return len(data)


def _resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process; 0 if the system does not report them."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
