"""The system's clocks, even if a host replaces functions of the module `time`.

A host may replace `time.monotonic`, for example to freeze it. This module uses a private instance
of the built-in module, so deadlines, waits and statistics stay right.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import BuiltinImporter
from importlib.util import module_from_spec
from typing import Any


def _private_time() -> Any:
    spec = BuiltinImporter.find_spec("time")
    if spec is None or spec.loader is None:
        raise ImportError("this Python has no built-in module time")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_time = _private_time()

monotonic: Callable[[], float] = _time.monotonic
perf_counter: Callable[[], float] = _time.perf_counter
perf_counter_ns: Callable[[], int] = _time.perf_counter_ns
thread_time_ns: Callable[[], int] = _time.thread_time_ns
system_time: Callable[[], float] = _time.time  # seconds since the epoch


def local_time(format: str, second: int) -> str:
    """Return `second`, counted from the epoch, as local time in a format of `time.strftime`."""
    return str(_time.strftime(format, _time.localtime(second)))


class Patience:
    """A limit of seconds for a wait that calls `is_over` again and again, from its start on.

    Between two calls at most a quarter of the limit counts. If the process did not run, as on a
    machine that was suspended, what it waits for may not have run either.
    """

    __slots__ = ("_checked", "_left_s", "_most_s")

    def __init__(self, limit_s: float) -> None:
        self._left_s, self._most_s, self._checked = limit_s, limit_s / 4, monotonic()

    def is_over(self) -> bool:
        """Return whether the wait has taken longer than the limit."""
        now = monotonic()
        self._left_s -= min(now - self._checked, self._most_s)
        self._checked = now
        return self._left_s < 0
