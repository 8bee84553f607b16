"""`fan_out`: combines several callbacks into one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from gptmanager.lifecycle.callables import check_answer, ordinary

_logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


def fan_out(first: Callable[P, R], *observers: Callable[P, object]) -> Callable[P, R]:
    """Return a callback that calls `first`, then all observers, with the same arguments.

    The callback returns the result of `first`. If `first` raises an exception, the callback raises
    it after the observers have been called. The result of an observer is ignored. The exception of
    an observer is logged, the first time with a traceback, and affects nothing else.

        return_batch_manager_stats_cb=fan_out(JsonLinesSink("stats.jsonl"), LoggingSink())
    """
    for number, callback in enumerate((first, *observers)):
        ordinary(f"callback {number} of fan_out()", callback, may_yield=number == 0)
    failed: set[int] = set()

    def call_all(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return first(*args, **kwargs)
        finally:
            for index, observer in enumerate(observers):
                try:
                    check_answer("it", observer(*args, **kwargs))
                except BaseException as error:  # noqa: B036 - it affects nothing else
                    known = index in failed
                    failed.add(index)
                    _logger.warning(
                        "observer %r raised %r", observer, error, exc_info=None if known else error
                    )

    return call_all
