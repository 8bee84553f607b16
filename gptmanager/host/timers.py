"""Checks of callbacks, and `HostTimers`, which measure how long calls of the host's code take."""

from __future__ import annotations

from typing import Any

from gptmanager.errors import ConfigError
from gptmanager.lifecycle.callables import ordinary
from gptmanager.lifecycle.watchdog import CallbackTimer


class HostTimers:
    """The timers of all calls into the host's code.

    `all` has the timers in the order of the statistics. A loop appends its scheduler's timer.
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
    """Return a mandatory callback. Raise ConfigError if `callback` is None or cannot be called."""
    if callback is None:
        raise ConfigError(f"{name} is mandatory")
    return ordinary(name, callback, may_yield=may_yield)


def optional(callback: Any, name: str, *, may_yield: bool = False) -> Any:
    """Return an optional callback, or None. Raise ConfigError if `callback` cannot be called."""
    return None if callback is None else ordinary(name, callback, may_yield=may_yield)
