"""Many matmuls as one task, so that threads wait for each other once and not after every matmul.

The threads run the matmuls in the same order. Each uses a copy of the matmul's task with scratch
memory of its own, and claims parts from the counter of the shared task.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gptmanager.kernels.gemm.matmul_task import MATMUL_TASK, MatmulTask
from gptmanager.kernels.simd.lanes import call_body, claim, get_long, loop, put_long, task_at
from gptmanager.kernels.simd.threads import NEXT_PART, NEXT_THREAD, task_fields


class GroupTask(ctypes.Structure):
    """`tasks`: the address of `count` instances of `MatmulTask`, which `body` computes.

    `copies`: memory for a copy of an instance per thread. `scratch_bytes`: scratch memory per
    thread.
    """

    _fields_ = task_fields("body tasks count copies scratch scratch_bytes")


GROUP_TASK = np.dtype(GroupTask)
_BYTES = ctypes.sizeof(MatmulTask)
_LONGS = _BYTES // 8
_NAMES = list(MATMUL_TASK.names or ())
_NUM_PARTS, _SCRATCH, _COUNTER = (_NAMES.index(it) for it in ("num_parts", "scratch", "counter"))


@loop
def _share(t: Any, address: int) -> None:
    thread = claim(address, NEXT_THREAD)
    own, scratch = t.copies + thread * _BYTES, t.scratch + thread * t.scratch_bytes
    for number in range(t.count):
        task = t.tasks + number * _BYTES
        if get_long(task, NEXT_PART) >= get_long(task, _NUM_PARTS):
            continue
        for field in range(_LONGS):
            put_long(own, field, get_long(task, field))
        put_long(own, NEXT_THREAD, 0)
        put_long(own, _SCRATCH, scratch)
        put_long(own, _COUNTER, task)
        call_body(t.body, own)


def multiply_group(address: int) -> None:
    """Run all matmuls of a `GroupTask`."""
    _share(task_at(address, GROUP_TASK), address)
