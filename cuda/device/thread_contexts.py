"""`ThreadContexts`: makes the device's context current in each thread before a driver call.

The CUDA runtime does this automatically, in torch and in CuPy. If a thread's first CUDA call is a
driver call (a launch by cuda-bindings, loading a module), it has no context and the call fails.
"""

from __future__ import annotations

import threading
from typing import Any


class ThreadContexts:
    """The context of one device, for any number of threads. `runtime` is `cupy.cuda.runtime`."""

    def __init__(self, runtime: Any, device: int) -> None:
        self._runtime = runtime
        self._device = device
        self._threads = threading.local()

    def ensure(self) -> None:
        """Make the context current in this thread at its first call; later calls cost little.

        The first call is never during CUDA graph capture, because work always runs once before it
        is captured.
        """
        if not hasattr(self._threads, "has_context"):
            self._runtime.setDevice(self._device)  # since CUDA 12 this also creates the context
            self._threads.has_context = True
