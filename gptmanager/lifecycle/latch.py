"""`Latch`: an event that is set once, and that is safe to use in signal handlers.

A signal handler interrupts a thread, which may be in a method of a `threading.Event` or `Condition`
and hold its lock. A handler that needs this lock, or that waits for a thread that needs it, would
wait forever. A `Latch` has no lock that several threads acquire: each waiting thread has its own.
"""

from __future__ import annotations

import threading


class Latch:
    """An event that any thread may set and wait for, also in signal handlers."""

    __slots__ = ("_gates", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._gates: dict[threading.Lock, None] = {}  # one held lock per waiting thread

    def set(self) -> None:
        """Set the latch, and wake all waiting threads. Idempotent."""
        self.is_set = True
        for gate in list(self._gates):
            if self._gates.pop(gate, gate) is None:  # no other `set` releases this gate
                gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the latch is set, for at most `timeout` seconds; return whether it is set."""
        if not self.is_set:
            gate = threading.Lock()
            gate.acquire()
            self._gates[gate] = None
            if not self.is_set:  # `set` may have run before the gate was in `_gates`
                gate.acquire(timeout=-1 if timeout is None else timeout)
            self._gates.pop(gate, None)
        return self.is_set
