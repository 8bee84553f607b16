"""`PerProcess`: threads, locks and pipes of an object that a host may use after a fork.

A fork copies no threads, and another thread may hold a lock at that moment: in the forked process
no thread releases this lock. So a forked process makes its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class PerProcess(Generic[_T]):
    """A value that `make` makes once in each process."""

    __slots__ = ("_make", "_values")

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._values: dict[int, _T] = {}  # by process id

    def get(self) -> _T:
        """Return the value of this process. No lock is needed: threads that are first make several
        values, and all get the one that is stored first.
        """
        process = os.getpid()
        if process not in self._values:
            self._values.setdefault(process, self._make())
        return self._values[process]
