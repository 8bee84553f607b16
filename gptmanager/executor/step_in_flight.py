"""`StepInFlight`: a step under way, from its rows to what was chosen for them.

Knows which of the S choices belong to which row, and what they mean there: a token, a draft that is
right, a beam's continuation. Knows nothing of how they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

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
    """The rows that yield a token, and the S choices that are made for them.

    Row r is in slot `slots[r]`; its choices, one a beam or one a position, are `firsts[r]` to
    `firsts[r + 1]` (excluded). Choice s is the token at `positions[s]` of the sequence in line
    `lines[s]`. All int64. `drafts`: what the rows verify.
    """

    rows: tuple[Row, ...]
    slots: np.ndarray
    firsts: np.ndarray
    lines: np.ndarray
    positions: np.ndarray
    drafts: tuple[Drafts, ...] = ()


class ChoiceInputs(NamedTuple):
    """S choices as a device knows them: where each token stands, in tensors `[S]`.

    `lines` int32, `positions` int64; `cells` int64: of `DeviceTables.token_cells`. `counts` int32:
    how many candidates a beam has; None: there are no beams. `tokens` int32: the choices, where the
    step made them itself; None: they are to be made.
    """

    lines: Tensor
    positions: Tensor
    cells: Tensor
    counts: Tensor | None = None
    tokens: Tensor | None = None


class ChosenTokens(NamedTuple):
    """The tokens chosen for the rows of a step.

    `tokens` int32 and `log_probs` float32 `[rows, n]`; `counts` int32 `[rows]`: how many of the n
    count, None: all. `failed`: the error of the logits post-processor, by row.
    `generation_logits`: the rows that ask for them, each with float32 `[n, vocab]`.
    """

    tokens: np.ndarray
    counts: np.ndarray | None = None
    log_probs: np.ndarray | None = None
    beams: tuple[BeamCandidates, ...] = ()
    failed: Mapping[int, BaseException] = MappingProxyType({})
    generation_logits: tuple[tuple[int, Tensor], ...] = ()
    top_log_probs: tuple[TopLogProbs, ...] = ()


PendingTokens = Callable[[], ChosenTokens]  # waits for them; called once


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A step under way. `logits` `[S, vocab]`, float32 or, on a device, in the model's dtype.

    `inputs`: the S as the device knows them already. `out_of_memory`: requests with a row that
    could not be run.
    """

    schedule: Schedule
    rows: SamplingRows
    logits: Tensor
    context_logits: tuple[ContextLogits, ...]
    inputs: ChoiceInputs | None
    out_of_memory: tuple[Failure, ...]
    prompt_log_probs: tuple[PromptLogProbs, ...] = ()
    pending: PendingTokens | None = None  # once the step is sampled

    def computed(self) -> StepInFlight:
        """Return this step: its forward has run, or is enqueued."""
        return self


def accepted(
    rows: SamplingRows, tokens: np.ndarray, log_probs: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return tokens, counts and log probabilities, as in `ChosenTokens`, of choices `[S]`.

    In a row with drafts, the drafts that agree with the choices count, and the choice behind them.
    """
    drafts = {drafts.slot: drafts.tokens for drafts in rows.drafts}
    shape = len(rows.rows), 1 + max((row.num_drafts for row in rows.rows), default=0)
    found = np.zeros(shape, dtype=np.int32)
    counts = np.ones(len(rows.rows), dtype=np.int32)
    values = None if log_probs is None else np.zeros(shape, dtype=np.float32)
    firsts = rows.firsts[:-1].tolist()
    for index, (row, first) in enumerate(zip(rows.rows, firsts, strict=True)):
        count = 1
        for draft in drafts[row.slot][: row.num_drafts] if row.num_drafts else ():
            if draft != tokens[first + count - 1]:
                break
            count += 1
        found[index, :count] = tokens[first : first + count]
        counts[index] = count
        if values is not None and log_probs is not None:
            values[index, :count] = log_probs[first : first + count]
    return found, counts, values


def candidates(
    rows: SamplingRows,
    counts: np.ndarray,
    tokens: np.ndarray,
    log_probs: np.ndarray | None,
    best_tokens: np.ndarray | None,
    best_log_probs: np.ndarray | None,
) -> tuple[BeamCandidates, ...]:
    """Those of each row of several beams: what was sampled `[S]`, or the best `[S, n]`.

    `counts` `[rows]`: how many of the best, 0: the row is not searched. None for log probabilities
    that nobody wants: 0; for the best where no beams are searched. Where one of the searched beams
    has NOT_FINITE as its token, that alone.
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
    """The rows `chosen` alone, with their logits; of those with drafts, the position `offset`."""
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
