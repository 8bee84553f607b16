"""Packed rows of a step, written down as spans of positions."""

import numpy as np

from gptmanager.executor.packed_rows import PackedRows


def packed(num_context, *spans, samples=None, every=False):
    """Rows from their first to their last position, excluded; the last token of each is sampled.

    `num_context`: how many rows are contexts, None: those of several tokens. `samples`: the rows
    that are sampled. With `every`, all tokens are.
    """
    starts, ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    counts, lines = ends - starts, np.arange(len(spans))
    bounds = np.concatenate(([0], np.cumsum(counts)))
    token_lines = np.repeat(lines, counts)
    sampled = lines if samples is None else np.array(samples, dtype=np.int64)
    return PackedRows(
        lines=lines,
        row_starts=bounds.astype(np.int32),
        kv_lengths=ends.astype(np.int32),
        positions=np.concatenate([np.arange(*span) for span in spans]),
        token_lines=token_lines,
        sample_index=np.arange(bounds[-1]) if every else bounds[1:][sampled] - 1,
        sample_rows=token_lines if every else sampled,
        num_context_rows=int((counts > 1).sum()) if num_context is None else num_context,
    )
