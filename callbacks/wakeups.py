"""Wakes asyncio waiters from other threads, cheaply.

A call into an event loop costs a system call, and a manager's thread answers many requests in a
row. So each event loop has a mailbox: while one call is on its way, further wake-ups join it.
Knows nothing of what its users wait for.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from weakref import WeakKeyDictionary


class AsyncWakeups:
    """The mailboxes of all event loops that wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = (
            WeakKeyDictionary()
        )

    def waiter(self) -> AsyncWaiter:
        """A waiter of the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            mailbox = self._mailboxes.get(loop)
            if mailbox is None:
                mailbox = self._mailboxes[loop] = _Mailbox()
        return AsyncWaiter(loop, mailbox)


class AsyncWaiter:
    """Waits in its own event loop, is woken from any thread, and may be used again."""

    def __init__(self, loop: asyncio.AbstractEventLoop, mailbox: _Mailbox) -> None:
        self._loop = loop
        self._mailbox = mailbox
        self._woken = asyncio.Event()

    async def wait(self) -> None:
        """Return after the next `wake`; at once if one came since the last `wait`."""
        await self._woken.wait()
        self._woken.clear()

    def wake(self) -> None:
        self._mailbox.post(self._loop, self._woken)


class _Mailbox:
    """Events to set in an event loop. Holds no loop, so a closed one can be collected."""

    def __init__(self) -> None:
        self._events: deque[asyncio.Event] = deque()
        self._is_called = False  # a call of `_open` is on its way

    def post(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        self._events.append(event)
        if not self._is_called:
            self._is_called = True
            try:
                loop.call_soon_threadsafe(self._open)
            except RuntimeError:  # the loop is closed: nothing waits in it any more
                self._events.clear()

    def _open(self) -> None:
        # cleared first: an event posted from here on gets a call of its own
        self._is_called = False
        while self._events:
            self._events.popleft().set()
