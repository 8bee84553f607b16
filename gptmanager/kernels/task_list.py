"""A list of tasks as one task: they run one after the other without the interpreter."""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gptmanager.kernels.simd.lanes import call_body, call_in_threads, get_long, loop, task_at
from gptmanager.kernels.simd.threads import task_fields


class TaskList(ctypes.Structure):
    """`calls`: the address of `count` calls, which are three int64 each.

    These are the address of a body, the address of its task, and the number of threads. `parallel`:
    the address of OpenMP's `GOMP_parallel`; with 0, each call runs on one thread.
    """

    _fields_ = task_fields("calls count parallel")


TASK_LIST = np.dtype(TaskList)
CALL_FIELDS = 3


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
