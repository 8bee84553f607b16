"""`GatheredLogits`: what an executor must keep of its logits, by slot, besides the tokens.

Decides which rows of a step's logits are brought to the CPU; raw, as the model gave them. It knows
slots and rows of schedules, nothing of requests and responses, nor of how logits travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.executor.packed_rows import PackedRows
from gptmanager.step import ContextLogits, Row, SequenceStart

Bring = Callable[[Tensor], Tensor]  # logits to the CPU, at once or later


class ContextPart(NamedTuple):
    """The first `num_tokens` tokens of a context row, whose logits are wanted."""

    number: int  # of the row in the batch
    row: Row
    num_tokens: int


class GatheredLogits:
    """What each slot's sequence wants, since its start.

    `any_context`, `any_generation`, `any_log_probs`: whether one of them wants such; where none
    does, nothing must be asked.
    """

    def __init__(self, num_slots: int) -> None:
        self._context_end = np.zeros(num_slots, dtype=np.int64)  # 0: no context logits
        self._generation = np.zeros(num_slots, dtype=np.bool_)
        self._log_probs = np.zeros(num_slots, dtype=np.bool_)
        self.any_context = self.any_generation = self.any_log_probs = False

    def load(self, starts: Sequence[SequenceStart]) -> None:
        for start in starts:
            output_config, slot = start.output_config, start.slot
            self._context_end[slot] = start.orig_prompt_len if output_config.context_logits else 0
            self._generation[slot] = output_config.generation_logits
            self._log_probs[slot] = output_config.log_probs
        self.any_context = bool(self._context_end.any())
        self.any_generation = bool(self._generation.any())
        self.any_log_probs = bool(self._log_probs.any())

    def context_parts(self, context_rows: Sequence[Row]) -> list[ContextPart]:
        """The tokens of these rows whose logits are wanted."""
        parts = []
        for number, row in enumerate(context_rows):
            end = min(row.position + row.num_tokens, int(self._context_end[row.slot]))
            if end > row.position:
                parts.append(ContextPart(number, row, end - row.position))
        return parts

    def generation_logits(
        self, slots: np.ndarray, firsts: np.ndarray, logits: Tensor, bring: Bring
    ) -> tuple[tuple[int, Tensor], ...]:
        """(row, its logits `[n, vocab]` on the CPU) for each row that wants them.

        Row r's are `logits[firsts[r] : firsts[r + 1]]`; rows side by side are brought as one. Must
        be called before anything changes the logits.
        """
        rows = np.flatnonzero(self._generation[slots])
        found: list[tuple[int, Tensor]] = []
        for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if rows.size else ():
            bounds = firsts[run[0] : run[-1] + 2].tolist()
            pieces = torch.split(bring(logits[bounds[0] : bounds[-1]]), np.diff(bounds).tolist())
            found += zip(run.tolist(), pieces, strict=True)
        return tuple(found)

    def wants_log_probs(self, slots: np.ndarray) -> bool:
        """Whether a sequence in one of these slots does."""
        return bool(self._log_probs[slots].any())


def with_context(rows: PackedRows, parts: Sequence[ContextPart]) -> PackedRows:
    """With the logits of these parts behind those that are sampled from."""
    index, numbers = [rows.sample_index], [rows.sample_rows]
    for part in parts:
        index.append(np.arange(part.num_tokens) + rows.row_starts[part.number])
        numbers.append(np.full(part.num_tokens, part.number))
    return rows._replace(sample_index=np.concatenate(index), sample_rows=np.concatenate(numbers))


def split_context(
    logits: Tensor, parts: Sequence[ContextPart], bring: Bring
) -> tuple[Tensor, tuple[ContextLogits, ...]]:
    """The logits that are sampled from, and those of the context behind them, brought."""
    sizes = [part.num_tokens for part in parts]
    sampled, *pieces = torch.split(logits, [len(logits) - sum(sizes), *sizes])
    return sampled, tuple(
        ContextLogits(part.row.request_id, part.row.epoch, part.row.position, bring(piece))
        for part, piece in zip(parts, pieces, strict=True)
    )
