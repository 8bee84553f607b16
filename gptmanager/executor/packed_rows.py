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
    are the lines of the executor's tables (see `Lines`) for each sequence and for each token.
    `samples_prompts`: some samples are prompt tokens for which the host wants logits; no token is
    chosen from these logits. The other fields are those of `models.batch.Batch`.
    """

    lines: np.ndarray
    row_starts: np.ndarray
    kv_lengths: np.ndarray
    positions: np.ndarray
    token_lines: np.ndarray
    sample_index: np.ndarray
    sample_rows: np.ndarray
    num_context_rows: int
    samples_prompts: bool = False


class StepShape(NamedTuple):
    """The sizes of a step that is captured as a CUDA graph and may have context rows.

    The step has `tokens` tokens and `samples` samples. The first `long_rows` rows have any number
    of tokens. The `single_rows` rows after them have one token at most.
    """

    tokens: int
    long_rows: int
    single_rows: int
    samples: int


def offsets(counts: np.ndarray) -> np.ndarray:
    """Return the concatenation of `range(count)` for each count in `counts`, as int64."""
    ends = np.cumsum(counts)
    found: np.ndarray = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
    return found


def padded(rows: PackedRows, num_rows: int) -> PackedRows:
    """Pad a batch of rows with one token each to `num_rows` rows.

    The added rows have no tokens, and their logits mean nothing.
    """
    every = np.arange(num_rows, dtype=np.int64)
    return PackedRows(
        lines=_lengthened(rows.lines, num_rows),
        row_starts=_lengthened(rows.row_starts, num_rows + 1, int(rows.row_starts[-1])),
        kv_lengths=_lengthened(rows.kv_lengths, num_rows),
        positions=_lengthened(rows.positions, num_rows),
        token_lines=_lengthened(rows.token_lines, num_rows),
        sample_index=every,
        sample_rows=every,
        num_context_rows=0,
    )


def fitted(rows: PackedRows, shape: StepShape) -> PackedRows | None:
    """Pad a batch to `shape`; return None if the batch does not fit.

    The added rows have no tokens. They are inserted after the last row that is a context or has
    several tokens, and at the end. The added tokens belong to no row, and the added samples mean
    nothing.
    """
    counts = np.diff(rows.row_starts)
    several = np.flatnonzero(counts > 1)  # a generation row has several tokens if it has drafts
    num_long = max(rows.num_context_rows, int(several[-1]) + 1 if several.size else 0)
    num_single = len(counts) - num_long
    sizes = rows.row_starts[-1], num_long, num_single, len(rows.sample_index)
    if any(size > most for size, most in zip(sizes, shape, strict=True)):
        return None
    places = np.concatenate((np.arange(num_long), shape.long_rows + np.arange(num_single)))

    def spread(array: np.ndarray) -> np.ndarray:
        result = np.zeros(shape.long_rows + shape.single_rows, dtype=array.dtype)
        result[places] = array
        return result

    return PackedRows(
        lines=spread(rows.lines),
        row_starts=np.concatenate(([0], np.cumsum(spread(counts)))).astype(np.int32),
        kv_lengths=spread(rows.kv_lengths),
        positions=_lengthened(rows.positions, shape.tokens),
        token_lines=_lengthened(rows.token_lines, shape.tokens),
        sample_index=_lengthened(rows.sample_index, shape.samples),
        sample_rows=_lengthened(places[rows.sample_rows], shape.samples),
        num_context_rows=shape.long_rows,
    )


def _lengthened(array: np.ndarray, length: int, value: int = 0) -> np.ndarray:
    """Return the array with `value` appended up to `length`."""
    return np.concatenate((array, np.full(length - len(array), value, dtype=array.dtype)))


def halves(rows: PackedRows) -> tuple[tuple[PackedRows, np.ndarray], ...]:
    """Split a batch into two, to run one after the other.

    Returns each half with the indices of its samples in `rows.sample_index`. A single row is split
    between two of its tokens. Returns () for a single token.
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
        samples_prompts=rows.samples_prompts,
    )
    return part, samples
