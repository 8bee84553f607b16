"""`GatheredLogits`: which logits and log probabilities the sequence in each slot asks for.

This module decides which rows of a step's logits are copied to the CPU, before the logits
post-processors run. It does not know requests and responses, or how logits are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.executor.packed_rows import PackedRows
from gptmanager.request.output_options import NO_EXTRAS, OutputConfig
from gptmanager.step import Row, SequenceStart

CopyToCpu = Callable[[Tensor], Tensor]  # returns a copy, which may be complete only later


class ContextPart(NamedTuple):
    """A context row, and how many tokens at its beginning need logits.

    `num_logits` counts the tokens with logits that are returned as context logits. `num_scored`
    counts the tokens with logits that give the log probability of the next prompt token.
    """

    number: int  # the row's number in the batch
    row: Row
    num_logits: int
    num_scored: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens for which logits are needed."""
        return max(self.num_logits, self.num_scored)


class GatheredLogits:
    """The logits and log probabilities that each slot's sequence asks for, set at its start.

    `any_context` is True if at least one sequence asks for context logits or prompt log
    probabilities. `any_generation`, `any_log_probs` and `any_top` are the same for generation
    logits, log probabilities and top log probabilities. If a flag is False, callers need not look
    up slots. A sequence that asks for top log probabilities also gets the log probabilities of its
    chosen tokens.
    """

    def __init__(self, num_slots: int) -> None:
        self._context_end = np.zeros(num_slots, dtype=np.int64)  # 0: no context logits
        self._scored_end = np.zeros(num_slots, dtype=np.int64)  # 0: no prompt log probabilities
        self._num_top = np.zeros(num_slots, dtype=np.int32)
        self._configs = [NO_EXTRAS] * num_slots
        self._generation = np.zeros(num_slots, dtype=np.bool_)
        self._log_probs = np.zeros(num_slots, dtype=np.bool_)
        self.any_context = self.any_generation = self.any_log_probs = self.any_top = False

    def load(self, starts: Sequence[SequenceStart]) -> None:
        """Store the outputs that each new sequence asks for, and update the `any_` flags."""
        for start in starts:
            config, slot, prompt_len = start.output_config, start.slot, start.orig_prompt_len
            self._configs[slot] = config
            self._context_end[slot] = prompt_len if config.context_logits else 0
            self._scored_end[slot] = prompt_len - 1 if config.num_prompt_log_probs >= 0 else 0
            self._generation[slot] = config.generation_logits
            self._log_probs[slot] = config.log_probs or config.num_top_log_probs > 0
            self._num_top[slot] = config.num_top_log_probs
        self.any_context = bool(self._context_end.any() or self._scored_end.any())
        self.any_generation = bool(self._generation.any())
        self.any_log_probs = bool(self._log_probs.any())
        self.any_top = bool(self._num_top.any())

    def config(self, slot: int) -> OutputConfig:
        """Return the outputs that the sequence in `slot` asks for."""
        return self._configs[slot]

    def context_parts(self, context_rows: Sequence[Row]) -> list[ContextPart]:
        """Return the parts of these rows for which logits are needed."""
        parts = []
        for number, row in enumerate(context_rows):
            counts = (_within(row, ends) for ends in (self._context_end, self._scored_end))
            part = ContextPart(number, row, *counts)
            if part.num_tokens:
                parts.append(part)
        return parts

    def batches(self, context_rows: Sequence[Row], most: int) -> Iterator[tuple[Row, ...]]:
        """Yield batches of the rows, in order, with at most `most` tokens to score in each.

        A row that does not fit into the rest of a batch is split.
        """
        batch: list[Row] = []
        room = most
        for row in context_rows:
            while (wanted := _within(row, self._scored_end)) > room:
                if room:
                    batch.append(row._replace(num_tokens=room, samples=False, num_drafts=0))
                yield tuple(batch)
                rest = row.num_tokens - room
                row = row._replace(position=row.position + room, num_tokens=rest)
                batch, room = [], most
            batch.append(row)
            room -= wanted
        yield tuple(batch)

    def generation_logits(
        self, slots: np.ndarray, firsts: np.ndarray, logits: Tensor, to_cpu: CopyToCpu
    ) -> tuple[tuple[int, Tensor], ...]:
        """Return (row, its logits `[n, vocab]` on the CPU) for each row that asks for them.

        The logits of row r are `logits[firsts[r] : firsts[r + 1]]`. Adjacent rows are copied
        together. Must be called before anything changes the logits.
        """
        rows = np.flatnonzero(self._generation[slots])
        found: list[tuple[int, Tensor]] = []
        for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if rows.size else ():
            bounds = firsts[run[0] : run[-1] + 2].tolist()
            pieces = torch.split(to_cpu(logits[bounds[0] : bounds[-1]]), np.diff(bounds).tolist())
            found += zip(run.tolist(), pieces, strict=True)
        return tuple(found)

    def wants_log_probs(self, slots: np.ndarray) -> bool:
        """Return whether a sequence in one of these slots asks for log probabilities."""
        return bool(self._log_probs[slots].any())

    def wants_logits(self, slots: np.ndarray) -> bool:
        """Return whether a sequence in one of these slots asks for generation logits."""
        return self.any_generation and bool(self._generation[slots].any())

    def num_top(self, slots: np.ndarray) -> np.ndarray:
        """Return, for each slot, the number of top log probabilities per token, as int32."""
        counts: np.ndarray = self._num_top[slots]
        return counts


def _within(row: Row, ends: np.ndarray) -> int:
    """Return how many tokens of a row are before the position `ends[row.slot]`."""
    return max(0, min(row.num_tokens, int(ends[row.slot]) - row.position))


def with_context(rows: PackedRows, parts: Sequence[ContextPart]) -> PackedRows:
    """Return `rows` with the tokens of these parts added at the end of `sample_index`."""
    index, numbers = [rows.sample_index], [rows.sample_rows]
    for part in parts:
        index.append(np.arange(part.num_tokens) + rows.row_starts[part.number])
        numbers.append(np.full(part.num_tokens, part.number))
    return rows._replace(
        sample_index=np.concatenate(index),
        sample_rows=np.concatenate(numbers),
        samples_prompts=True,
    )


def split_context(
    logits: Tensor, parts: Sequence[ContextPart]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the logits to sample from, and the logits of each part. The parts are at the end."""
    sizes = [part.num_tokens for part in parts]
    sampled, *pieces = torch.split(logits, [len(logits) - sum(sizes), *sizes])
    return sampled, tuple(pieces)
