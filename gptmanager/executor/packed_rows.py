"""`PackedRows`: a batch as CPU arrays, and how it is padded or split.

This module has only arithmetic of rows and positions. It does not know tensors and schedules.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class PackedRows(NamedTuple):
    """A batch as CPU arrays: R sequences with T tokens in total, S of which get logits.

    `row_starts` `[R + 1]` and `kv_lengths` `[R]` are int32. `lines` `[R]`, `positions` and
    `token_lines` `[T]`, `sample_index` and `sample_rows` `[S]` are int64. `lines` and `token_lines`
    are the lines of the executor's tables (see `Lines`) for each sequence and for each token. The
    other fields are those of `models.batch.Batch`.
    """

    lines: np.ndarray
    row_starts: np.ndarray
    kv_lengths: np.ndarray
    positions: np.ndarray
    token_lines: np.ndarray
    sample_index: np.ndarray
    sample_rows: np.ndarray
    num_context_rows: int


def offsets(counts: np.ndarray) -> np.ndarray:
    """Return the concatenation of `range(count)` for each of these counts, int64."""
    ends = np.cumsum(counts)
    found: np.ndarray = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
    return found


def padded(rows: PackedRows, num_rows: int) -> PackedRows:
    """Pad a batch of rows with one token each to `num_rows` rows.

    The added rows have no tokens, and their logits mean nothing.
    """
    missing = num_rows - len(rows.lines)

    def pad(array: np.ndarray, value: int = 0) -> np.ndarray:
        return np.concatenate((array, np.full(missing, value, dtype=array.dtype)))

    every = np.arange(num_rows, dtype=np.int64)
    return PackedRows(
        lines=pad(rows.lines),
        row_starts=pad(rows.row_starts, int(rows.row_starts[-1])),
        kv_lengths=pad(rows.kv_lengths),
        positions=pad(rows.positions),
        token_lines=pad(rows.token_lines),
        sample_index=every,
        sample_rows=every,
        num_context_rows=0,
    )


def halves(rows: PackedRows) -> tuple[tuple[PackedRows, np.ndarray], ...]:
    """Split a batch into two, to run one after the other.

    Each half has the indices of its samples in the `sample_index` of `rows`. A batch of one row is
    split between its tokens. Returns () for a single token.
    """
    num_rows, num_tokens = len(rows.lines), int(rows.row_starts[-1])
    if num_rows > 1:
        middle = num_rows // 2
        cut = int(rows.row_starts[middle])
        return _part(rows, slice(0, middle), 0, cut), _part(
            rows, slice(middle, num_rows), cut, num_tokens
        )
    if num_tokens < 2:
        return ()
    cut, whole = num_tokens // 2, slice(0, 1)
    first, samples = _part(rows, whole, 0, cut)
    shorter = first._replace(kv_lengths=rows.kv_lengths - np.int32(num_tokens - cut))
    return (shorter, samples), _part(rows, whole, cut, num_tokens)


def _part(rows: PackedRows, own: slice, first: int, last: int) -> tuple[PackedRows, np.ndarray]:
    """Return the tokens `first` to `last` (excluded) of the rows `own`, and their samples."""
    ends = np.clip(rows.row_starts[own.start : own.stop + 1] - first, 0, last - first)
    samples = np.flatnonzero((rows.sample_index >= first) & (rows.sample_index < last))
    tokens = slice(first, last)
    part = PackedRows(
        lines=rows.lines[own],
        row_starts=ends.astype(np.int32),
        kv_lengths=rows.kv_lengths[own],
        positions=rows.positions[tokens],
        token_lines=rows.token_lines[tokens],
        sample_index=rows.sample_index[samples] - first,
        sample_rows=rows.sample_rows[samples] - own.start,
        num_context_rows=min(max(rows.num_context_rows - own.start, 0), own.stop - own.start),
    )
    return part, samples
