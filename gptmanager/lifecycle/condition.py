"""`Condition`: waits for a change of state, and is safe to use where an exception may interrupt.

A signal handler that raises, as that of Ctrl-C does, interrupts a thread at any line of Python. The
methods of a `threading.Condition` are Python code that holds a lock, so an exception in them may
leave the lock held, and all threads that need it would wait forever. A waiting thread of this class
holds no lock. A `with` statement on a `threading.Lock` or `RLock` is safe, too: it is C code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gptmanager.lifecycle.clock import monotonic
from gptmanager.lifecycle.latch import Latch

_T = TypeVar("_T")


class Condition:
    """Lets threads wait until a function returns a true value."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[Latch, None] = {}  # one latch per waiting thread

    def wait_for(self, predicate: Callable[[], _T], timeout: float | None = None) -> _T:
        """Return the first true value of `predicate()`, or a false one after `timeout` seconds.

        `predicate` is called at once, and after each `notify_all`. It may acquire locks and change
        the state that it tests.
        """
        give_up = None if timeout is None else monotonic() + timeout
        while True:
            latch = Latch()
            self._waiting[latch] = None  # before the call: no change is missed
            try:
                value = predicate()
                left = None if give_up is None else max(0.0, give_up - monotonic())
                if value or not latch.wait(left):
                    return value
            finally:
                self._waiting.pop(latch, None)

    def notify_all(self) -> None:
        """Let all waiting threads call their predicates. Call this after each change of state."""
        for latch in list(self._waiting):
            latch.set()
