"""`Latch`: an event that is set once, and that is safe to use in signal handlers.

A signal handler runs between two lines of the thread that it interrupts. A `threading.Event` or
`Condition` may hold a lock at this point, and a handler that waits for another thread could then
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
            if self._gates.pop(gate, gate) is None:  # no other caller of `set` has released it
                gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the latch is set, for at most `timeout` seconds; return whether it is set."""
        if not self.is_set:
            gate = threading.Lock()
            gate.acquire()
            self._gates[gate] = None
            if not self.is_set:  # otherwise `set` may have run before it could see the gate
                gate.acquire(timeout=-1 if timeout is None else timeout)
            self._gates.pop(gate, None)
        return self.is_set
