"""The lookup of tokens in an embedding table, which is a tensor or a packed matrix."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gptmanager.kernels.simd.dtypes import (
    NAN,
    get_byte,
    get_half,
    get_half_byte,
    load_as,
    move_item,
    store_as,
)
from gptmanager.kernels.simd.lanes import (
    LANES,
    claim,
    get,
    get_long,
    load_part,
    loop,
    put,
    splat,
    task_at,
)
from gptmanager.kernels.simd.threads import NEXT_PART, NEXT_THREAD, share_of, task_fields


class EmbeddingTask(ctypes.Structure):
    """Addresses (0: none), sizes, and the layout of `table`.

    Element k of row i is at index
    `i // lanes * panel + i % lanes * positions + k // positions * step + k % positions`. In a 4-bit
    table, this is the index of byte k of row i. Each group of 32 elements takes 16 bytes; byte j of
    a group holds its elements j and j + 16 (see `Int4Matrix`). `codebook`: see `MatmulTask`. `wide`
    is scratch, float32 `[width]` for each thread. `dtype` is the dtype of `result`, and of a table
    that is not quantized. An int8 table has `scales`, one for each row. A 4-bit table has `groups`,
    the scales of its groups, and maybe `minima`. With `adds`, rows are added to `result`; the table
    is then not quantized.
    """

    _fields_ = task_fields(
        "ids table scales wide result num_tokens num_rows width lanes panel positions step dtype"
        " adds groups minima codebook"
    )


EMBEDDING_TASK = np.dtype(EmbeddingTask)


@loop
def _widen_groups(t: Any, row: int, first: int, wide: int) -> None:
    """Write a row of a 4-bit table to `wide` as float32. The row begins at byte `first`."""
    count = (t.width + 31) // 32
    for k in range(t.width):
        group, byte = k // 32, k % 16
        index = first + group * 16 * t.lanes + byte // 4 * t.step + byte % 4
        value = get_half_byte(t.table, index, k % 32 // 16)
        place = (row // t.lanes * count + group) * t.lanes + row % t.lanes
        scale = get_half(t.groups, place)
        if t.codebook:
            put(wide, k, get_byte(t.codebook, value) * scale)
        else:
            offset = get_half(t.minima, place) if t.minima else np.float32(-8.0) * scale
            put(wide, k, value * scale + offset)


@loop
def _embed_token(t: Any, token: int, wide: int) -> None:
    row, to, width, positions = get_long(t.ids, token), token * t.width, t.width, t.positions
    if row < 0 or row >= t.num_rows:  # NaN makes an invalid id visible; no other memory is read
        for i in range(0, width, LANES):
            store_as(t.dtype, t.result, to + i, splat(NAN), width - i)
        return
    first = row // t.lanes * t.panel + row % t.lanes * positions
    if t.adds:
        for i in range(0, width, LANES):
            value = load_as(t.dtype, t.result, to + i, width - i)
            value = value + load_as(t.dtype, t.table, first + i, width - i)
            store_as(t.dtype, t.result, to + i, value, width - i)
        return
    if t.groups:
        _widen_groups(t, row, first, wide)
        for i in range(0, width, LANES):
            store_as(t.dtype, t.result, to + i, load_part(wide, i, width - i), width - i)
        return
    if not t.scales:
        for k in range(width):
            index = first + k // positions * t.step + k % positions
            move_item(t.dtype, t.result, to + k, t.table, index)
        return
    scale = get(t.scales, row)
    for k in range(width):
        put(wide, k, get_byte(t.table, first + k // positions * t.step + k % positions) * scale)
    for i in range(0, width, LANES):
        store_as(t.dtype, t.result, to + i, load_part(wide, i, width - i), width - i)


def embed(address: int) -> None:
    """Write or add the embedding of each token to `result`; NaN if its id is out of range."""
    t = task_at(address, EMBEDDING_TASK)
    wide = t.wide + claim(address, NEXT_THREAD) * 4 * t.width
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in share_of(t, part, t.num_tokens):
            _embed_token(t, token, wide)
        part = claim(address, NEXT_PART)
