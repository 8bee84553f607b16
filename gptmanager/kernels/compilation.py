"""Compile bodies, the functions that threads run, in several processes.

The first start on a machine needs about a dozen bodies. Numba compiles one body at a time in a
process, even with several threads. So other processes help to fill the cache on disk. A lock for
each body divides the work among all processes that share the cache.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from gptmanager.environment.machine.cores import num_cores
from gptmanager.environment.machine.memory import free_memory_bytes
from gptmanager.kernels.simd.machine_code import (
    Body,
    compile_if_free,
    compiled,
    has_folder,
    is_kept,
)

Progress = Callable[[str, int, int], None]

WORK = "kernels"  # the name under which progress is reported
_MOST_PROCESSES = 4  # more would not help: the longest body takes a third of the total time
_BYTES_OF_PROCESS = 600 << 20
_PROGRAM = (
    "import json, sys; sys.path[:], names = json.loads(sys.argv[1]);"
    "from gptmanager.kernels import compilation; compilation.compile_for_another(names)"
)


def compile_all(bodies: Sequence[Body], on_progress: Progress | None = None) -> None:
    """Compile or load `bodies`, given in descending order of compile time.

    `on_progress` is called on this thread with "kernels", the number of bodies compiled, and the
    number of bodies that were not on disk. Other processes compile some of the bodies: those that
    this call starts, and any others that share the cache. This process compiles the rest, and the
    bodies that the other processes do not finish in time.
    """
    missing = [body for body in dict.fromkeys(bodies) if not is_kept(body)]
    tell = on_progress or (lambda *_: None)
    if missing:
        tell(WORK, 0, len(missing))
        with _processes(_num_processes(missing) - 1, missing):
            for num_done, _ in enumerate(_compiled(missing), 1):
                tell(WORK, num_done, len(missing))
    for body in bodies:
        compiled(body)


def _compiled(missing: Sequence[Body]) -> Iterator[Body]:
    """Yield each body when it is compiled; last, those that other processes were compiling."""
    busy = []
    for body in missing:
        if compile_if_free(body) is None:
            busy.append(body)
        else:
            yield body
    for body in busy:
        compiled(body)
        yield body


def _num_processes(missing: Sequence[Body]) -> int:
    """Return how many processes compile, this one included.

    Without a cache folder other processes could not hand over their results.
    """
    if not sys.executable or getattr(sys, "frozen", False) or not has_folder(missing[0]):
        return 1
    by_memory = 1 + int(free_memory_bytes() / 2 / _BYTES_OF_PROCESS)
    return min(num_cores(), len(missing), _MOST_PROCESSES, by_memory)


@contextmanager
def _processes(count: int, missing: Sequence[Body]) -> Iterator[None]:
    """Start processes that compile bodies, and end them with the `with` block.

    Each begins at a body of its own, so that they share the work even without locks.
    """
    found: list[subprocess.Popen[bytes]] = []
    names = [f"{body.__module__}:{body.__qualname__}" for body in missing]
    null = subprocess.DEVNULL
    pipes: dict[str, Any] = {"stdin": null, "stdout": null, "stderr": null}
    try:
        with suppress(OSError):  # if the system refuses more processes, use fewer
            for first in range(1, count + 1):
                work = json.dumps([sys.path, names[first:]])
                command = [sys.executable, "-c", _PROGRAM, work]
                # this process handles Ctrl-C
                found.append(subprocess.Popen(command, start_new_session=True, **pipes))
        yield
    finally:
        for process in found:
            process.kill()
        for process in found:
            process.wait()


def compile_for_another(names: Sequence[str]) -> None:
    """Compile the bodies `MODULE:NAME` that no other process compiles."""
    for name in names:
        module, _, function = name.partition(":")
        compile_if_free(getattr(importlib.import_module(module), function))
