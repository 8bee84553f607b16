"""Wakes asyncio waiters from other threads at low cost.

Scheduling a call in the event loop of another thread needs a system call, and a manager's thread
answers many requests in a row. So each event loop has a mailbox. The first wake-up that is posted
to a mailbox schedules one call in the loop. This call also handles all wake-ups that are posted
before the call runs.

An event loop that is woken competes with the manager's thread for the interpreter lock. So if steps
compute without the lock, the wake-ups for the tokens of a step wait until the next step begins. The
event loop then works while that step computes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from weakref import WeakKeyDictionary, ref


class AsyncWakeups:
    """The mailboxes of all event loops with waiters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hold = _Hold()
        self._mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = (
            WeakKeyDictionary()
        )
        self._all: tuple[tuple[ref[asyncio.AbstractEventLoop], _Mailbox], ...] = ()

    def waiter(self) -> AsyncWaiter:
        """Return a new waiter of the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            mailbox = self._mailboxes.get(loop)
            if mailbox is None:
                mailbox = self._mailboxes[loop] = _Mailbox(self._hold)
                others = (pair for pair in self._all if pair[0]() is not None)
                self._all = (*others, (ref(loop), mailbox))
        return AsyncWaiter(loop, mailbox)

    def begin_step(self, is_unlocked: bool) -> None:
        """Send the wake-ups that wait.

        If `is_unlocked`, a step begins that does not hold the interpreter lock while it computes.
        Later wake-ups for tokens then wait for the next call of this method. The caller, the
        manager's `StepSignal`, makes another call after each call with True.
        """
        was_on, self._hold.is_on = self._hold.is_on, is_unlocked
        if was_on:
            self.send()

    def send(self) -> None:
        """Send the wake-ups that wait. Takes no lock: a signal handler may call it at any time."""
        for reference, mailbox in self._all:
            loop = reference()
            if loop is not None:
                mailbox.send(loop)


class _Hold:
    """`is_on`: whether wake-ups for tokens wait for the next call of `begin_step`."""

    is_on = False


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

    @property
    def is_abandoned(self) -> bool:
        """Whether the event loop is closed, so that no task can return from `wait`."""
        return self._loop.is_closed()

    @property
    def is_running(self) -> bool:
        """Whether the event loop runs. If it is stopped, `wait` may return after its next start."""
        return self._loop.is_running()

    def wake(self, *, may_wait: bool = False) -> None:
        """Let `wait` return soon. Any thread may call this method.

        If `may_wait`, and the last step ran without the interpreter lock, `wait` returns when the
        next step begins.
        """
        self._mailbox.post(self._loop, self, may_wait)

    def open(self) -> None:
        """Let `wait` return. Only the mailbox calls it, in the event loop."""
        self._is_woken = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class _Mailbox:
    """Waiters to wake in an event loop.

    It holds no reference to the loop, so a closed loop can be garbage-collected.
    """

    def __init__(self, hold: _Hold) -> None:
        self._woken: deque[AsyncWaiter] = deque()
        self._is_called = False  # a call of `_open` is scheduled
        self._hold = hold

    def post(self, loop: asyncio.AbstractEventLoop, waiter: AsyncWaiter, may_wait: bool) -> None:
        self._woken.append(waiter)
        if not (may_wait and self._hold.is_on):
            self.send(loop)

    def send(self, loop: asyncio.AbstractEventLoop) -> None:
        """Schedule a call of `_open` if a waiter is posted and no call is scheduled.

        If the loop is closed, a call that was scheduled before will never run.
        """
        if self._woken and (not self._is_called or loop.is_closed()):
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
