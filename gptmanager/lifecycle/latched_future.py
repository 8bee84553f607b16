"""`LatchedFuture`: a future for threads that the exception of a signal handler may interrupt.

`Condition` explains the reason: an interrupted wait for a `concurrent.futures.Future` may leave its
lock held, and the thread that sets the result would wait for this lock forever.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, TimeoutError
from typing import Any, TypeVar

from gptmanager.lifecycle.latch import Latch

_T = TypeVar("_T")


class _Guard(threading.Condition):
    """A condition which a `with` statement enters and leaves in C code.

    The properties return methods of the lock, which are not Python code.
    """

    __enter__: Any = property(lambda self: self._lock.__enter__)
    __exit__: Any = property(lambda self: self._lock.__exit__)


class LatchedFuture(Future[_T]):
    """A future that waits for a `Latch` in `result` and `exception`. `done` acquires no lock."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = _Guard()
        latch = self._is_done = Latch()
        self.add_done_callback(lambda _: latch.set())  # the first callback

    def done(self) -> bool:
        return self._is_done.is_set

    def result(self, timeout: float | None = None) -> _T:
        self._wait(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return super().exception()

    def set_result(self, result: _T) -> None:
        try:
            super().set_result(result)
        finally:
            self._note_end()

    def set_exception(self, exception: BaseException | None) -> None:
        try:
            super().set_exception(exception)
        finally:
            self._note_end()

    def renew_lock(self) -> None:
        """Replace the lock, which another thread of the parent may have held at a fork."""
        self._condition = _Guard()

    def _note_end(self) -> None:
        """Set the latch if an exception has interrupted the call after the end, but before that."""
        if super().done():
            self._is_done.set()

    def _wait(self, timeout: float | None) -> None:
        if not self._is_done.wait(None if timeout is None else max(0.0, timeout)):
            raise TimeoutError
