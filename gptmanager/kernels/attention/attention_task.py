"""The task of attention: its fields, the pages it reads, and the layout of a thread's scratch.

Python and compiled code compute the sizes of tiles and scratch with the same functions.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, TypeVar

import numpy as np
import torch
from numba.extending import register_jitable

from gptmanager.kernels.attention.attention_arguments import Pages, RowSpans
from gptmanager.kernels.per_token_kernels import RopeTask
from gptmanager.kernels.simd.dtypes import DTYPES
from gptmanager.kernels.simd.lanes import LANES
from gptmanager.kernels.simd.threads import address_of, check_layout, task_fields

TILE_ROWS = 32
SPAN = 64


class AttentionTask(ctypes.Structure):
    """Addresses, sizes in elements, and the number of `scratch_bytes` of each thread.

    `dtype` is the dtype of `q` and `result`. Keys and values have `page_dtype`, with `item_bytes`
    per element. With `window` 0, a token sees all positions up to its own. Otherwise the token sees
    its window and the first `sink` positions. If `chunked`, windows begin at multiples of `window`.
    `sinks` is the address of a sink score for each head, in `sink_dtype`, or 0 without sink scores.
    A sink score has no value vector. With `softcap` 0, scores are not limited. `page_of` explains
    `page_tokens`. With `token_major`, the keys of a page are `[tokens, head_dim]`, and are
    transposed when they are read.
    """

    _fields_ = task_fields(
        "q keys values result row_starts kv_lengths slots block_tables num_rows table_width"
        " num_heads num_kv_heads head_dim tokens_per_block block_stride token_major page_tokens"
        " window chunked sink sinks sink_dtype scratch scratch_bytes dtype page_dtype item_bytes",
        "scale softcap",
    )


TASK = np.dtype(AttentionTask)


@register_jitable(error_model="numpy")
def padded(size: int) -> int:
    """`size` rounded up to a multiple of LANES."""
    return (size + LANES - 1) // LANES * LANES


@register_jitable(error_model="numpy")
def tile_tokens(group: int) -> int:
    """The number of tokens in a tile, with `group` query heads for each KV head."""
    return max(1, TILE_ROWS // group)


def page_of(tokens_per_block: int, token_major: bool, blocks_per_sequence: int) -> int:
    """Return how many positions are read as one page: usually all positions of a block.

    With token-major keys, a block of more than SPAN positions is read as pages of SPAN positions,
    if SPAN divides the size of the block or a sequence has only one block.
    """
    fits = blocks_per_sequence == 1 or tokens_per_block % SPAN == 0
    return min(SPAN, tokens_per_block) if token_major and fits else tokens_per_block


@register_jitable(error_model="numpy")
def span_of(page_tokens: int) -> int:
    """The number of positions in a span, a multiple of `page_tokens`."""
    return page_tokens * max(1, SPAN // page_tokens)


def scratch_floats(group: int, head_dim: int, page_tokens: int, token_major: bool) -> int:
    """Return how many float32 of scratch a thread needs for the areas of `areas_at`."""
    row = 2 * padded(head_dim) + LANES + padded(span_of(page_tokens)) + LANES + 3
    keys = padded(head_dim) * padded(page_tokens) + LANES * LANES if token_major else 0
    return padded(tile_tokens(group) * group) * row + keys


@register_jitable(error_model="numpy")
def areas_at(t: Any, scratch: int) -> tuple[int, ...]:
    """Return the addresses of a thread's scratch areas, all float32.

    The first seven have, for each row of a tile: its scaled query, its output, its sums by lane,
    its highest score so far, its highest score including the current span, the factor for earlier
    sums, and its scores. The last one has transposed keys.
    """
    group = t.num_heads // t.num_kv_heads
    room, wide = padded(tile_tokens(group) * group), padded(t.head_dim)
    mixed = scratch + 4 * room * wide
    sums = mixed + 4 * room * wide
    highest = sums + 4 * room * LANES
    risen, shrink = highest + 4 * room, highest + 8 * room
    scores = shrink + 4 * room
    transposed = scores + 4 * room * (padded(span_of(t.page_tokens)) + LANES)
    return scratch, mixed, sums, highest, risen, shrink, scores, transposed


Task = TypeVar("Task", RopeTask, AttentionTask)


def on_pages(kind: type[Task], pages: Pages) -> Task:
    """Return a task with the fields that describe `pages`.

    The fields are cached, because a layer's pages never change.
    """
    keys, values = pages[:2]
    layout = keys.shape, keys.stride(), values.stride(), keys.dtype, values.dtype
    known = _page_fields(kind, keys.data_ptr(), values.data_ptr(), *layout)
    return kind.from_buffer_copy(known)


@functools.lru_cache(maxsize=1024)
def _page_fields(
    kind: type[Task],
    keys_address: int,
    values_address: int,
    shape: torch.Size,
    key_strides: tuple[int, ...],
    value_strides: tuple[int, ...],
    key_dtype: torch.dtype,
    dtype: torch.dtype,
) -> Task:
    """Return a task with the fields that describe pages.

    Each block must be contiguous. The keys of a block may also be transposed in memory:
    `[num_kv_heads, tokens_per_block, head_dim]`. There may be gaps between blocks if keys and
    values have the same stride. Raises TypeError for other layouts.
    """
    num_blocks, num_kv_heads, head_dim, tokens_per_block = shape
    block = torch.empty_strided((1, *shape[1:]), key_strides, dtype=key_dtype, device="meta")
    values_of = 1, num_kv_heads, tokens_per_block, head_dim
    value_block = torch.empty_strided(values_of, value_strides, dtype=dtype, device="meta")
    if num_blocks > 1 and key_strides[0] != value_strides[0]:
        strides = key_strides[0], value_strides[0]
        raise TypeError(f"keys and values must have equal block strides, got {strides}")
    token_major = not block.is_contiguous()
    for tensor in (block.mT if token_major else block, value_block):
        check_layout(tensor, dtype)
    return kind(
        keys=keys_address,
        values=values_address,
        page_dtype=DTYPES[dtype],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tokens_per_block=tokens_per_block,
        block_stride=key_strides[0],
        token_major=token_major,
    )


def give_rows(task: RopeTask | AttentionTask, rows: RowSpans) -> None:
    """Set the fields of `task` that describe rows."""
    task.row_starts = address_of(rows.row_starts, torch.int32)
    task.kv_lengths = address_of(rows.kv_lengths, torch.int32)
    task.slots = address_of(rows.slots, torch.int32)
    task.block_tables = address_of(rows.block_tables, torch.int32)
    task.table_width = rows.block_tables.shape[1]


@functools.cache
def page_sizes(
    group: int, head_dim: int, tokens_per_block: int, token_major: bool, blocks_per_sequence: int
) -> tuple[int, int]:
    """Return the number of positions in a page, and of bytes in a thread's scratch."""
    page_tokens = page_of(tokens_per_block, token_major, blocks_per_sequence)
    return page_tokens, 4 * scratch_floats(group, head_dim, page_tokens, token_major)
