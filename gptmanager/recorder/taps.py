"""A host and an executor that pass every call on, so that calls can be observed.

Each call is an attribute. An observer replaces it with a function that calls the previous one. The
function is not a method of the tap: the reference cycle would leave the tap to the garbage
collector.
"""

from __future__ import annotations

from gptmanager.step import Executor, Host


class HostTap:
    """A `Host` in front of `host`."""

    def __init__(self, host: Host) -> None:
        self.fetch = host.fetch
        self.respond = host.respond
        self.prepare = host.prepare
        self.load = host.load
        self.fail = host.fail
        self.poll = host.poll
        self.report = host.report


class ExecutorTap:
    """An `Executor` in front of `executor`."""

    def __init__(self, executor: Executor) -> None:
        self.forward = executor.forward
        self.sample = executor.sample
        self.result = executor.result
