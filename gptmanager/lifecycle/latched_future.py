"""`LatchedFuture`: a future for threads that the exception of a signal handler may interrupt.

`Condition` explains the reason: an interrupted wait for a `concurrent.futures.Future` may leave its
lock held, and the thread that sets the result would wait for this lock forever. An interrupted
`set_result` may call some of the done callbacks only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from typing import Any, TypeVar

from gptmanager.lifecycle.latch import Latch
from gptmanager.lifecycle.log import logger

_T = TypeVar("_T")


class _Guard(threading.Condition):
    """A condition which a `with` statement enters and leaves in C code.

    The properties return methods of the lock, which are not Python code.
    """

    __enter__: Any = property(lambda self: self._lock.__enter__)
    __exit__: Any = property(lambda self: self._lock.__exit__)


def raise_first(errors: list[BaseException]) -> None:
    """Raise the first of the errors, if any, and empty the list.

    Otherwise the error and the frame that has the list would be a reference cycle.
    """
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()


class LatchedFuture(Future[_T]):
    """A future that waits for a `Latch` in `result` and `exception`. `done` acquires no lock.

    Each done callback is called, even if one of them raises a BaseException or is interrupted. The
    first such exception is raised after the last callback.
    """

    def __init__(self) -> None:
        super().__init__()
        self._condition = _Guard()
        self._done_callbacks: list[Callable[[Future[_T]], object]] = []  # the base class appends
        # one iterator, so that of two threads only one calls a callback
        self._uncalled = iter(self._done_callbacks)
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
        """Do what is left if an exception has interrupted the call after the end."""
        if super().done():
            self._is_done.set()
            self._invoke_callbacks()

    def _invoke_callbacks(self) -> None:
        """Call the done callbacks that have not been called. The base class calls this method."""
        interrupts: list[BaseException] = []
        while True:
            try:
                for callback in self._uncalled:  # continues after the callback that raised
                    callback(self)
                break
            except Exception:
                logger.exception("a done callback of %r raised", self)
            except BaseException as error:  # noqa: B036 - raised below
                interrupts.append(error)
        raise_first(interrupts)

    def _wait(self, timeout: float | None) -> None:
        if not self._is_done.wait(None if timeout is None else max(0.0, timeout)):
            raise TimeoutError
