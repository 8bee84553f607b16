"""Compiled loops over the memories of heads, which the gated delta rule and Mamba-2 share.

A column of a memory does not depend on other columns. So a thread keeps `WIDTH` columns of a head's
memory, a tile, in the cache while it runs the tokens of a row.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

from gptmanager.kernels.simd.dtypes import ZERO
from gptmanager.kernels.simd.lanes import (
    LANES,
    fma,
    get,
    load,
    load_part,
    loop,
    splat,
    store,
    store_part,
)

WIDTH = 2 * LANES  # the columns of a memory that a thread updates at a time


@loop
def load_tile(tile: int, memory: int, column: int, rows: int, columns: int) -> None:
    """Copy the columns of a memory `[rows, columns]` from `column` on to a tile `[rows, 32]`."""
    count = columns - column
    for i in range(rows):
        at = i * columns + column
        store(tile, i * WIDTH, load_part(memory, at, count))
        store(tile, i * WIDTH + LANES, load_part(memory, at + LANES, count - LANES))


@loop
def store_tile(tile: int, memory: int, column: int, rows: int, columns: int) -> None:
    """Copy a tile back, as `load_tile` has copied it."""
    count = columns - column
    for i in range(rows):
        at = i * columns + column
        store_part(memory, at, load(tile, i * WIDTH), count)
        store_part(memory, at + LANES, load(tile, i * WIDTH + LANES), count - LANES)


@loop
def _change_row(tile: int, at: int, by: Any, key: Any, change: Any) -> Any:
    """Set sixteen elements of a tile to `by` times themselves plus `key * change`; return them."""
    own = fma(key, change, load(tile, at) * by)
    store(tile, at, own)
    return own


@loop
def advance(tile: int, key: int, query: int, decay: float, left: Any, right: Any, size: int) -> Any:
    """Set a tile `[size, 32]` to `decay * tile + key * change`; return `query @` the new tile.

    `left` and `right` are the halves of `change [32]`. The result `[32]` is also a pair of halves.
    """
    a, b, c, d = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
    whole, by = size // 2 * 2, splat(decay)
    for i in range(0, whole, 2):
        at, k, q = i * WIDTH, splat(get(key, i)), splat(get(query, i))
        a = fma(q, _change_row(tile, at, by, k, left), a)
        b = fma(q, _change_row(tile, at + LANES, by, k, right), b)
        at, k, q = at + WIDTH, splat(get(key, i + 1)), splat(get(query, i + 1))
        c = fma(q, _change_row(tile, at, by, k, left), c)
        d = fma(q, _change_row(tile, at + LANES, by, k, right), d)
    for i in range(whole, size):
        at, k, q = i * WIDTH, splat(get(key, i)), splat(get(query, i))
        a = fma(q, _change_row(tile, at, by, k, left), a)
        b = fma(q, _change_row(tile, at + LANES, by, k, right), b)
    return a + c, b + d
