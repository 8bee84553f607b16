"""Matmuls of heads, each with a matrix of its own: the loops that each thread runs.

The bits of a result do not depend on the other tokens or heads of the call.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gptmanager.kernels.attention.attention_task import padded
from gptmanager.kernels.gemm.small_matmul import multiply
from gptmanager.kernels.simd.dtypes import load_as, store_as
from gptmanager.kernels.simd.lanes import (
    LANES,
    claim,
    load_part,
    loop,
    prefetch,
    store_part,
    task_at,
)
from gptmanager.kernels.simd.threads import NEXT_PART, NEXT_THREAD, share_of, task_fields

TILE_TOKENS = 32
# bytes of a matrix that are prefetched while the rows before them are multiplied
STEP_BYTES = 1 << 14
LINE_BYTES = 64


class HeadMatmulTask(ctypes.Structure):
    """Addresses, sizes in elements, and the number of `scratch_bytes` of each thread.

    `matrices` is `[num_heads, depth, columns]`. Tokens of `x` are `stride` elements apart, and
    heads of a token `head_stride`. `item_bytes` is the size of an element of `dtype`, the dtype of
    all tensors.
    """

    _fields_ = task_fields(
        "x matrices result scratch scratch_bytes num_tokens num_heads stride head_stride depth"
        " columns dtype item_bytes"
    )


TASK = np.dtype(HeadMatmulTask)


def scratch_bytes(depth: int, columns: int) -> int:
    """Return the bytes of a thread's scratch: the inputs and the sums of a tile in float32."""
    return 4 * TILE_TOKENS * (depth + padded(columns))


@loop
def _prefetch(t: Any, matrix: int, first: int, stop: int) -> None:
    """Prefetch the rows from `first` to `stop` (excluded) of a matrix."""
    row_bytes = t.item_bytes * t.columns
    for byte in range(first * row_bytes, min(stop, t.depth) * row_bytes, LINE_BYTES):
        prefetch(matrix + byte, 0)


@loop
def _multiply_tile(t: Any, scratch: int, head: int, first: int) -> None:
    """Compute the results of one head for up to TILE_TOKENS tokens, from token `first` on."""
    depth, columns, dtype = t.depth, t.columns, t.dtype
    rows, wide = min(TILE_TOKENS, t.num_tokens - first), padded(columns)
    sums = scratch + 4 * TILE_TOKENS * depth
    for row in range(rows):
        start = (first + row) * t.stride + head * t.head_stride
        for d in range(0, depth, LANES):
            item = load_as(dtype, t.x, start + d, depth - d)
            store_part(scratch, row * depth + d, item, depth - d)
    row_bytes = t.item_bytes * columns
    matrix, step = t.matrices + head * depth * row_bytes, max(1, STEP_BYTES // row_bytes)
    for at in range(0, depth, step):
        _prefetch(t, matrix, at + step, at + 2 * step)
        own = scratch + 4 * at, depth, matrix + at * row_bytes, columns
        multiply(dtype, sums, wide, *own, rows, columns, min(step, depth - at), at > 0)
    for row in range(rows):
        to = ((first + row) * t.num_heads + head) * columns
        for c in range(0, columns, LANES):
            value = load_part(sums, row * wide + c, columns - c)
            store_as(dtype, t.result, to + c, value, columns - c)


def multiply_heads(address: int) -> None:
    """Compute the parts of a `HeadMatmulTask` that this thread claims.

    The pairs of a head and a tile of tokens are divided into `num_parts` parts.
    """
    t = task_at(address, TASK)
    tiles = (t.num_tokens + TILE_TOKENS - 1) // TILE_TOKENS
    scratch, total = t.scratch + claim(address, NEXT_THREAD) * t.scratch_bytes, t.num_heads * tiles
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for own in share_of(t, part, total):
            _multiply_tile(t, scratch, own // tiles, own % tiles * TILE_TOKENS)
        part = claim(address, NEXT_PART)
