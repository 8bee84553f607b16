"""How the work of generation attention is cut: once a step, on the CPU, for all layers.

It knows lengths and nothing of tensors' contents. Rows are cut at multiples of one stretch, so that
blocks of about equal work fill the device and a long row does not keep the others waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

STRETCH_UNIT = 64  # tokens that one pass of a block's warps takes
RESIDENT = 3  # blocks that run at the same time on a multiprocessor
_WAVES = 4  # how often each of them is replaced: what evens out unequal items


@dataclass(frozen=True, eq=False)
class GenerationPlan:
    """Items, longest first, and which partial results belong to which row.

    `items` int32 `[N, 4]`: row, first and last (excluded) position, number of its partial result or
    -1 where the item is the row's only one. `partial_starts` int32 `[R + 1]`.
    """

    items: Ints
    partial_starts: Ints

    @property
    def num_partials(self) -> int:
        return int(self.partial_starts[-1])

    def padded(self, num_items: int, num_rows: int) -> GenerationPlan:
        """With items that do nothing: a CUDA graph launches the same number at each replay."""
        if num_items < len(self.items) or num_rows < len(self.partial_starts) - 1:
            raise ValueError(f"{len(self.items)} items do not fit into {num_items}")
        items = np.full((num_items, 4), -1, dtype=np.int32)
        items[: len(self.items)] = self.items
        starts = np.full(num_rows + 1, self.num_partials, dtype=np.int32)
        starts[: len(self.partial_starts)] = self.partial_starts
        return GenerationPlan(items, starts)


def plan_generation(
    kv_lengths: Ints,
    num_kv_heads: int,
    num_multiprocessors: int,
    *,
    window: int | None = None,
    sink: int = 0,
    stretch: int | None = None,
) -> GenerationPlan:
    """The items of rows with one token each, the last of `kv_lengths[r]` >= 1 positions.

    `window`: only the last `window` positions are seen, and the first `sink`. `stretch`: the most
    tokens of an item, a multiple of STRETCH_UNIT; by default one that fills the device. A row's
    result depends on the stretch, by rounding: a fixed one makes it independent of the other rows.
    """
    last = kv_lengths.astype(np.int64)
    first = np.zeros_like(last) if window is None else np.maximum(last - window, 0)
    first_sunk = np.minimum(sink, first)
    if stretch is None:
        num_tokens = int((last - first + first_sunk).sum())
        stretch = default_stretch(num_tokens, num_kv_heads, num_multiprocessors)
    if stretch <= 0 or stretch % STRETCH_UNIT:
        raise ValueError(f"stretch={stretch} is no multiple of {STRETCH_UNIT}")
    rows, begins, ends = _pieces(first, last, stretch)
    if first_sunk.any():  # what lies between is not read
        sunk = _pieces(np.zeros_like(last), first_sunk, stretch)
        rows, begins, ends = (
            np.concatenate(both) for both in zip(sunk, (rows, begins, ends), strict=True)
        )
        order = np.argsort(rows, kind="stable")
        rows, begins, ends = rows[order], begins[order], ends[order]
    counts = np.bincount(rows, minlength=len(last))
    partials = np.where(counts > 1, counts, 0)
    starts = np.concatenate([[0], np.cumsum(partials)]).astype(np.int32)
    number = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    own = np.where(counts[rows] > 1, starts[rows] + number, -1)
    items = np.stack([rows, begins, ends, own], axis=1).astype(np.int32)
    longest_first = np.argsort(items[:, 1] - items[:, 2], kind="stable")
    return GenerationPlan(np.ascontiguousarray(items[longest_first]), starts)


def _pieces(
    first: npt.NDArray[np.int64], last: npt.NDArray[np.int64], stretch: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row, first and last (excluded) position of each piece, cut at multiples of `stretch`."""
    begin = first // stretch
    counts = -(-last // stretch) - begin
    rows = np.repeat(np.arange(len(last)), counts)
    number = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + begin[rows]
    begins = np.maximum(first[rows], number * stretch)
    return rows, begins, np.minimum(last[rows], (number + 1) * stretch)


def default_stretch(num_tokens: int, num_kv_heads: int, num_multiprocessors: int) -> int:
    """Tokens of an item, so that the items of `num_tokens` fill the device some times over."""
    items = max(1, num_multiprocessors * RESIDENT * _WAVES // num_kv_heads)
    return max(1, -(-num_tokens // (items * STRETCH_UNIT))) * STRETCH_UNIT


def max_num_items(
    num_rows: int,
    num_kv_heads: int,
    num_multiprocessors: int,
    *,
    window: int | None = None,
    sink: int = 0,
) -> int:
    """The most items that `plan_generation` makes of this number of rows, of any lengths."""
    if not num_rows:
        return 0
    # of a row these items may be shorter than a stretch: the last, the first behind a window, and
    # the last of the sink
    shorter = 1 + (window is not None) + (window is not None and sink > 0)
    return max(1, num_multiprocessors * RESIDENT * _WAVES // num_kv_heads) + shorter * num_rows
