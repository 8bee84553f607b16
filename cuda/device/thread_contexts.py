"""`ThreadContexts`: the device's context made current in each thread before it calls the driver.

The CUDA runtime does so by itself, in torch and in CuPy. A thread whose first call is one of the
driver (a launch by cuda-bindings, a module that is loaded) has none, and the call fails.
"""

from __future__ import annotations

import threading
from typing import Any


class ThreadContexts:
    """One device's context, for any number of threads. `runtime`: CuPy's."""

    def __init__(self, runtime: Any, device: int) -> None:
        self._runtime = runtime
        self._device = device
        self._threads = threading.local()

    def ensure(self) -> None:
        """Make the context current in this thread, at its first call. A later one costs nothing.

        Not while the thread records: a recording runs its work once before.
        """
        if not hasattr(self._threads, "has_context"):
            self._runtime.setDevice(self._device)  # since CUDA 12 this makes the context, too
            self._threads.has_context = True
