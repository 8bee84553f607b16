"""A host and an executor that pass everything on: doors at which somebody may look.

A subclass sets a method of its own in the place of one that it wants to see; any other call goes
straight to the object behind.
"""

from __future__ import annotations

from gptmanager.step import Executor, Host


class HostTap:
    """A `Host` in front of `host`."""

    def __init__(self, host: Host) -> None:
        self.fetch = host.fetch
        self.respond = host.respond
        self.prepare = host.prepare
        self.fail = host.fail
        self.poll = host.poll
        self.report = host.report


class ExecutorTap:
    """An `Executor` in front of `executor`."""

    def __init__(self, executor: Executor) -> None:
        self.forward = executor.forward
        self.sample = executor.sample
        self.result = executor.result
