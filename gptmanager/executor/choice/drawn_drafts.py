"""`DrawnDrafts`: accepts or replaces drafts that a host has sampled from its own draft logits.

This module keeps the host's drafts and their logits for each slot. It does not choose any other
token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.decoding.sampling.rejection import sample_draft
from gptmanager.decoding.sampling.sampling import Sampler
from gptmanager.executor.step_in_flight import SamplingRows
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import SequenceStart


class _Drawn(NamedTuple):
    """The drafts of a sequence, as rows of `drawn_draft`. The first one is at position `first`."""

    params: SamplingParams
    first: int
    drafts: np.ndarray


class Compared(NamedTuple):
    """The adjusted logits of a draft's position, and their log softmax."""

    logits: Tensor
    log_probs: Tensor


class DrawnDrafts:
    """The drafts that hosts have sampled.

    `by_slot` has the sequences with a draft for their next token, by slot: all their tokens so far
    are equal to their drafts. Each of these drafts is accepted or replaced when its position is
    reached, also if the scheduler did not let it run in advance. So the tokens do not depend on the
    schedule.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.by_slot: dict[int, _Drawn] = {}
        self._sampler = sampler

    def load(self, start: SequenceStart) -> None:
        """Store the drafts of a sequence that starts, or clear its slot if it has none left."""
        self.by_slot.pop(start.slot, None)
        if start.draft_logits is None or start.draft_logits.numbers is None:
            return
        drafts, first = start.draft_logits.numbers, start.orig_prompt_len
        generated = start.tokens[first:]  # before a pause
        is_next = len(generated) < len(drafts)
        if is_next and (*drafts["token"][: len(generated)].tolist(),) == generated:
            self.by_slot[start.slot] = _Drawn(start.sampling, first, drafts)

    def has_any(self, slots: np.ndarray) -> bool:
        """Return whether the next token of the sequence in any of these slots has a draft."""
        return not self.by_slot.keys().isdisjoint(slots.tolist())

    def at(self, rows: SamplingRows, logits: Tensor) -> dict[int, Compared]:
        """Return what to compare a draft with, by index of its row, for the rows that have one.

        Each of these rows has one choice. `logits` `[S, vocab]` are already post-processed, and are
        not changed.
        """
        own = [index for index, row in enumerate(rows.rows) if row.slot in self.by_slot]
        numbers = rows.firsts[own]
        lines = rows.lines[numbers]
        copied = logits[torch.from_numpy(numbers)].cpu()
        adjusted = self._sampler.adjusted(copied, lines, rows.positions[numbers])
        log_probs = self._sampler.log_softmax(adjusted.clone(), lines)
        return dict(zip(own, map(Compared, adjusted, log_probs), strict=True))

    def replace_rejected(
        self,
        rows: SamplingRows,
        compared: dict[int, Compared],
        tokens: np.ndarray,
        log_probs: np.ndarray | None,
        histories: np.ndarray,
    ) -> None:
        """Accept or replace the draft of each row in `compared`, the result of `at`.

        The token is written to `tokens` `[S]` and to `histories` `[lines, positions]`, and its log
        probability to `log_probs` `[S]`, if given. A row without a valid token is skipped.
        """
        for index, (logits, scores) in compared.items():
            slot, number = rows.rows[index].slot, rows.firsts[index]
            params, first, drafts = self.by_slot[slot]
            if tokens[number] < 0:
                continue
            own, position = slice(number, number + 1), int(rows.positions[number])
            draft, draft_logits = drafts[position - first]
            token = sample_draft(scores.numpy(), draft_logits, int(draft), params, position)
            if log_probs is not None:
                known = tokens[own], log_probs[own]
                ids, lines = np.array([[token]]), rows.lines[own]
                log_probs[own] = self._sampler.log_probs_of(ids, logits[None], lines, *known)[0]
            tokens[number] = histories[rows.lines[number], position] = token
            if token != draft or position + 1 == first + len(drafts):
                del self.by_slot[slot]
