"""`start_thread`: starts a thread on behalf of a caller that an exception may interrupt."""

from __future__ import annotations

import _thread
import threading

from gptmanager.lifecycle.latched_future import LatchedFuture


def start_thread(thread: threading.Thread) -> None:
    """Start `thread` in another thread, which no signal handler interrupts. Raise its errors.

    `Thread.start` waits for a `threading.Event`. If an exception interrupts this wait, the lock of
    the event may stay held, and then the new thread waits for the lock forever.
    """
    started: LatchedFuture[None] = LatchedFuture()
    _thread.start_new_thread(_start, (thread, started))
    started.result()


def _start(thread: threading.Thread, started: LatchedFuture[None]) -> None:
    try:
        thread.start()
    except BaseException as error:  # noqa: B036 - raised in the caller
        started.set_exception(error)
    else:
        started.set_result(None)
