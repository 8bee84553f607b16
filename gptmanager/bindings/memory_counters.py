"""`MemoryCounters`: bytes of the tensors that managers hold."""

from __future__ import annotations

import json


class LastRecord:
    """The last statistics record of one manager that runs; "": none yet."""

    __slots__ = ("record",)

    def __init__(self) -> None:
        self.record = ""


_running: set[LastRecord] = set()  # one for each manager


class MemoryCounters:
    """Bytes of memory of all managers of `gptmanager.bindings` that run in this process.

    The figures are those of each manager's last statistics record; a manager counts from its first
    iteration on.
    """

    @staticmethod
    def instance() -> MemoryCounters:
        return _instance

    @staticmethod
    def begin(last: LastRecord) -> None:
        _running.add(last)

    @staticmethod
    def end(last: LastRecord) -> None:
        _running.discard(last)

    @property
    def gpu(self) -> int:
        return _total("Runtime GPU Memory Usage")

    @property
    def cpu(self) -> int:
        return _total("Runtime CPU Memory Usage")

    @property
    def pinned(self) -> int:
        return _total("Runtime Pinned Memory Usage")

    @property
    def uvm(self) -> int:
        """Always 0: no manager has unified memory."""
        return 0


def _total(key: str) -> int:
    return sum(json.loads(last.record)[key] for last in list(_running) if last.record)


_instance = MemoryCounters()
