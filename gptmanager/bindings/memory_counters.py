"""`MemoryCounters`: the memory that managers use, in bytes."""

from __future__ import annotations

import json
import weakref


class LastRecord:
    """The last statistics record of a running manager, or "" before the first record."""

    __slots__ = ("__weakref__", "record")

    def __init__(self) -> None:
        self.record = ""


# one `LastRecord` per running manager; a manager may be deleted without `shutdown`
_running: weakref.WeakSet[LastRecord] = weakref.WeakSet()


class MemoryCounters:
    """The memory of all running managers of `gptmanager.bindings` in this process, in bytes.

    The numbers are sums over the managers' last statistics records, so a manager is included from
    its first iteration on.
    """

    @staticmethod
    def instance() -> MemoryCounters:
        """Return the only instance."""
        return _instance

    @staticmethod
    def begin(last: LastRecord) -> None:
        """Include a manager that has started."""
        _running.add(last)

    @staticmethod
    def end(last: LastRecord) -> None:
        """Leave out a manager that has ended."""
        _running.discard(last)

    @property
    def gpu(self) -> int:
        """Bytes of GPU memory."""
        return _total("Runtime GPU Memory Usage")

    @property
    def cpu(self) -> int:
        """Bytes of CPU memory."""
        return _total("Runtime CPU Memory Usage")

    @property
    def pinned(self) -> int:
        """Bytes of pinned CPU memory."""
        return _total("Runtime Pinned Memory Usage")

    @property
    def uvm(self) -> int:
        """Always 0, because managers do not use unified memory."""
        return 0


def _total(key: str) -> int:
    return sum(json.loads(last.record)[key] for last in list(_running) if last.record)


_instance = MemoryCounters()
