"""Wakes asyncio waiters from other threads at low cost.

A call into an event loop needs a system call, and a manager's thread answers many requests in a
row. So each event loop has a mailbox. The first wake-up that is posted to it schedules one call in
the loop, and the wake-ups that are posted until this call runs are handled by the same call.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from weakref import WeakKeyDictionary


class AsyncWakeups:
    """The mailboxes of all event loops with waiters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = (
            WeakKeyDictionary()
        )

    def waiter(self) -> AsyncWaiter:
        """Return a new waiter of the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            mailbox = self._mailboxes.get(loop)
            if mailbox is None:
                mailbox = self._mailboxes[loop] = _Mailbox()
        return AsyncWaiter(loop, mailbox)


class AsyncWaiter:
    """Lets one task at a time wait in its event loop until any thread calls `wake`. Reusable."""

    __slots__ = ("_loop", "_mailbox", "_waiting", "_is_woken")

    def __init__(self, loop: asyncio.AbstractEventLoop, mailbox: _Mailbox) -> None:
        self._loop = loop
        self._mailbox = mailbox
        self._waiting: asyncio.Future[None] | None = None
        self._is_woken = False

    async def wait(self) -> None:
        """Return after the next `wake`, or at once if `wake` was called since the last `wait`."""
        if not self._is_woken:
            self._waiting = self._loop.create_future()
            await self._waiting
        self._is_woken = False

    def wake(self) -> None:
        """Let `wait` return soon. Any thread may call it."""
        self._mailbox.post(self._loop, self)

    def open(self) -> None:
        """Let `wait` return. Only the mailbox calls it, in the event loop."""
        self._is_woken = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class _Mailbox:
    """Waiters to wake in an event loop.

    It holds no reference to the loop, so a closed loop can be garbage-collected.
    """

    def __init__(self) -> None:
        self._woken: deque[AsyncWaiter] = deque()
        self._is_called = False  # a call of `_open` is scheduled

    def post(self, loop: asyncio.AbstractEventLoop, waiter: AsyncWaiter) -> None:
        self._woken.append(waiter)
        if not self._is_called:
            self._is_called = True
            try:
                loop.call_soon_threadsafe(self._open)
            except RuntimeError:  # the loop is closed, and no task waits in it
                self._woken.clear()

    def _open(self) -> None:
        # reset first: a waiter that is posted from here on schedules another call
        self._is_called = False
        while self._woken:
            self._woken.popleft().open()
