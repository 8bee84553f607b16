"""`DrawnDrafts`: accepts or replaces drafts that a host has sampled from its own draft logits.

This module keeps the host's draft logits for each slot. It does not choose any other token.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gptmanager.decoding.sampling.rejection import sample_draft
from gptmanager.decoding.sampling.sampling import Sampler
from gptmanager.executor.step_in_flight import SamplingRows
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import SequenceStart


class DrawnDrafts:
    """The drafts that hosts have sampled.

    `by_slot`: slot -> its request's sampling parameters, and its draft logits `[n, vocab]`.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.by_slot: dict[int, tuple[SamplingParams, np.ndarray]] = {}
        self._sampler = sampler

    def load(self, start: SequenceStart) -> None:
        """Store the draft logits of a sequence that starts, or clear its slot if it has none."""
        if start.draft_logits is not None and start.draft_logits.numbers is not None:
            self.by_slot[start.slot] = start.sampling, start.draft_logits.numbers
        else:
            self.by_slot.pop(start.slot, None)

    def forget(self, rows: SamplingRows) -> None:
        """Delete the rows' draft logits: a host's drafts are for tokens right after the prompt."""
        for row in rows.rows:
            self.by_slot.pop(row.slot, None)

    def at(self, offset: int, rows: SamplingRows, logits: Tensor) -> dict[int, np.ndarray]:
        """Return a dict: index of a row -> log probabilities `[vocab]` to compare its draft with.

        Only rows with at least `offset` + 1 drafts of a host are included. `rows` has one choice
        per row, for draft number `offset`. `logits` `[S, vocab]` are already post-processed, and
        are not changed.
        """
        own = [
            index
            for index, row in enumerate(rows.rows)
            if row.slot in self.by_slot and offset < row.num_drafts
        ]
        numbers = rows.firsts[own]
        log_probs = self._sampler.log_probs(
            logits[torch.from_numpy(numbers)].cpu(), rows.lines[numbers], rows.positions[numbers]
        )
        return dict(zip(own, log_probs.numpy(), strict=True))

    def replace_rejected(
        self,
        offset: int,
        rows: SamplingRows,
        compared: dict[int, np.ndarray],
        tokens: np.ndarray,
        log_probs: np.ndarray | None,
        histories: np.ndarray,
    ) -> None:
        """Accept or replace draft number `offset` of each row in `compared`, the result of `at`.

        The token is written to `tokens` `[S]` and to `histories` `[lines, positions]`, and its log
        probability to `log_probs` `[S]`, if given. A row without a valid token is
        skipped.
        """
        drafts = {drafts.slot: drafts.tokens for drafts in rows.drafts}
        for index, scores in compared.items():
            slot, number = rows.rows[index].slot, rows.firsts[index]
            if tokens[number] < 0:
                continue
            params, draft_logits = self.by_slot[slot]
            position = int(rows.positions[number])
            draft = drafts[slot][offset]
            token = sample_draft(scores, draft_logits[offset], draft, params, position)
            tokens[number] = histories[rows.lines[number], position] = token
            if log_probs is not None:
                log_probs[number] = scores[token]
