"""`LoggingSink`: logs statistics as one readable line at intervals."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from gptmanager.arguments import able, at_least, function, number

_DEFAULT_LOGGER = logging.getLogger("gptmanager.statistics")


class LoggingSink:
    """A ReturnBatchManagerStats callback that logs at most one summary in `every_s` seconds.

    The first record is logged at once. Records between two summaries are not parsed. A call never
    raises: a record that cannot be read is logged unchanged.
    """

    def __init__(
        self,
        logger: logging.Logger = _DEFAULT_LOGGER,
        level: int = logging.INFO,
        every_s: float = 10.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = able("logger", logger, "isEnabledFor", "logger")
        self._level = at_least(0, "level", level)
        self._every_s = number(0, "every_s", every_s)
        self._clock = function("clock", clock)
        self._lock = threading.Lock()
        # The time and the iteration of the last summary. The iteration is 0 if it is unknown.
        self._last: tuple[float, int] | None = None

    def __call__(self, record: str) -> None:
        now = self._clock()
        with self._lock:
            if self._last is not None and now - self._last[0] < self._every_s:
                return
            last, self._last = self._last, (now, 0)
        if not self._logger.isEnabledFor(self._level):
            return
        try:
            statistics = json.loads(record)
            line = summary(statistics)
            iteration = int(statistics["Iteration Counter"])
            if last is not None and iteration > last[1] > 0 and now > last[0]:
                line += f"; {(iteration - last[1]) / (now - last[0]):.1f} iterations/s"
        except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
            self._logger.log(self._level, "unreadable statistics: %s", record)
            return
        self._last = (now, iteration)
        self._logger.log(self._level, "%s", line)


def summary(statistics: Mapping[str, Any]) -> str:
    """Return the statistics of a record as one line, without the optional keys that are missing."""
    parts = [f"iteration {statistics['Iteration Counter']}", _requests(statistics)]
    if "Used KV cache blocks" in statistics:
        used, total = statistics["Used KV cache blocks"], statistics["Max KV cache blocks"]
        parts.append(f"KV cache {used}/{total} blocks ({100 * used / max(total, 1):.0f} %)")
    return ": ".join(parts[:2]) + "".join(f"; {part}" for part in parts[2:])


def _requests(statistics: Mapping[str, Any]) -> str:
    active = statistics["Active Request Count"]
    limit = statistics["Max Request Count"]
    scheduled = [
        f"{statistics[key]} {word}"
        for key, word in (
            ("Context Requests", "in context"),
            ("Generation Requests", "in generation"),
            ("Total Context Tokens", "context tokens"),
            ("Total Generation Tokens", "generation tokens"),
            ("Empty Generation Slots", "empty slots"),
        )
        if key in statistics
    ]
    parts = [f"{active}/{limit} active", f"{statistics['Scheduled Requests']} scheduled"]
    parts[1] += f" ({', '.join(scheduled)})"
    for key, word in (("Waiting Requests", "waiting"), ("Paused Requests", "paused")):
        if key in statistics:
            parts.append(f"{statistics[key]} {word}")
    return ", ".join(parts)
