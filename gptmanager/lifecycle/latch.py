"""`Latch`: an event that is set once, without a lock between two lines of Python.

A signal handler runs between two lines of the thread that it interrupts. A `threading.Event` or a
`Condition` may hold a lock there. Then a handler that waits for another thread could wait for ever.
"""

from __future__ import annotations

import threading


class Latch:
    """Set from any thread, waited for by any, in signal handlers too."""

    __slots__ = ("_gates", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._gates: dict[threading.Lock, None] = {}  # a held lock for each thread that waits

    def set(self) -> None:
        """Idempotent."""
        self.is_set = True
        for gate in list(self._gates):
            if self._gates.pop(gate, gate) is None:  # no other thread has released it
                gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Is it set, now or within `timeout` seconds?"""
        if not self.is_set:
            gate = threading.Lock()
            gate.acquire()
            self._gates[gate] = None
            if not self.is_set:  # else the thread that set it may not have seen the gate
                gate.acquire(timeout=-1 if timeout is None else timeout)
            self._gates.pop(gate, None)
        return self.is_set
