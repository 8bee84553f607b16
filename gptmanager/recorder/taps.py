"""A host and an executor that pass every call on: doors at which somebody may look.

A call is a field. Who wants to see it puts a function there that calls the one before. That is no
method of the tap: then only the garbage collector could free the tap.
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
