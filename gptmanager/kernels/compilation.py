"""Compile bodies, the functions that threads run, in several processes.

The first start on a machine needs about a dozen bodies. Numba compiles one body at a time in a
process, even with several threads. So other processes help to fill the cache on disk.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from gptmanager.environment.cores import num_cores
from gptmanager.environment.memory import free_memory_bytes
from gptmanager.kernels.simd.machine_code import Body, compiled, has_folder, is_kept
from gptmanager.lifecycle.clock import monotonic
from gptmanager.lifecycle.log import logger

Progress = Callable[[str, int, int], None]

WORK = "kernels"  # the name under which progress is reported
_MOST_PROCESSES = 4  # more would not help: the longest body takes a third of the total time
_BYTES_OF_PROCESS = 600 << 20
# How long this process waits for a report of the other processes: 10 s, or three times the longest
# compile time of its own bodies so far, whichever is longer.
_PATIENCE_S, _PATIENCE = 10.0, 3
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.readline());"
    "from gptmanager.kernels import compilation; compilation.compile_for_another()"
)
_DONE = "compiled\n"


def compile_all(bodies: Sequence[Body], on_progress: Progress | None = None) -> None:
    """Compile or load `bodies`, given in descending order of compile time.

    `on_progress` is called on this thread with "kernels", the number of bodies compiled, and the
    number of bodies that were not on disk. Other processes compile some of the bodies. This process
    compiles the rest, and the bodies that the other processes do not finish in time.
    """
    missing = [body for body in dict.fromkeys(bodies) if not is_kept(body)]
    tell = on_progress or (lambda *_: None)
    if missing:
        tell(WORK, 0, len(missing))
        _compile(missing, tell)
        tell(WORK, len(missing), len(missing))
    for body in bodies:
        compiled(body)


def _compile(missing: Sequence[Body], tell: Progress) -> None:
    waiting, num_done, patience_s = deque(missing), 0, _PATIENCE_S
    # released once for each body that is compiled, or that fails in another process
    ended = threading.Semaphore(0)
    with _processes(_num_processes(missing) - 1) as processes:
        threads = [
            threading.Thread(target=_feed, args=(process, waiting, ended), daemon=True)
            for process in processes
        ]
        for thread in threads:
            thread.start()
        while num_done < len(missing):
            if (body := _next(waiting)) is not None:
                started = monotonic()
                compiled(body)
                patience_s = max(patience_s, _PATIENCE * (monotonic() - started))
                ended.release()
            is_idle = not waiting
            while num_done < len(missing) and ended.acquire(timeout=patience_s if is_idle else 0):
                num_done += 1
                tell(WORK, num_done, len(missing))
            if is_idle and num_done < len(missing):
                _give_up(processes, patience_s)


def _give_up(processes: Sequence[subprocess.Popen[str]], seconds: float) -> None:
    """End processes that do not answer. This process compiles their bodies."""
    logger.warning(
        "processes that compile kernels have not answered for %.0f s: this process compiles the "
        "rest alone",
        seconds,
    )
    for process in processes:
        process.kill()


def _next(waiting: deque[Body]) -> Body | None:
    """Return the next body, or None if other processes have taken the rest."""
    try:
        return waiting.popleft()
    except IndexError:
        return None


def _num_processes(missing: Sequence[Body]) -> int:
    """Return how many processes compile, this one included.

    Without a cache folder other processes could not hand over their results.
    """
    if not sys.executable or getattr(sys, "frozen", False) or not has_folder(missing[0]):
        return 1
    by_memory = 1 + int(free_memory_bytes() / 2 / _BYTES_OF_PROCESS)
    return min(num_cores(), len(missing), _MOST_PROCESSES, by_memory)


@contextmanager
def _processes(count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes that compile the bodies they receive; they end with the `with` block."""
    found: list[subprocess.Popen[str]] = []
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
    }
    try:
        with suppress(OSError):  # if the system refuses more processes, use fewer
            for _ in range(count):
                command = [sys.executable, "-c", _PROGRAM]
                # this process handles Ctrl-C
                found.append(subprocess.Popen(command, text=True, start_new_session=True, **pipes))
        yield found
    finally:
        for process in found:
            process.kill()
        for process in found:
            process.wait()


def _feed(process: subprocess.Popen[str], waiting: deque[Body], ended: threading.Semaphore) -> None:
    """Send bodies to `process`, one at a time. `compile_all` compiles bodies that fail there."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(OSError, ValueError), process.stdin, process.stdout:
        process.stdin.write(json.dumps(sys.path) + "\n")
        process.stdin.flush()
        is_there = process.stdout.readline() == _DONE
        while is_there and (body := _next(waiting)) is not None:
            try:
                process.stdin.write(f"{body.__module__}:{body.__qualname__}\n")
                process.stdin.flush()
                is_there = process.stdout.readline() == _DONE
            finally:
                ended.release()


def compile_for_another() -> None:
    """Compile the body in each `MODULE:NAME` line of standard input until it ends.

    Print one line at the start and one after each body.
    """
    sys.stdout.write(_DONE)
    sys.stdout.flush()
    for line in sys.stdin:
        module, _, name = line.strip().partition(":")
        compiled(getattr(importlib.import_module(module), name))
        sys.stdout.write(_DONE)
        sys.stdout.flush()
