"""`Attachment`: lets a queue wake its manager, and closes the queue when the manager has ended."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from gptmanager import GptManager
from gptmanager.errors import ManagerDeadError
from gptmanager.lifecycle.threads import start_thread

_JOIN_TIMEOUT_S = 5.0
_WAIT_S = 0.5  # the longest time for which the watcher holds a reference to the manager
_PAUSE_S = 0.01  # time without a reference, in which the manager may be collected


class Attachment:
    """Watches `manager` on a separate thread.

    When the manager has ended or was garbage-collected, the thread calls `on_end` with the reason,
    and ends. The thread holds a reference to the manager for short times only, so the manager can
    be garbage-collected. The thread is a daemon, so it never keeps the interpreter alive.
    """

    def __init__(self, manager: GptManager, on_end: Callable[[ManagerDeadError], None]) -> None:
        for method in ("notify", "wait"):
            if not callable(getattr(manager, method, None)):
                kind = type(manager).__name__
                raise TypeError(f"attach() takes a GptManager: {kind} has no method {method}")
        self._manager = weakref.ref(manager)
        self._on_end = on_end
        self._watcher = threading.Thread(target=self._watch, name="request-queue", daemon=True)
        start_thread(self._watcher)

    def notify(self) -> None:
        """Wake an idle manager. Do nothing if it is dead: the watcher then closes the queue."""
        manager = self._manager()
        if manager is not None:
            with suppress(ManagerDeadError):
                manager.notify()

    def join(self) -> None:
        """Wait for the end of the watcher if the manager has ended, so that no thread is left."""
        if self._watcher is not threading.current_thread() and self._has_ended(0.0):
            self._watcher.join(_JOIN_TIMEOUT_S)

    def _watch(self) -> None:
        while not self._has_ended(_WAIT_S):
            time.sleep(_PAUSE_S)
        reason = ManagerDeadError("the manager ended before the request was answered")
        manager = self._manager()
        reason.__cause__ = None if manager is None else manager.exception
        self._on_end(reason)

    def _has_ended(self, timeout: float) -> bool:
        manager = self._manager()
        try:
            return manager is None or manager.wait(timeout)
        except ManagerDeadError:
            return True
