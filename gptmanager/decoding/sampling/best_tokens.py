"""The best tokens of rows of scores, and their log probabilities."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


def best_tokens(scores: Tensor, count: int) -> tuple[Ids, Floats]:
    """Return the `count` best ids of each row of `[S, vocab]`, and their scores, best first.

    Equal scores rank by ascending id. Among scores of -inf any id may be returned.
    """
    values, ids = (found.numpy() for found in scores.topk(min(count, scores.shape[1]), dim=1))
    rows, last = scores.numpy(), values[:, -1:]
    ties = ((rows >= last).sum(1) > ids.shape[1]) & (last[:, 0] > -np.inf)
    for index in np.flatnonzero(ties):  # topk may return any of several equal scores
        row, lowest = rows[index], last[index]
        best = np.flatnonzero(row > lowest)
        ids[index] = np.concatenate((best, np.flatnonzero(row == lowest)))[: ids.shape[1]]
        values[index] = row[ids[index]]
    order = np.lexsort((ids, -values))
    return np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)


def best_ids(scores: Tensor, count: int) -> Ids:
    """Return the ids of `best_tokens`; among scores of -inf the lowest ids are returned."""
    ids, values = best_tokens(scores, count)
    for index in np.flatnonzero(values[:, -1:] == -np.inf):
        missing = int((values[index] == -np.inf).sum())
        impossible = np.flatnonzero(scores[index].numpy() == -np.inf)
        ids[index, ids.shape[1] - missing :] = impossible[:missing]
    return ids


def log_probs_from_known(scores: Floats, known_scores: Floats, known_log_probs: Floats) -> Floats:
    """Return the log probabilities of tokens with the logits `scores` `[S, k]`, as float32.

    One token of each row has the logit `known_scores` `[S]` and the log probability
    `known_log_probs` `[S]`. Two log probabilities differ by as much as their logits, so no row is
    summed again. All logits have been divided by the temperature. Equal infinite logits have equal
    log probabilities.
    """
    with np.errstate(invalid="ignore"):
        apart = scores.astype(np.float64) - known_scores.astype(np.float64)[:, None]
    apart[scores == known_scores[:, None]] = 0.0
    found: Floats = (known_log_probs.astype(np.float64)[:, None] + apart).astype(np.float32)
    return found
