"""The program of a `ChildProcess`, which answers questions. Each question is a line of JSON.

The program starts fast, because it is run by its path, and imports one module without running the
`__init__` of the packages that contain the module. The module has a function `answerer(**given)`,
which returns the function that answers a question.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def _import_alone(name: str, roots: Sequence[str]) -> Any:
    """Import a module without running the `__init__` of its packages."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        package = types.ModuleType(".".join(parts[:count]))
        package.__path__ = ["/".join([root, *parts[1:count]]) for root in roots]
        sys.modules[package.__name__] = package
    return importlib.import_module(name)


def _bound_memory(max_bytes: int) -> None:
    """Limit the memory that the process may allocate from now on."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
    except (ImportError, OSError):  # not Linux: memory is not limited
        return
    most = pages * resource.getpagesize() + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _memory_returner() -> Callable[[], object]:
    """Return a function that returns freed memory to the system.

    glibc keeps free pages between allocations that are still in use. Without this function, the
    process would grow with the number of questions.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library
        return lambda: None
    return lambda: trim(0)


def _say(answer: Mapping[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _serve() -> None:
    start = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = start["path"]
    answer = _import_alone(start["module"], start["roots"]).answerer(**start["given"])
    _bound_memory(start["max_bytes"])
    _say({"answer": None})
    return_memory = _memory_returner()
    for line in sys.stdin.buffer:
        try:
            found = {"answer": answer(json.loads(line))}
        except BaseException as error:  # noqa: B036 - a panic of a Rust library, too
            found = {"error": str(error) or type(error).__name__}
        _say(found)
        del found
        return_memory()


if __name__ == "__main__":
    _serve()
