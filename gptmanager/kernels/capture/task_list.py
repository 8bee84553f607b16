"""A list of tasks that compiled code runs one after the other, without the interpreter."""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gptmanager.kernels.simd.lanes import call_body, call_in_threads, get_long, loop, task_at
from gptmanager.kernels.simd.threads import task_fields


class TaskList(ctypes.Structure):
    """Addresses of calls and of OpenMP's `GOMP_parallel`.

    `calls` int64 `[count, CALL_FIELDS]` has for each call the address of a compiled body, the
    address of the body's task, and the number of threads. If `parallel` is 0 instead of the address
    of `GOMP_parallel`, each call runs on one thread.
    """

    _fields_ = task_fields("calls count parallel")


TASK_LIST = np.dtype(TaskList)
CALL_FIELDS = 3  # numbers per call


@loop
def _run(t: Any) -> None:
    for number in range(t.count):
        call = t.calls + 8 * CALL_FIELDS * number
        body, address, size = get_long(call, 0), get_long(call, 1), get_long(call, 2)
        if size > 1 and t.parallel:
            call_in_threads(t.parallel, body, address, size)
        else:
            call_body(body, address)


def run_tasks(address: int) -> None:
    """Run the calls of a `TaskList`."""
    _run(task_at(address, TASK_LIST))
