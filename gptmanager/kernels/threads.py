"""`Team`: runs a compiled body in torch's own OpenMP threads.

A second pool of threads (Numba's prange brings one) would fight torch's for the cores: each spins
while it waits for the other. Numba's default layer where there is no OpenMP, workqueue, also
aborts the process when two managers use it from two threads. So the bodies are handed to the
OpenMP runtime that torch has loaded: no pool of ours, no library that could be missing, and any
number of managers. The interpreter lock is kept meanwhile, as bodies never need it: handing it
over costs up to 5 ms beside a busy thread of the host. It decides nothing about the work itself.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

NEXT_PART, NEXT_THREAD = 0, 1


def task_fields(longs: str, reals: str = "") -> list[tuple[str, Any]]:
    """Fields of a task: its two counters, then int64 and float64 values by name."""
    names = ["next_part", "next_thread", "num_parts", *longs.split()]
    return [(n, ctypes.c_int64) for n in names] + [(n, ctypes.c_double) for n in reals.split()]


def end_threads_of_caller() -> None:
    """End the OpenMP threads that torch keeps for the calling thread; it makes new ones on demand.

    Each thread that computes has threads of its own. Where all of them are more than the cores, the
    GNU runtime lets none wait actively, so that each parallel region wakes them from sleep: a step
    of a small model took 1.6 times as long because the host's thread had used torch before.
    """
    pause = getattr(ctypes.PyDLL(torch._C.__file__), "omp_pause_resource_all", None)
    if pause is not None:
        soft = 1
        pause(soft)


class Team:
    """Torch's threads; one thread, the caller's, where that runtime has no GNU entry point."""

    def __init__(self) -> None:
        # Symbols are looked up in the library and all it was linked with.
        runtime = ctypes.PyDLL(torch._C.__file__)
        self._parallel = getattr(runtime, "GOMP_parallel", None)
        if self._parallel is not None:
            self._parallel.restype = None
            self._parallel.argtypes = (
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_uint,
                ctypes.c_uint,
            )
        self._alone = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
        self._own = threading.local()

    @property
    def max_size(self) -> int:
        """How many threads `run` may use."""
        return 1 if self._parallel is None else torch.get_num_threads()

    def scratch(self, num_bytes: int) -> int:
        """Address of memory for one `run` of the calling thread, which stays its own."""
        memory = getattr(self._own, "memory", None)
        if memory is None or len(memory) < num_bytes:
            memory = self._own.memory = torch.empty(num_bytes, dtype=torch.uint8)
        return int(memory.data_ptr())

    def run(self, body: int, task: ctypes.Structure, size: int) -> None:
        """Calls `body(address of task)` in up to `size` threads; returns when all have."""
        address = ctypes.addressof(task)
        if size > 1 and self._parallel is not None:
            self._parallel(body, address, size, 0)
        else:
            self._alone(body)(address)
