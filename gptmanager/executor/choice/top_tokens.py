"""`TopTokens`: the most probable tokens of a step's choices, for the rows that ask for them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gptmanager.executor.step_in_flight import SamplingRows
from gptmanager.step import TopLogProbs


class TopTokens:
    """The top tokens of S choices. The choices of a row are consecutive.

    `counts` int32 `[rows]`: how many top tokens each row asks for. `wanted` int32 `[S]`: for each
    choice, the count of its row. `most`: the largest count. At least one row asks for some.
    """

    def __init__(self, rows: SamplingRows, counts: np.ndarray) -> None:
        self.wanted = counts.repeat(np.diff(rows.firsts))
        self.most = int(counts.max())
        self._counts = counts
        self._firsts = rows.firsts
        self._log_probs = np.zeros((len(self.wanted), self.most), dtype=np.float32)
        self._ids = np.zeros((len(self.wanted), self.most), dtype=np.int32)

    def put(self, choices: np.ndarray, log_probs: np.ndarray, ids: np.ndarray) -> None:
        """Store the log probabilities and ids `[n, most]` of n choices, each best first."""
        self._log_probs[choices], self._ids[choices] = log_probs, ids

    def by_row(self) -> tuple[TopLogProbs, ...]:
        """Return the top tokens of each row that asks for them."""
        found = []
        for row in np.flatnonzero(self._counts).tolist():
            own, count = slice(self._firsts[row], self._firsts[row + 1]), self._counts[row]
            found.append(TopLogProbs(row, self._log_probs[own, :count], self._ids[own, :count]))
        return tuple(found)


def joined(row: int, parts: Iterable[TopLogProbs]) -> TopLogProbs:
    """Concatenate the top tokens of consecutive positions of a row."""
    _, log_probs, ids = zip(*parts, strict=True)
    return TopLogProbs(row, np.concatenate(log_probs), np.concatenate(ids))
