"""`StepInFlight`: a step that is being computed, from its rows to the tokens chosen for them.

A choice is one token that is chosen from one row of logits. A generation row with several beams has
one choice for each beam. A row with drafts has one choice for each draft, and one more after the
last draft. Any other row has one choice, but `TokenChooser` replaces the choice of a context row
with sampled beams by one choice for each beam. This module maps choices to rows; it does not choose
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.executor.packed_rows import offsets
from gptmanager.step import (
    NOT_FINITE,
    BeamCandidates,
    ContextLogits,
    Drafts,
    Failure,
    PromptLogProbs,
    Row,
    Schedule,
    TopLogProbs,
)


class SamplingRows(NamedTuple):
    """The rows for which tokens are chosen, and their S choices.

    Row r is in slot `slots[r]`. The choices of row r, one per beam or per position, have the
    numbers from `firsts[r]` to `firsts[r + 1]` (excluded). Choice s is the token at `positions[s]`
    in line `lines[s]` of the tables (see `Lines`). All arrays are int64. `drafts` holds the draft
    tokens that the rows verify.
    """

    rows: tuple[Row, ...]
    slots: np.ndarray
    firsts: np.ndarray
    lines: np.ndarray
    positions: np.ndarray
    drafts: tuple[Drafts, ...] = ()


class ChoiceInputs(NamedTuple):
    """The places of S chosen tokens in the tables on a device, as tensors `[S]`.

    `lines` is int32, `positions` and `cells` are int64; `cells` are indices into
    `DeviceTables.token_cells`, or -1 for tokens that are not written there. `counts` int32: number
    of best tokens that each choice returns, or None. `tokens` int32: the chosen tokens if the
    forward pass has already chosen them, or None.
    """

    lines: Tensor
    positions: Tensor
    cells: Tensor
    counts: Tensor | None = None
    tokens: Tensor | None = None


class ChosenTokens(NamedTuple):
    """The tokens chosen for the rows of a step.

    `tokens` is int32 and `log_probs` is float32, both `[rows, n]`. `log_probs` is None if no row
    asks for log probabilities. `counts` int32 `[rows]` is the number of valid tokens of each row,
    or None if all n are valid. `beams` holds the candidates of rows with several beams. `failed`
    maps the index of a row to the error of the row's logits post-processor. `generation_logits`
    holds the pairs (index of a row, float32 `[n, vocab]`) of the rows that ask for logits.
    `top_log_probs` holds the top tokens of the rows that ask for top log probabilities.
    """

    tokens: np.ndarray
    counts: np.ndarray | None = None
    log_probs: np.ndarray | None = None
    beams: tuple[BeamCandidates, ...] = ()
    failed: Mapping[int, BaseException] = MappingProxyType({})
    generation_logits: tuple[tuple[int, Tensor], ...] = ()
    top_log_probs: tuple[TopLogProbs, ...] = ()


PendingTokens = Callable[[], ChosenTokens]  # waits for the tokens; called once


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A step being computed. `logits` `[S, vocab]`: float32, or the model's dtype on a device.

    `inputs` has the places of the S chosen tokens in the tables on the device; it is None if the
    places are not uploaded yet. `out_of_memory` has a failure for each request with a row that
    could not be computed. `pending` waits for the chosen tokens; it is None until their choice has
    begun.
    """

    schedule: Schedule
    rows: SamplingRows
    logits: Tensor
    context_logits: tuple[ContextLogits, ...]
    inputs: ChoiceInputs | None
    out_of_memory: tuple[Failure, ...]
    prompt_log_probs: tuple[PromptLogProbs, ...] = ()
    pending: PendingTokens | None = None

    def computed(self) -> StepInFlight:
        """Return this step itself: its forward pass has run already, or is enqueued."""
        return self


