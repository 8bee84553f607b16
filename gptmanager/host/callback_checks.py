"""Checks of callbacks and of their return values, and `HostTimers`, which times the calls."""

from __future__ import annotations

import operator
import reprlib
from typing import Any

from gptmanager.errors import CallbackError, ConfigError
from gptmanager.lifecycle.callables import check_answer, ordinary
from gptmanager.lifecycle.watchdog import CallbackTimer

# The types that most callbacks return, which need no check.
PLAIN = frozenset({list, tuple, set, frozenset})


class HostTimers:
    """The timers of all calls into the host's code.

    `all`: in the order of the statistics, with the loop's scheduler last.
    """

    def __init__(self) -> None:
        self.get = CallbackTimer("GetInferenceRequests")
        self.send = CallbackTimer("SendResponse")
        self.poll = CallbackTimer("PollStopSignal")
        self.stats = CallbackTimer("ReturnBatchManagerStats")
        self.processor = CallbackTimer("LogitsPostProcessor")
        self.prepare = CallbackTimer("LogitsPostProcessor.prepare")
        self.all = [self.get, self.send, self.poll, self.stats, self.processor, self.prepare]


def required(callback: Any, name: str, *, may_yield: bool = False) -> Any:
    """Return a mandatory callback after checking it."""
    if callback is None:
        raise ConfigError(f"{name} is mandatory")
    return ordinary(name, callback, may_yield=may_yield)


def optional(callback: Any, name: str, *, may_yield: bool = False) -> Any:
    """Return an optional callback after checking it, or None."""
    return None if callback is None else ordinary(name, callback, may_yield=may_yield)


def not_iterable(answer: Any) -> CallbackError:
    """Return the error for a result of Get that is not iterable."""
    hint = ", as a function without `return` does" if answer is None else ""
    return CallbackError(
        f"GetInferenceRequests returned {reprlib.repr(answer)}{hint}; expected an iterable of "
        "InferenceRequest"
    )


def add_stops(answer: Any, stops: set[int]) -> None:
    """Add the ids that PollStopSignal returned. Raises CallbackError for other values."""
    if type(answer) not in PLAIN:
        check_answer("PollStopSignal", answer, may_yield=True)
    if answer is None:
        return
    foreign = []
    try:
        for stop in answer:
            try:
                stops.add(operator.index(stop))
            except TypeError:
                foreign.append(stop)
    except TypeError:
        foreign.append(answer)
    if foreign:
        raise CallbackError(f"PollStopSignal returned {foreign[0]!r}, expected request ids")
