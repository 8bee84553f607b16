"""Checks of callbacks, and `HostTimers`: how long each call into the host's code takes."""

from __future__ import annotations

from typing import Any

from gptmanager.errors import ConfigError
from gptmanager.lifecycle.callables import ordinary
from gptmanager.lifecycle.watchdog import CallbackTimer


class HostTimers:
    """The timers of all calls into the host's code.

    `all` has them in the order of the statistics. The timer of the loop's scheduler is appended.
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
    """Return a mandatory callback; raise ConfigError if it is None or cannot be called."""
    if callback is None:
        raise ConfigError(f"{name} is mandatory")
    return ordinary(name, callback, may_yield=may_yield)


def optional(callback: Any, name: str, *, may_yield: bool = False) -> Any:
    """Return an optional callback, or None; raise ConfigError if it cannot be called."""
    return None if callback is None else ordinary(name, callback, may_yield=may_yield)
