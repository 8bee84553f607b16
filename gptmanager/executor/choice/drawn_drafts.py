"""`DrawnDrafts`: drafts that a host has drawn from logits of its own, accepted or replaced.

Keeps what each slot's drafts were drawn from. Knows nothing of how other tokens are chosen.
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
    """`by_slot`: how drafts were drawn, and the logits `[n, vocab]`; empty if there are none."""

    def __init__(self, sampler: Sampler) -> None:
        self.by_slot: dict[int, tuple[SamplingParams, np.ndarray]] = {}
        self._sampler = sampler

    def load(self, start: SequenceStart) -> None:
        """A sequence starts."""
        if start.draft_logits is not None and start.draft_logits.numbers is not None:
            self.by_slot[start.slot] = start.sampling, start.draft_logits.numbers
        elif self.by_slot:
            self.by_slot.pop(start.slot, None)

    def forget(self, rows: SamplingRows) -> None:
        """A host's drafts follow the prompt alone."""
        for row in rows.rows:
            self.by_slot.pop(row.slot, None)

    def at(self, offset: int, rows: SamplingRows, logits: Tensor) -> dict[int, np.ndarray]:
        """By row, the log probabilities `[vocab]` that its draft at `offset` is compared with.

        Each draft is the one choice of its row; `logits` `[S, vocab]` are those behind the
        post-processors, and stay as they are.
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
        """Write the token for each of the drafts `compared` by `at` to `tokens` `[S]`, and to its
        line of `histories`. A row that has no token is left alone.
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
