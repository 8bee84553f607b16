"""Many matmuls as one task, so that threads wait for each other once and not after every matmul.

The threads run the matmuls in the same order. Each uses a copy of the matmul's task with scratch
memory of its own, and claims parts from the counter of the shared task.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gptmanager.kernels.gemm.matmul_task import CHUNK_ROWS, MATMUL_TASK, MatmulTask
from gptmanager.kernels.simd.lanes import call_body, claim, get_long, loop, put_long, task_at
from gptmanager.kernels.simd.threads import NEXT_PART, NEXT_THREAD, task_fields


class GroupTask(ctypes.Structure):
    """`count` matmuls by `body`, each with consecutive rows of `x` and one of several matrices.

    `task`: the address of the `MatmulTask` of the first rows and the first matrix. `given`: of
    int64 `[3, count]`, the number of a matmul's matrix, of its rows, and of its first row.
    `counters`: of int64 zeros, one for each matmul. `copies`: of memory for one task for each
    thread. The fields that end in `_bytes` are the distances from a row or matrix to the next;
    `scratch_bytes` is the size for each thread. Up to `streamed_rows` rows a part has
    `streamed_groups` groups, else one. `tails`: of the 16 values of `MatmulTask.tail`.
    """

    _fields_ = task_fields(
        "body task count given counters copies scratch scratch_bytes num_groups streamed_rows"
        " streamed_groups x_bytes result_bytes matrix_bytes scales_bytes groups_bytes bias_bytes"
        " tails"
    )


GROUP_TASK = np.dtype(GroupTask)
TASK_BYTES = ctypes.sizeof(MatmulTask)
_NAMES = list(MATMUL_TASK.names or ())
_NUM_PARTS, _SCRATCH, _COUNTER, _X, _RESULT, _BIAS = map(
    _NAMES.index, ("num_parts", "scratch", "counter", "x", "result", "bias")
)
_ROWS, _NUM_CHUNKS, _PART_GROUPS, _TAIL, _MATRIX, _SCALES, _GROUPS = map(
    _NAMES.index, ("rows", "num_chunks", "part_groups", "tail", "matrix", "scales", "groups")
)


@loop
def _move(t: Any, own: int, field: int, distance: int) -> None:
    """Set an address of a thread's task to that of the shared task plus a distance."""
    put_long(own, field, get_long(t.task, field) + distance)


@loop
def _share(t: Any, address: int) -> None:
    thread = claim(address, NEXT_THREAD)
    own, scratch = t.copies + thread * TASK_BYTES, t.scratch + thread * t.scratch_bytes
    for field in range(TASK_BYTES // 8):
        put_long(own, field, get_long(t.task, field))
    put_long(own, _SCRATCH, scratch)
    for number in range(t.count):
        matrix, rows = get_long(t.given, number), get_long(t.given, t.count + number)
        first, counter = get_long(t.given, 2 * t.count + number), t.counters + 8 * number
        num_chunks = (rows + CHUNK_ROWS - 1) // CHUNK_ROWS
        part_groups = t.streamed_groups if rows <= t.streamed_rows else 1
        num_parts = num_chunks * ((t.num_groups + part_groups - 1) // part_groups)
        if get_long(counter, NEXT_PART) >= num_parts:
            continue
        put_long(own, NEXT_THREAD, 0)
        put_long(own, _NUM_PARTS, num_parts)
        put_long(own, _COUNTER, counter)
        put_long(own, _ROWS, rows)
        put_long(own, _NUM_CHUNKS, num_chunks)
        put_long(own, _PART_GROUPS, part_groups)
        put_long(own, _TAIL, get_long(t.tails, rows % 16))
        _move(t, own, _X, first * t.x_bytes)
        _move(t, own, _RESULT, first * t.result_bytes)
        _move(t, own, _MATRIX, matrix * t.matrix_bytes)
        _move(t, own, _SCALES, matrix * t.scales_bytes)
        _move(t, own, _GROUPS, matrix * t.groups_bytes)
        _move(t, own, _BIAS, matrix * t.bias_bytes)
        call_body(t.body, own)


def multiply_group(address: int) -> None:
    """Run all matmuls of a `GroupTask`."""
    _share(task_at(address, GROUP_TASK), address)
