"""Many matmuls as one task, so that threads wait for each other once and not after every matmul.

All threads go through the matmuls in the same order. Each thread has a `MatmulTask` of its own,
with its own scratch memory. For each matmul, the thread changes fields of its task, and then claims
parts of the matmul from the matmul's counter, which all threads share.
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
    """Matmuls that `body` computes, each of consecutive rows of `x` with one of several matrices.

    `given` is the address of int64 numbers: the number of matmuls, then for each matmul the index
    of its matrix, its number of rows, and its first row. `counters` is the address of int64 zeros,
    one for each matmul. `copies` is the address of memory for one `MatmulTask` per thread. `tails`
    is the address of 16 values of `MatmulTask.tail`, one for each value of `rows % 16`.
    `scratch_bytes` is the size of a thread's scratch memory. The other fields that end in `_bytes`
    are the distances from one row, or from one matrix, to the next. If all matmuls have up to
    `streamed_rows` rows, they are divided into about `streamed_parts` parts in all. A matmul with
    more rows has a part for each group of panels and chunk of rows. The fields up to `bias_bytes`
    depend on the call.
    """

    _fields_ = task_fields(
        "body given counters copies scratch scratch_bytes streamed_parts x_bytes result_bytes"
        " bias_bytes num_groups streamed_rows matrix_bytes scales_bytes groups_bytes tails"
    )


class SharedTask(ctypes.Structure):
    """A `GroupTask`, and a `MatmulTask` with the addresses of the first row and matrix."""

    _fields_ = [("group", GroupTask), ("matmul", MatmulTask)]


GROUP_TASK = np.dtype(GroupTask)
TASK_BYTES, _GROUP_BYTES = ctypes.sizeof(MatmulTask), ctypes.sizeof(GroupTask)
_NAMES = list(MATMUL_TASK.names or ())
_NUM_PARTS, _SCRATCH, _COUNTER, _X, _RESULT, _BIAS = map(
    _NAMES.index, ("num_parts", "scratch", "counter", "x", "result", "bias")
)
_ROWS, _NUM_CHUNKS, _PART_GROUPS, _TAIL, _MATRIX, _SCALES, _GROUPS = map(
    _NAMES.index, ("rows", "num_chunks", "part_groups", "tail", "matrix", "scales", "groups")
)


@loop
def _move(shared: int, own: int, field: int, distance: int) -> None:
    """Set an address in a thread's task to the same address in the shared task plus a distance."""
    put_long(own, field, get_long(shared, field) + distance)


@loop
def _share(t: Any, address: int) -> None:
    thread = claim(address, NEXT_THREAD)
    own, scratch = t.copies + thread * TASK_BYTES, t.scratch + thread * t.scratch_bytes
    shared, count = address + _GROUP_BYTES, get_long(t.given, 0)
    streamed = max(1, min(t.num_groups, t.num_groups * count // t.streamed_parts))
    for field in range(TASK_BYTES // 8):
        put_long(own, field, get_long(shared, field))
    put_long(own, _SCRATCH, scratch)
    for number in range(count):
        matrix, rows = get_long(t.given, 3 * number + 1), get_long(t.given, 3 * number + 2)
        first, counter = get_long(t.given, 3 * number + 3), t.counters + 8 * number
        num_chunks = (rows + CHUNK_ROWS - 1) // CHUNK_ROWS
        part_groups = streamed if rows <= t.streamed_rows else 1
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
        _move(shared, own, _X, first * t.x_bytes)
        _move(shared, own, _RESULT, first * t.result_bytes)
        _move(shared, own, _MATRIX, matrix * t.matrix_bytes)
        _move(shared, own, _SCALES, matrix * t.scales_bytes)
        _move(shared, own, _GROUPS, matrix * t.groups_bytes)
        _move(shared, own, _BIAS, matrix * t.bias_bytes)
        call_body(t.body, own)


def multiply_group(address: int) -> None:
    """Run all matmuls of a `SharedTask`."""
    _share(task_at(address, GROUP_TASK), address)
