"""What attention is told: its task, and where a thread's scratch lies.

Python and compiled code compute these sizes by the same functions. Nothing is read or written here.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numba.extending import register_jitable

from gptmanager.kernels.lanes import LANES
from gptmanager.kernels.threads import task_fields

TILE_ROWS = 32
SPAN = 64


class AttentionTask(ctypes.Structure):
    """Addresses, sizes in elements, `window` 0 for none, `scratch_bytes` for each thread.

    `dtype`: of `q` and `result`; `page_dtype`: of keys and values, and `item_bytes` of it.
    `sink`: the number of first positions that are always seen. `page_tokens`: see `page_of`.
    `token_major`: the keys of a page are `[tokens, head_dim]`, and transposed as they are read.
    """

    _fields_ = task_fields(
        "q keys values result row_starts kv_lengths slots block_tables num_rows table_width"
        " num_heads num_kv_heads head_dim tokens_per_block block_stride token_major page_tokens"
        " window sink scratch scratch_bytes dtype page_dtype item_bytes",
        "scale",
    )


TASK = np.dtype(AttentionTask)


@register_jitable(error_model="numpy")
def padded(size: int) -> int:
    """`size` rounded up to whole vectors."""
    return (size + LANES - 1) // LANES * LANES


@register_jitable(error_model="numpy")
def tile_tokens(group: int) -> int:
    """Tokens of a tile, with `group` query heads to a KV head."""
    return max(1, TILE_ROWS // group)


def page_of(tokens_per_block: int, token_major: bool, blocks_per_sequence: int) -> int:
    """Positions that are read as one page: a block, or a part of one whose keys may be cut."""
    fits = blocks_per_sequence == 1 or tokens_per_block % SPAN == 0
    return min(SPAN, tokens_per_block) if token_major and fits else tokens_per_block


@register_jitable(error_model="numpy")
def span_of(page_tokens: int) -> int:
    """Positions of a span: whole pages."""
    return page_tokens * max(1, SPAN // page_tokens)


def scratch_floats(group: int, head_dim: int, page_tokens: int, token_major: bool) -> int:
    """What `areas_at` lays out."""
    row = 2 * padded(head_dim) + LANES + padded(span_of(page_tokens)) + LANES + 3
    keys = padded(head_dim) * padded(page_tokens) + LANES * LANES if token_major else 0
    return padded(tile_tokens(group) * group) * row + keys


@register_jitable(error_model="numpy")
def areas_at(t: Any, scratch: int) -> tuple[int, ...]:
    """Addresses of queries, outputs and lane sums by row; three numbers for each row; scores; keys
    that are transposed.
    """
    group = t.num_heads // t.num_kv_heads
    room, wide = padded(tile_tokens(group) * group), padded(t.head_dim)
    mixed = scratch + 4 * room * wide
    sums = mixed + 4 * room * wide
    highest = sums + 4 * room * LANES
    risen, shrink = highest + 4 * room, highest + 8 * room
    scores = shrink + 4 * room
    turned = scores + 4 * room * (padded(span_of(t.page_tokens)) + LANES)
    return scratch, mixed, sums, highest, risen, shrink, scores, turned
