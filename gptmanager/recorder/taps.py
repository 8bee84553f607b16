"""A host and an executor that pass every call on, so that calls can be observed.

Each call is an attribute of the tap. An observer replaces the attribute with a function that calls
the previous function, and so keeps it. If the first one were a method of the tap, the tap would be
in a reference cycle, which lives until the next garbage collection.
"""

from __future__ import annotations

from gptmanager.step import Executor, Host


class HostTap:
    """A `Host` that passes every call on to `host`."""

    def __init__(self, host: Host) -> None:
        self.fetch = host.fetch
        self.respond = host.respond
        self.prepare = host.prepare
        self.load = host.load
        self.fail = host.fail
        self.poll = host.poll
        self.report = host.report


class ExecutorTap:
    """An `Executor` that passes every call on to `executor`."""

    def __init__(self, executor: Executor) -> None:
        self.forward = executor.forward
        self.sample = executor.sample
        self.result = executor.result
