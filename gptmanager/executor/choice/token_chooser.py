"""`TokenChooser`: chooses a step's tokens from its logits, and computes the requested outputs.

This module decides the order in which a step's logits are post-processed, searched, sampled and
compared with drafts. The package `decoding` implements these operations. This module does not know
models and KV caches. One choice is one token that is chosen from one row of logits; see
`SamplingRows`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from gptmanager.decoding.lines import Lines
from gptmanager.decoding.processors.logits import PostProcessing
from gptmanager.decoding.sampling.best_tokens import best_ids, best_tokens
from gptmanager.decoding.sampling.random_numbers import derive_seed
from gptmanager.decoding.sampling.sampling import Sampler
from gptmanager.executor.choice.drawn_drafts import DrawnDrafts
from gptmanager.executor.choice.gathered_logits import GatheredLogits
from gptmanager.executor.choice.top_tokens import TopTokens, joined
from gptmanager.executor.sequence_tables import SequenceTables
from gptmanager.executor.step_in_flight import (
    ChosenTokens,
    PendingTokens,
    SamplingRows,
    StepInFlight,
    accepted,
    candidates,
    num_right_drafts,
    part_of,
)
from gptmanager.step import NOT_FINITE, BeamCandidates, SequenceStart, TopLogProbs

_Beams = tuple[BeamCandidates, ...]


class _Picked(NamedTuple):
    """The tokens and log probabilities of all S choices.

    `beams`: the candidates of rows with several beams. `top`: the top tokens, if a row asks for
    them.
    """

    tokens: np.ndarray
    log_probs: np.ndarray | None
    beams: _Beams
    top: TopTokens | None

    @property
    def top_log_probs(self) -> tuple[TopLogProbs, ...]:
        return () if self.top is None else self.top.by_row()


class Chooser(Protocol):
    """The interface by which an executor chooses tokens.

    `gathered`: the logits and log probabilities that sequences ask for.
    """

    lines: Lines
    gathered: GatheredLogits

    def load(self, start: SequenceStart) -> None:
        """Load the sampling parameters and output options of a sequence that starts."""

    def choose(self, step: StepInFlight) -> PendingTokens:
        """Choose the tokens of each row and compute the other outputs that its request asks for."""


class TokenChooser:
    """Chooses tokens on the CPU.

    The chooser reads the histories of sequences in `tables`, and writes the tokens there. Logits
    post-processors get the logits on the device where they were computed.
    """

    def __init__(
        self, lines: Lines, tables: SequenceTables, sampler: Sampler, processing: PostProcessing
    ) -> None:
        self.lines = lines
        self._tables = tables
        self._sampler = sampler
        self.gathered = GatheredLogits(lines.num_slots)
        self._processing = processing
        self._drawn = DrawnDrafts(sampler)
        self._sampled: set[int] = set()  # slots with beams that are sampled, not searched
        # by slot: the number of candidates of each beam in a beam search; 0 without beam search
        self._num_candidates = np.zeros(lines.num_slots, dtype=np.int32)

    def load(self, start: SequenceStart) -> None:
        """Load the sampling parameters and output options of a sequence that starts."""
        for beam in range(start.beam_width):
            sampling = start.sampling
            if start.sampled and beam:
                sampling = replace(sampling, seed=derive_seed(sampling.seed, beam))
            line = self.lines.of(start.slot, beam)
            self._sampler.load(line, sampling, start.orig_prompt_len, start.output_config)
        (self._sampled.add if start.sampled else self._sampled.discard)(start.slot)
        is_searched = start.beam_width > 1 and not start.sampled
        most = min(start.num_candidates, self._sampler.vocab_size)
        self._num_candidates[start.slot] = most if is_searched else 0
        self._processing.start(start)
        self._drawn.load(start)

    def choose(self, step: StepInFlight) -> PendingTokens:
        """Choose the tokens of each row and compute the other outputs that its request asks for."""
        rows = step.rows
        raw: tuple[tuple[int, Tensor], ...] = ()
        if self.gathered.any_generation:
            raw = self.gathered.generation_logits(
                rows.slots, rows.firsts, step.logits, lambda own: own.to("cpu", copy=True)
            )
        with torch.inference_mode():
            if self._depends_on_order(rows):
                chosen = self._verify_in_order(rows, step.logits)._replace(generation_logits=raw)
            else:
                rows, logits, failed = self._prepare(rows, step.logits)
                picked = self._pick(rows, logits)
                found = self._by_row(rows, picked.tokens, picked.log_probs)
                chosen = ChosenTokens(*found, picked.beams, failed, raw, picked.top_log_probs)
        return lambda: chosen

    def _pick(self, rows: SamplingRows, logits: Tensor) -> _Picked:
        """Choose all S tokens from `logits` `[S, vocab]`, and write them to the tables."""
        log_probs, top = None, None
        if self.gathered.any_log_probs and self.gathered.wants_log_probs(rows.slots):
            log_probs = np.zeros(len(rows.lines), dtype=np.float32)
            top = self._top_tokens(rows)
        logits = logits.cpu().contiguous()  # changed in place below
        beams: _Beams = ()
        if self.lines.max_beam_width > 1 and any(row.beam_width > 1 for row in rows.rows):
            tokens, beams = self._search(rows, logits, log_probs, top)
        else:
            tokens = self._sampler.sample(logits, rows.lines, rows.positions, log_probs)
            if top is not None and log_probs is not None:
                self._rank(top, np.arange(len(tokens)), logits, rows.lines, tokens, log_probs)
        self._write(rows, tokens)
        return _Picked(tokens, log_probs, beams, top)

    def _top_tokens(self, rows: SamplingRows) -> TopTokens | None:
        """Return storage for the rows' top tokens; None if no row asks for them."""
        if not self.gathered.any_top:
            return None
        counts = self.gathered.num_top(rows.slots)
        return TopTokens(rows, counts) if counts.any() else None

    def _rank(
        self,
        top: TopTokens,
        choices: np.ndarray,
        logits: Tensor,
        lines: np.ndarray,
        tokens: np.ndarray,
        log_probs: np.ndarray,
    ) -> None:
        """Store in `top` the top tokens of those `choices` that ask for them.

        `logits` `[n, vocab]`: the logits from which the `tokens` `[n]` were sampled.
        """
        own = np.flatnonzero(top.wanted[choices])
        logits = logits[torch.from_numpy(own)]
        ids = best_ids(logits, top.most)
        sampled = logits, lines[own], tokens[own], log_probs[own]
        top.put(choices[own], self._sampler.log_probs_of(ids, *sampled), ids)

    def _write(self, rows: SamplingRows, tokens: np.ndarray, own: np.ndarray | None = None) -> None:
        """Write tokens `[S]` to the tables, as the next inputs of their sequences.

        `own`: a mask `[S]` of the tokens to write. In place of NO_TOKEN and NOT_FINITE, 0 is
        written. Tokens after a wrong draft are overwritten later.
        """
        table = self._tables.tokens
        # a token beyond the longest sequence is never an input
        fits = rows.positions < table.shape[1]
        if own is not None:
            fits &= own
        table[rows.lines[fits], rows.positions[fits]] = np.maximum(tokens[fits], 0)

    def _prepare(
        self, rows: SamplingRows, logits: Tensor
    ) -> tuple[SamplingRows, Tensor, Mapping[int, BaseException]]:
        """Run the logits post-processors, then repeat the logits of contexts for sampled beams.

        Returns the rows, their logits, and the errors of post-processors by index of the row.
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
        if self._sampled:
            rows, logits = self._spread(rows, logits)
        return rows, logits, failed

    @staticmethod
    def _by_row(
        rows: SamplingRows, tokens: np.ndarray, log_probs: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Return tokens, counts and log probabilities by row, as in `ChosenTokens`."""
        if rows.drafts:
            return accepted(rows, tokens, log_probs)
        heads = rows.firsts[:-1]
        return tokens[heads, None], None, None if log_probs is None else log_probs[heads, None]

    # Several beams -----------------------------------------------------------------------------

    def _spread(self, rows: SamplingRows, logits: Tensor) -> tuple[SamplingRows, Tensor]:
        """Repeat the logits and history of each context with sampled beams, once for each beam."""
        is_sampled = [row.slot in self._sampled for row in rows.rows]
        starts, pieces, end = rows.firsts.tolist(), [], 0
        copies = np.ones(len(rows.lines), dtype=np.int64)
        for index in np.flatnonzero(is_sampled).tolist():
            first, width = starts[index], rows.rows[index].beam_width
            if starts[index + 1] > first + 1:
                continue  # not a context
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
        self,
        rows: SamplingRows,
        logits: Tensor,
        log_probs: np.ndarray | None,
        top: TopTokens | None,
    ) -> tuple[np.ndarray, _Beams]:
        """Return the tokens of all choices, and the candidates of rows with several beams.

        The token of a searched beam is 0, or NOT_FINITE if one of its logits is NaN or +inf.
        """
        counts = self._num_candidates[rows.slots]
        searched = counts.repeat(np.diff(rows.firsts)) > 0
        tokens = np.zeros(len(rows.lines), dtype=np.int32)
        values = np.zeros(len(rows.lines), dtype=np.float32) if log_probs is None else log_probs
        single, beams = np.flatnonzero(~searched), np.flatnonzero(searched)
        own, part, lines = values[single], logits[torch.from_numpy(single)], rows.lines[single]
        tokens[single] = self._sampler.sample(part, lines, rows.positions[single], own)
        values[single] = own
        scores = self._sampler.log_probs(
            logits[torch.from_numpy(beams)], rows.lines[beams], rows.positions[beams]
        )
        tokens[beams[torch.isnan(scores[:, 0]).numpy()]] = NOT_FINITE
        if top is not None:
            self._rank(top, single, part, lines, tokens[single], own)
            wanted = np.flatnonzero(top.wanted[beams])
            ids = best_ids(scores[torch.from_numpy(wanted)], top.most)
            top.put(beams[wanted], np.take_along_axis(scores.numpy()[wanted], ids, 1), ids)
        best = best_tokens(scores, int(counts.max(initial=1)))
        most = best[0].shape[1]
        found_tokens = np.zeros((len(rows.lines), most), dtype=np.int32)
        found_values = np.zeros((len(rows.lines), most), dtype=np.float32)
        found_tokens[beams], found_values[beams] = best
        return tokens, candidates(rows, counts, tokens, values, found_tokens, found_values)

    # Drafts that each depend on the one before --------------------------------------------------

    def _depends_on_order(self, rows: SamplingRows) -> bool:
        """Return whether a row's tokens must be chosen one after the other, because of its drafts.

        Penalties alone do not require this order: the histories contain the drafts, and a choice
        after a wrong draft does not count.
        """
        if self._drawn.by_slot and self._drawn.has_any(rows.slots):
            return True
        if not (rows.drafts and self._processing.sequences):
            return False
        drafted = [row.slot for row in rows.rows if row.num_drafts]
        return self._processing.serves(np.array(drafted, dtype=np.int64))

    def _verify_in_order(self, rows: SamplingRows, logits: Tensor) -> ChosenTokens:
        """Choose the tokens of each row one after the other, until one differs from its draft.

        Each token is thus chosen once, with the same history as without drafts.
        """
        tokens, log_probs = np.zeros(len(rows.lines), dtype=np.int32), None
        beams: _Beams = ()
        top: dict[int, list[TopLogProbs]] = {}
        failed: dict[int, BaseException] = {}
        left = np.arange(len(rows.rows))
        for offset in itertools.count():
            part, part_logits, errors = self._prepare(*part_of(rows, logits, left, offset))
            compared = self._drawn.at(part, part_logits)
            picked = self._pick(part, part_logits)
            values = picked.log_probs
            self._drawn.replace_rejected(part, compared, picked.tokens, values, self._tables.tokens)
            for own in picked.top_log_probs:
                top.setdefault(int(left[own.row]), []).append(own)
            numbers, heads = rows.firsts[left] + offset, part.firsts[:-1]
            tokens[numbers] = picked.tokens[heads]
            if values is not None:
                if log_probs is None:
                    log_probs = np.zeros(len(tokens), dtype=np.float32)
                log_probs[numbers] = values[heads]
            failed |= {int(left[index]): error for index, error in errors.items()}
            if not offset:
                beams = picked.beams
            right = num_right_drafts(rows, tokens)
            left = np.array([index for index in left[right[left] > offset] if index not in failed])
            if not left.size:
                break
        ranked = tuple(joined(row, parts) for row, parts in top.items())
        return ChosenTokens(*accepted(rows, tokens, log_probs), beams, failed, top_log_probs=ranked)
