"""`TokenChooser`: from the logits of a step to its tokens, and to what else was asked for.

Decides in which order a step's logits are processed, searched, sampled and compared with drafts.
`decoding` does each of these. Knows no model and no KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gptmanager.decoding.lines import Lines
from gptmanager.decoding.logits import PostProcessing
from gptmanager.decoding.random_numbers import derive_seed
from gptmanager.decoding.sampling import Sampler
from gptmanager.executor.drawn_drafts import DrawnDrafts
from gptmanager.executor.gathered_logits import GatheredLogits
from gptmanager.executor.sequence_tables import SequenceTables
from gptmanager.executor.step_in_flight import (
    ChosenTokens,
    PendingTokens,
    SamplingRows,
    StepInFlight,
    accepted,
    candidates,
    part_of,
)
from gptmanager.step import NOT_FINITE, BeamCandidates, SequenceStart

_Beams = tuple[BeamCandidates, ...]


class Chooser(Protocol):
    """What an executor has tokens chosen by. `gathered`: what sequences want of the logits."""

    lines: Lines
    gathered: GatheredLogits

    def load(self, start: SequenceStart) -> None:
        """A sequence starts."""

    def choose(self, step: StepInFlight) -> PendingTokens:
        """Tokens of each row, and what else its request wants."""


class TokenChooser:
    """Chooses for sequences whose histories lie in `tables`; a chosen token is written to them.

    Logits post-processors get the logits where they are, all else has them on the CPU.
    """

    def __init__(
        self,
        lines: Lines,
        tables: SequenceTables,
        sampler: Sampler,
        processing: PostProcessing,
    ) -> None:
        self.lines = lines
        self._tables = tables
        self._sampler = sampler
        self.gathered = GatheredLogits(lines.num_slots)
        self._processing = processing
        self._drawn = DrawnDrafts(sampler)
        self._sampled: set[int] = set()  # slots whose beams are not searched
        # of each slot; 0: no beams are searched
        self._num_candidates = np.zeros(lines.num_slots, dtype=np.int32)

    def load(self, start: SequenceStart) -> None:
        """A sequence starts."""
        for beam in range(start.beam_width):
            sampling = start.sampling
            if start.sampled and beam:
                sampling = replace(sampling, seed=derive_seed(sampling.seed, beam))
            line = self.lines.of(start.slot, beam)
            self._sampler.load(line, sampling, start.orig_prompt_len, start.output_config)
        if start.sampled or start.slot in self._sampled:
            (self._sampled.add if start.sampled else self._sampled.discard)(start.slot)
        is_searched = start.beam_width > 1 and not start.sampled
        most = min(start.num_candidates, self._sampler.vocab_size)
        self._num_candidates[start.slot] = most if is_searched else 0
        self._processing.start(start)
        self._drawn.load(start)

    def choose(self, step: StepInFlight) -> PendingTokens:
        """Tokens of each row, and what else its request wants."""
        rows = step.rows
        raw: tuple[tuple[int, Tensor], ...] = ()
        if self.gathered.any_generation:
            raw = self.gathered.generation_logits(
                rows.slots, rows.firsts, step.logits, lambda own: own.to("cpu", copy=True)
            )
        with torch.inference_mode():
            if rows.drafts and self._depends_on_order(rows):
                chosen = self._verify_in_order(rows, step.logits)._replace(generation_logits=raw)
            else:
                rows, logits, failed = self._prepare(rows, step.logits)
                tokens, log_probs, beams = self._pick(rows, logits)
                found = self._by_row(rows, tokens, log_probs)
                chosen = ChosenTokens(*found, beams, failed, raw)
        if self._drawn.by_slot:
            self._drawn.forget(rows)
        return lambda: chosen

    def _pick(
        self, rows: SamplingRows, logits: Tensor
    ) -> tuple[np.ndarray, np.ndarray | None, _Beams]:
        """Tokens and log probabilities of all S; candidates of the rows with several beams."""
        log_probs = None
        if self.gathered.any_log_probs and self.gathered.wants_log_probs(rows.slots):
            log_probs = np.zeros(len(rows.lines), dtype=np.float32)
        logits = logits.cpu()
        if self.lines.max_beam_width > 1 and any(row.beam_width > 1 for row in rows.rows):
            tokens, beams = self._search(rows, logits, log_probs)
        else:
            tokens, beams = self._sampler.sample(logits, rows.lines, rows.positions, log_probs), ()
        self._write(rows, tokens)
        return tokens, log_probs, beams

    def _write(self, rows: SamplingRows, tokens: np.ndarray, own: np.ndarray | None = None) -> None:
        """Tokens `[S]`, of all or of `own`, are their sequences' next inputs; 0 where none is.

        Those behind a wrong draft are overwritten.
        """
        table = self._tables.tokens
        # the last position of a sequence needs no input after it
        fits = rows.positions < table.shape[1]
        if own is not None:
            fits &= own
        table[rows.lines[fits], rows.positions[fits]] = np.maximum(tokens[fits], 0)

    def _prepare(
        self, rows: SamplingRows, logits: Tensor
    ) -> tuple[SamplingRows, Tensor, Mapping[int, BaseException]]:
        """Let logits post-processors change the logits; then each sampled beam gets its own.

        Which of them failed, by row.
        """
        failed: Mapping[int, BaseException] = {}
        if self._processing.sequences:
            failed = self._processing.run(
                logits,
                [row.request_id for row in rows.rows],
                rows.lines,
                rows.positions,
                self._tables.tokens,
                rows.firsts,
                self._tables.token_tensor,
            )
        if self._sampled and not self._sampled.isdisjoint(rows.slots.tolist()):
            rows, logits = self._spread(rows, logits)
        return rows, logits, failed

    @staticmethod
    def _by_row(
        rows: SamplingRows, tokens: np.ndarray, log_probs: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Of choices for all S tokens, counts and log probabilities as in `ChosenTokens`."""
        if rows.drafts:
            return accepted(rows, tokens, log_probs)
        heads = rows.firsts[:-1]
        return tokens[heads, None], None, None if log_probs is None else log_probs[heads, None]

    # Several beams -----------------------------------------------------------------------------

    def _spread(self, rows: SamplingRows, logits: Tensor) -> tuple[SamplingRows, Tensor]:
        """After the context each sampled beam gets a row, of the same logits and history."""
        is_sampled = [row.slot in self._sampled for row in rows.rows]
        starts, pieces, end = rows.firsts.tolist(), [], 0
        copies = np.ones(len(rows.lines), dtype=np.int64)
        for index in np.flatnonzero(is_sampled).tolist():
            first, width = starts[index], rows.rows[index].beam_width
            if width == 1 or starts[index + 1] > first + 1:
                continue
            pieces += [logits[end:first], logits[first : first + 1].expand(width, -1)]
            end, copies[first] = first + 1, width
            self._tables.fork(int(rows.lines[first]), [0] * width, int(rows.positions[first]))
        if not pieces:
            return rows, logits
        firsts = np.concatenate(([0], np.cumsum(copies)))
        beams = np.arange(firsts[-1]) - firsts[:-1].repeat(copies)
        spread = rows._replace(
            firsts=firsts[rows.firsts],
            lines=rows.lines.repeat(copies) + beams,
            positions=rows.positions.repeat(copies),
        )
        return spread, torch.cat([*pieces, logits[end:]])

    def _search(
        self, rows: SamplingRows, logits: Tensor, log_probs: np.ndarray | None
    ) -> tuple[np.ndarray, _Beams]:
        """Tokens of what is sampled, of a searched beam 0 or NOT_FINITE; candidates of all."""
        counts = self._num_candidates[rows.slots]
        searched = counts.repeat(np.diff(rows.firsts)) > 0
        tokens = np.zeros(len(rows.lines), dtype=np.int32)
        values = np.zeros(len(rows.lines), dtype=np.float32) if log_probs is None else log_probs
        single, beams = np.flatnonzero(~searched), np.flatnonzero(searched)
        own = values[single]
        tokens[single] = self._sampler.sample(
            logits[torch.from_numpy(single)], rows.lines[single], rows.positions[single], own
        )
        values[single] = own
        scores = self._sampler.log_probs(
            logits[torch.from_numpy(beams)], rows.lines[beams], rows.positions[beams]
        )
        tokens[beams[torch.isnan(scores[:, 0]).numpy()]] = NOT_FINITE
        best = _best(scores, int(counts.max(initial=1)))
        most = best[0].shape[1]
        best_tokens = np.zeros((len(rows.lines), most), dtype=np.int32)
        best_values = np.zeros((len(rows.lines), most), dtype=np.float32)
        best_tokens[beams], best_values[beams] = best
        return tokens, candidates(rows, counts, tokens, values, best_tokens, best_values)

    # Drafts of which each depends on the one before --------------------------------------------

    def _depends_on_order(self, rows: SamplingRows) -> bool:
        """Whether a token can be chosen only when the one before it is known.

        Penalties are no reason: drafts stand in the histories, and a choice behind a wrong one
        does not count.
        """
        drafted = [row.slot for row in rows.rows if row.num_drafts]
        return not self._drawn.by_slot.keys().isdisjoint(drafted) or (
            bool(self._processing.sequences)
            and self._processing.serves(np.array(drafted, dtype=np.int64))
        )

    def _verify_in_order(self, rows: SamplingRows, logits: Tensor) -> ChosenTokens:
        """Choose one token after the other, as long as the drafts agree with what is chosen.

        So each token is chosen once, with the history that it has without drafts.
        """
        drafts = {drafts.slot: drafts.tokens for drafts in rows.drafts}
        tokens, log_probs = np.zeros(len(rows.lines), dtype=np.int32), None
        beams: _Beams = ()
        failed: dict[int, BaseException] = {}
        left = np.arange(len(rows.rows))
        for offset in range(1 + max(row.num_drafts for row in rows.rows)):
            part, part_logits, errors = self._prepare(*part_of(rows, logits, left, offset))
            compared = self._drawn.at(offset, part, part_logits)
            picked, values, searched = self._pick(part, part_logits)
            self._drawn.replace_rejected(
                offset, part, compared, picked, values, self._tables.tokens
            )
            numbers, heads = rows.firsts[left] + offset, part.firsts[:-1]
            tokens[numbers] = picked[heads]
            if values is not None:
                if log_probs is None:
                    log_probs = np.zeros(len(tokens), dtype=np.float32)
                log_probs[numbers] = values[heads]
            failed |= {int(left[index]): error for index, error in errors.items()}
            if not offset:
                beams = searched
            agree = [
                row.num_drafts > offset
                and drafts[row.slot][offset] == tokens[number]
                and index not in failed
                for index, number, row in zip(left.tolist(), numbers, part.rows, strict=True)
            ]
            left = left[agree]
            if not left.size:
                break
        return ChosenTokens(*accepted(rows, tokens, log_probs), beams, failed)


def _best(log_probs: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log probabilities of the `count` best of each row, the lowest id on a tie."""
    values, ids = (found.numpy() for found in log_probs.topk(min(count, log_probs.shape[1]), dim=1))
    rows, last = log_probs.numpy(), values[:, -1:]
    ties = ((rows >= last).sum(1) > ids.shape[1]) & (last[:, 0] > -np.inf)
    for index in np.flatnonzero(ties):  # of equals any may have been found
        row, lowest = rows[index], last[index]
        best = np.flatnonzero(row > lowest)
        ids[index] = np.concatenate((best, np.flatnonzero(row == lowest)))[: ids.shape[1]]
        values[index] = row[ids[index]]
    order = np.lexsort((ids, -values))
    return np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)
