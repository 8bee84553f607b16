"""The library's logger. It raises nothing but interrupts, so the code that logs always continues.

Every record calls handlers, filters and `time.time`. These may be code of the host, and may fail.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

_RARELY_S = 10.0


class SteadyLogger:
    """Wraps a `logging.Logger` and ignores its failures. Log records have the caller's line."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, text: str, *values: Any) -> None:
        self._log(logging.DEBUG, text, values)

    def info(self, text: str, *values: Any) -> None:
        self._log(logging.INFO, text, values)

    def warning(self, text: str, *values: Any, exc_info: Any = None) -> None:
        self._log(logging.WARNING, text, values, exc_info)

    def error(self, text: str, *values: Any, exc_info: Any = None) -> None:
        self._log(logging.ERROR, text, values, exc_info)

    def exception(self, text: str, *values: Any) -> None:
        self._log(logging.ERROR, text, values, True)

    def _log(self, level: int, text: str, values: tuple[Any, ...], exc_info: Any = None) -> None:
        try:
            self._logger.log(level, text, *values, exc_info=exc_info, stacklevel=3)
        except Exception:
            pass
        except BaseException:
            # on the main thread it may come from a signal handler, for example that of Ctrl-C
            if threading.current_thread() is threading.main_thread():
                raise


class RareWarnings:
    """Logs at most one warning in ten seconds, for events that clients may cause at will.

    A logged warning ends with the number of warnings that were dropped since the logged warning
    before it, if any were dropped.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._next = 0.0
        self._num_unlogged = 0

    def warning(self, text: str, *values: Any) -> None:
        now = self._clock()
        if now < self._next:
            self._num_unlogged += 1
            return
        more = (
            f", and {self._num_unlogged} others since the last line" if self._num_unlogged else ""
        )
        self._logger.warning(f"{text}%s", *values, more)
        self._next, self._num_unlogged = now + _RARELY_S, 0


logger = SteadyLogger(logging.getLogger("gptmanager"))
