"""Divide the work of generation attention among thread blocks: once a step, on the CPU.

A plan depends only on lengths, and serves all layers with the same heads and window. It never has
more blocks than can run at the same time: a block that had to wait would run after all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]

PASS = 64  # tokens that a block's warps process at a time; also the unit of work
WHOLE = 1 << 30  # a `stretch` longer than any row: rows are not cut
# from docs/benchmarks/model_of_generation_attention.md:
_START = 1  # passes that a block could do while it finds the pages of an item
_MERGE = 0.09  # passes that a block could do while it merges one more partial result
_SNAP = 1  # passes: a cut this close to the start or end of a span moves there
_SHORTEST = 3  # passes: the least work of a block, including `_START` for each span


class Places(NamedTuple):
    """The thread blocks that a device runs at a time: `resident` on each multiprocessor."""

    multiprocessors: int
    resident: int

    def blocks(self, num_kv_heads: int) -> int:
        """Return the number of blocks per KV head that can run at the same time."""
        return max(1, self.multiprocessors * self.resident // num_kv_heads)


@dataclass(frozen=True, eq=False)
class GenerationPlan:
    """The division of rows into items, and of the items among blocks.

    `items` int32 `[N, 4]`, in the order of rows: row, first and last (excluded) position, and the
    number of the item's partial result (-1 if the row has no other item). Block b of each KV head
    processes the items `block_starts[b]` to `block_starts[b + 1]` (excluded); int32 `[B + 1]`. The
    partial results of row r begin at `partial_starts[r]`; int32 `[R + 1]`.
    """

    items: Ints
    block_starts: Ints
    partial_starts: Ints

    @property
    def num_partials(self) -> int:
        return int(self.partial_starts[-1])

    def padded(self, num_items: int, num_rows: int) -> GenerationPlan:
        """Return the plan, padded with items and rows that do nothing, for CUDA graphs.

        Raises ValueError if the plan has more items or rows.
        """
        if num_items < len(self.items) or num_rows < len(self.partial_starts) - 1:
            raise ValueError(
                f"{len(self.items)} items of {len(self.partial_starts) - 1} rows do not fit into "
                f"{num_items} items of {num_rows} rows"
            )
        items = np.full((num_items, 4), -1, dtype=np.int32)
        items[: len(self.items)] = self.items
        starts = np.full(num_rows + 1, self.num_partials, dtype=np.int32)
        starts[: len(self.partial_starts)] = self.partial_starts
        return GenerationPlan(items, self.block_starts, starts)


class _Spans(NamedTuple):
    """Spans of positions to read, `first` to `last` (excluded) of `rows`, in the order of rows.

    A row has up to two spans: the sink, then the window. Spans are cut at multiples of PASS.
    """

    rows: Numbers
    first: Numbers
    last: Numbers

    @property
    def passes(self) -> Numbers:
        return -(-self.last // PASS) - self.first // PASS

    def pieces(self, stretch: int) -> Numbers:
        """Return the number of pieces of each span if it is cut at multiples of `stretch`."""
        return -(-self.last // stretch) - self.first // stretch

    def cut(self, own: Numbers, at: Numbers) -> _Spans:
        """Return pieces of the spans: piece n begins at position `at[n]` of span `own[n]`.

        A position before the span means its start. A piece ends where the next piece of the same
        span begins, or with the span. `own` is in ascending order.
        """
        begins, ends = np.maximum(self.first[own], at), self.last[own]
        follows = own[1:] == own[:-1]
        ends[:-1][follows] = begins[1:][follows]
        return _Spans(self.rows[own], begins, ends)


def plan_generation(
    kv_lengths: Ints,
    num_kv_heads: int,
    places: Places,
    *,
    window: int | None = None,
    sink: int = 0,
    chunked: bool = False,
    stretch: int | None = None,
) -> GenerationPlan:
    """Plan the items of rows with one new token each.

    Row r has `kv_lengths[r]` >= 1 positions; its new token is at the last one. With a
    `window`, only the last `window` positions and the first `sink` positions are visible. If
    `chunked`, the window begins at the last multiple of `window` instead. An item has at most
    `stretch` tokens, a multiple of PASS. By default each block has at most one item. If there are
    too many rows for that, or too uneven rows, all blocks have equal shares of the work instead (a
    share may have parts of several rows). Because of rounding, the result of a row depends on where
    the row is cut. With a given `stretch`, the cuts do not depend on other rows. Raises ValueError
    if `stretch` is not positive, or not a multiple of PASS.
    """
    spans = _spans(kv_lengths.astype(np.int64), window, sink, chunked)
    num_blocks = places.blocks(num_kv_heads)
    if stretch is None:
        stretch = _stretch_of_one_item_each(spans, num_kv_heads, num_blocks, places)
    elif stretch <= 0 or stretch % PASS:
        raise ValueError(f"stretch={stretch} must be a positive multiple of {PASS}")
    if stretch is None:
        pieces, starts = _equal_shares(spans, num_blocks)
    else:
        counts = spans.pieces(stretch)
        own = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(own)) - (np.cumsum(counts) - counts)[own]
        pieces = spans.cut(own, (spans.first[own] // stretch + number) * stretch)
        starts = _shared_out(pieces, num_blocks)
    return _numbered(pieces, starts, len(kv_lengths))


def max_num_items(
    num_rows: int, num_kv_heads: int, places: Places, *, window: int | None = None, sink: int = 0
) -> int:
    """Return the most items that `plan_generation` creates for rows of any lengths.

    This holds for a `stretch` of WHOLE or None: each span is an item, and each cut between two
    blocks adds an item.
    """
    spans = num_rows * (1 + (window is not None and sink > 0))
    return spans and spans + places.blocks(num_kv_heads) - 1


def _spans(last: Numbers, window: int | None, sink: int, chunked: bool) -> _Spans:
    rows = np.arange(len(last))
    if window is None:
        return _Spans(rows, np.zeros_like(last), last)
    first = (last - 1) // window * window if chunked else last - window
    first[first <= sink] = 0  # the sink and the window overlap
    if not sink or not first.any():
        return _Spans(rows, first, last)
    sunk = np.where(first > 0, sink, 0)
    both = np.stack([np.zeros_like(last), first], axis=1), np.stack([sunk, last], axis=1)
    begins, ends = (own.reshape(-1) for own in both)
    is_read = begins < ends
    return _Spans(np.repeat(rows, 2)[is_read], begins[is_read], ends[is_read])


def _stretch_of_one_item_each(
    spans: _Spans, num_kv_heads: int, num_blocks: int, places: Places
) -> int | None:
    """Return the shortest stretch that results in at most one item per block, or None.

    Merging a row must not take longer than reading it. A row of p passes in n items is read in
    p / n passes and merged in n * _MERGE passes, so an item has at least sqrt(p * _MERGE) passes.
    The result is None if there are more spans than blocks, or no spans. It is also None if an item
    would be longer than a multiprocessor's share of all work, because too few blocks would remain
    at the end to keep the memory busy.
    """
    if len(spans.rows) > num_blocks or not len(spans.rows):
        return None
    passes = spans.passes
    num_passes, longest = int(passes.sum()), int(passes.max())
    low = max(1, -(-num_passes // num_blocks), round(sqrt(_MERGE * longest)))
    high = max(low, num_passes * num_kv_heads // places.multiprocessors)
    if spans.pieces(high * PASS).sum() > num_blocks:
        return None
    while low < high:
        middle = (low + high) // 2
        if spans.pieces(middle * PASS).sum() > num_blocks:
            low = middle + 1
        else:
            high = middle
    return low * PASS


def _equal_shares(spans: _Spans, num_blocks: int) -> tuple[_Spans, Numbers]:
    """Cut the concatenated work of all spans evenly; return pieces, and each block's first piece.

    The work of a span is its passes plus `_START`. A block that begins within a span costs another
    `_START`, which is not counted because nearly all blocks begin within a span.
    """
    ends = np.cumsum(spans.passes + _START)
    begins = ends - spans.passes - _START
    total = int(ends[-1]) if len(ends) else 0
    num_shares = min(num_blocks, max(1, total // _SHORTEST))
    cuts = np.arange(1, num_shares) * total // num_shares
    span = np.searchsorted(ends, cuts, side="right")
    cuts = np.where(cuts - begins[span] <= _START + _SNAP, begins[span], cuts)
    cuts = np.where(ends[span] - cuts <= _SNAP, ends[span], cuts)
    inner = cuts[(cuts > begins[span]) & (cuts < ends[span])]
    points = np.sort(np.concatenate([begins, inner]))
    own = np.searchsorted(ends, points, side="right")
    at = (points - begins[own] - _START + spans.first[own] // PASS) * PASS
    starts = np.full(num_blocks + 1, len(points))
    starts[0], starts[1:num_shares] = 0, np.searchsorted(points, cuts)
    return spans.cut(own, at), starts


def _shared_out(pieces: _Spans, num_blocks: int) -> Numbers:
    """Return each block's first piece: one piece per block if possible, else about equal work."""
    count = len(pieces.rows)
    if count <= num_blocks:
        return np.minimum(np.arange(num_blocks + 1), count)
    ends = np.cumsum(pieces.passes + _START)
    middles = ends - (pieces.passes + _START) / 2
    starts: Numbers = np.searchsorted(middles, np.arange(num_blocks + 1) * ends[-1] / num_blocks)
    return starts


def _numbered(pieces: _Spans, block_starts: Numbers, num_rows: int) -> GenerationPlan:
    """Return the plan for pieces in the order of rows, with numbered partial results."""
    rows = pieces.rows
    counts = np.bincount(rows, minlength=num_rows)
    partials = np.where(counts > 1, counts, 0)
    starts = np.concatenate([[0], np.cumsum(partials)])
    number = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    own = np.where(counts[rows] > 1, starts[rows] + number, -1)
    items = np.empty((len(rows), 4), dtype=np.int32)
    for column, values in enumerate((*pieces, own)):
        items[:, column] = values
    return GenerationPlan(items, block_starts.astype(np.int32), starts.astype(np.int32))
