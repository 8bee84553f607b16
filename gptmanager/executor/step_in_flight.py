"""`TorchStep`: a step under way, from its rows to what was chosen for them.

Knows which of the S choices belong to which row, and what they mean there: a token, a guess that is
right, a beam's continuation. Knows nothing of how they are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptmanager.step import (
    NOT_FINITE,
    BeamCandidates,
    ContextLogits,
    Extras,
    Failure,
    Row,
    Schedule,
)


@dataclass(slots=True, eq=False)
class TorchStep:
    """A step under way."""

    schedule: Schedule
    rows: tuple[Row, ...]  # those that yield a token
    slots: np.ndarray  # [rows]
    firsts: np.ndarray  # [rows + 1], where each row's beams or positions begin among the S
    lines: np.ndarray  # [S], of the sequences
    positions: np.ndarray  # [S], absolute positions of the tokens to choose
    logits: Tensor  # float32 [S, vocab]
    context_logits: tuple[ContextLogits, ...] = ()
    tokens: np.ndarray | None = None  # int32 [rows, n]
    counts: np.ndarray | None = None  # int32 [rows], None: all of them count
    places: Mapping[str, Tensor] | None = None  # where the S are, if a device has been told already
    arrival: Any = None  # of tokens that are on their way from a device
    beams: tuple[BeamCandidates, ...] = ()
    failed: Mapping[int, BaseException] = field(default_factory=dict)  # by sampling row
    starved: tuple[Failure, ...] = ()  # what could not be run
    extras: Extras | None = None


def settle(step: TorchStep, tokens: np.ndarray, log_probs: np.ndarray | None) -> np.ndarray | None:
    """Give the step its tokens, of choices for all S; their log probabilities.

    Of a row with guesses as many count as agree with what is chosen, and the choice behind them.
    """
    heads = step.firsts[:-1]
    if not step.schedule.drafts:
        step.tokens = tokens[heads, None]
        return None if log_probs is None else log_probs[heads, None]
    guesses = {drafts.slot: drafts.tokens for drafts in step.schedule.drafts}
    shape = len(step.rows), 1 + max((row.num_drafts for row in step.rows), default=0)
    step.tokens = np.zeros(shape, dtype=np.int32)
    step.counts = np.ones(len(step.rows), dtype=np.int32)
    values = None if log_probs is None else np.zeros(shape, dtype=np.float32)
    for place, (row, first) in enumerate(zip(step.rows, heads.tolist(), strict=True)):
        count = 1
        for guess in guesses[row.slot][: row.num_drafts] if row.num_drafts else ():
            if guess != tokens[first + count - 1]:
                break
            count += 1
        step.tokens[place, :count] = tokens[first : first + count]
        step.counts[place] = count
        if values is not None and log_probs is not None:
            values[place, :count] = log_probs[first : first + count]
    return values


def candidates(
    step: TorchStep,
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
    for place, row in enumerate(step.rows):
        if row.beam_width == 1:
            continue
        own = slice(step.firsts[place], step.firsts[place + 1])
        count = counts[place]
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


def part_of(step: TorchStep, places: np.ndarray, offset: int) -> TorchStep:
    """The rows `places` alone; of those with guesses, the position `offset`."""
    pieces = []
    for place in places:
        first, end = step.firsts[place] + offset, step.firsts[place + 1]
        if step.rows[place].num_drafts:
            end = first + 1
        pieces.append(np.arange(first, end))
    index = np.concatenate(pieces)
    return TorchStep(
        step.schedule,
        tuple(step.rows[place] for place in places),
        step.slots[places],
        np.concatenate(([0], np.cumsum([len(piece) for piece in pieces]))),
        step.lines[index],
        step.positions[index],
        step.logits[torch.from_numpy(index)],
    )
