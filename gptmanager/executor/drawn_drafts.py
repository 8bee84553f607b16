"""`DrawnDrafts`: drafts that a host has drawn from logits of its own, accepted or replaced.

Keeps what each slot's drafts were drawn from. Knows nothing of how other tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from gptmanager.decoding.rejection import sample_draft
from gptmanager.decoding.sampling import Sampler
from gptmanager.executor.step_in_flight import SamplingRows
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import SequenceStart


class DrawnDraft(NamedTuple):
    """One draft, drawn by `params` from `draft_logits` `[vocab]`.

    `number`: which of the S it stands for; `log_probs` `[vocab]`: what it is compared with.
    """

    number: int
    draft: int
    params: SamplingParams
    draft_logits: np.ndarray
    log_probs: np.ndarray


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

    def at(self, offset: int, rows: SamplingRows, logits: Tensor) -> list[DrawnDraft]:
        """The drafts at `offset` of `rows`, each the one choice of its row; `logits` `[S, vocab]`
        are those behind the post-processors.
        """
        found = []
        drafts = {drafts.slot: drafts.tokens for drafts in rows.drafts}
        for row, number in zip(rows.rows, rows.firsts.tolist(), strict=False):
            if row.slot in self.by_slot and offset < row.num_drafts:
                params, draft_logits = self.by_slot[row.slot]
                own = slice(number, number + 1)
                log_probs = self._sampler.log_probs(
                    logits[own].to("cpu", copy=True), rows.lines[own], rows.positions[own]
                )
                draft = drafts[row.slot][offset]
                found.append(
                    DrawnDraft(number, draft, params, draft_logits[offset], log_probs[0].numpy())
                )
        return found


def replace_rejected(
    drawn: Sequence[DrawnDraft],
    rows: SamplingRows,
    tokens: np.ndarray,
    log_probs: np.ndarray | None,
    histories: np.ndarray,
) -> None:
    """Write the token for each draft to `tokens` `[S]`, and to its line of `histories`.

    A row that has no token is left alone.
    """
    for number, draft, params, draft_logits, scores in drawn:
        if tokens[number] < 0:
            continue
        position = int(rows.positions[number])
        token = sample_draft(scores, draft_logits, draft, params, position)
        tokens[number] = histories[rows.lines[number], position] = token
        if log_probs is not None:
            log_probs[number] = scores[token]