def num_right_drafts(rows: SamplingRows, tokens: np.ndarray) -> np.ndarray:
    """Return the number of drafts of each row before its first wrong draft, int32 `[rows]`.

    A draft is right if it equals the token that `tokens` `[S]` has at the draft's position.
    """
    drafts = {drafts.slot: drafts.tokens for drafts in rows.drafts}
    counts = np.zeros(len(rows.rows), dtype=np.int32)
    for index, row in enumerate(rows.rows):
        if row.num_drafts:
            own = slice(rows.firsts[index], rows.firsts[index] + row.num_drafts)
            counts[index] = (tokens[own] == drafts[row.slot][: row.num_drafts]).cumprod().sum()
    return counts


def accepted(
    rows: SamplingRows, tokens: np.ndarray, log_probs: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the `tokens`, `counts` and `log_probs` of `ChosenTokens`.

    The arguments `tokens` and `log_probs` `[S]` belong to all choices. A row with drafts gets its
    right drafts, and the token chosen after them.
    """
    counts = 1 + num_right_drafts(rows, tokens)
    choices = rows.firsts[:-1].repeat(counts) + offsets(counts)
    shape = len(rows.rows), 1 + max((row.num_drafts for row in rows.rows), default=0)
    is_used = np.arange(shape[1]) < counts[:, None]
    found = np.zeros(shape, dtype=np.int32)
    found[is_used] = tokens[choices]
    if log_probs is None:
        return found, counts, None
    values = np.zeros(shape, dtype=np.float32)
    values[is_used] = log_probs[choices]
    return found, counts, values


def candidates(
    rows: SamplingRows,
    counts: np.ndarray,
    tokens: np.ndarray,
    log_probs: np.ndarray | None,
    best_tokens: np.ndarray | None,
    best_log_probs: np.ndarray | None,
) -> tuple[BeamCandidates, ...]:
    """Return the candidates of each row with several beams.

    `counts` `[rows]` is the number of best tokens per beam of a row, 0 for a row with sampled
    beams. The candidates of a row with sampled beams come from `tokens` and `log_probs` `[S]`; if
    `log_probs` is None, their log probabilities are 0. The candidates of a row with searched beams
    come from `best_tokens` and `best_log_probs` `[S, n]`; if a searched beam has the token
    NOT_FINITE, the row's only candidate is NOT_FINITE.
    """
    found = []
    if log_probs is None:
        log_probs = np.zeros(len(tokens), dtype=np.float32)
    for index, row in enumerate(rows.rows):
        if row.beam_width == 1:
            continue
        own = slice(rows.firsts[index], rows.firsts[index + 1])
        count = counts[index]
        if not count:
            parts = tokens[own, None], log_probs[own, None]
        elif (tokens[own] == NOT_FINITE).any():
            found.append(BeamCandidates(((NOT_FINITE,),), ((-np.inf,),)))
            continue
        else:
            assert best_tokens is not None and best_log_probs is not None
            parts = best_tokens[own, :count], best_log_probs[own, :count]
        found.append(BeamCandidates(*(tuple(map(tuple, part.tolist())) for part in parts)))
    return tuple(found)


def part_of(
    rows: SamplingRows, logits: Tensor, chosen: np.ndarray, offset: int
) -> tuple[SamplingRows, Tensor]:
    """Return the rows with the indices `chosen`, and their logits.

    A row with drafts keeps only its choice number `offset`. Rows without drafts need `offset` 0.
    """
    pieces = []
    for index in chosen:
        first, end = rows.firsts[index] + offset, rows.firsts[index + 1]
        if rows.rows[index].num_drafts:
            end = first + 1
        pieces.append(np.arange(first, end))
    whole = np.concatenate(pieces)
    part = SamplingRows(
        tuple(rows.rows[index] for index in chosen),
        rows.slots[chosen],
        np.concatenate(([0], np.cumsum([len(piece) for piece in pieces]))),
        rows.lines[whole],
        rows.positions[whole],
        rows.drafts,
    )
    return part, logits[torch.from_numpy(whole)]
