"""`TokenChooser`: from the logits of a step to its tokens, and to what else was asked for.

Decides in which order a step's logits are processed, searched, sampled and compared with guesses;
how each of these is done is told elsewhere in this package's neighbors. Knows no model and no KV
cache.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gptmanager.decoding.logits import PostProcessing
from gptmanager.decoding.random_numbers import derive_seed
from gptmanager.decoding.rejection import sample_guess
from gptmanager.decoding.sampling import Sampler
from gptmanager.executor.gathered_logits import GatheredLogits
from gptmanager.executor.sequence_tables import SequenceTables
from gptmanager.executor.step_in_flight import TorchStep, candidates, part_of, settle
from gptmanager.request.llm_request import SamplingParams
from gptmanager.step import NOT_FINITE, Extras, SequenceStart

DrawnGuesses = tuple[SamplingParams, np.ndarray]  # by what, and the logits `[n, vocab]`


class TokenChooser:
    """Chooses for slots of up to `max_beam_width` beams, whose histories lie in `tables`.

    Line `slot * max_beam_width + beam` of its tokens belongs to a beam; a chosen token is written
    to it. Logits post-processors get the logits where they are, all else has them on the CPU.
    """

    def __init__(
        self,
        tables: SequenceTables,
        sampler: Sampler,
        max_beam_width: int,
        outputs: GatheredLogits,
        processing: PostProcessing,
    ) -> None:
        self.max_beam_width = max_beam_width
        self._tables = tables
        self._sampler = sampler
        self._outputs = outputs
        self._processing = processing
        self._drawn: dict[int, DrawnGuesses] = {}  # by slot
        self._sampled: set[int] = set()  # slots whose beams are not searched
        num_slots = len(tables.tokens) // max_beam_width
        self._num_candidates = np.zeros(num_slots, dtype=np.int32)  # 0: no beams are searched

    def load(self, start: SequenceStart) -> None:
        """A sequence starts."""
        first = start.slot * self.max_beam_width
        for beam in range(start.beam_width):
            sampling = start.sampling
            if start.sampled and beam:
                sampling = replace(sampling, seed=derive_seed(sampling.seed, beam))
            self._sampler.load(first + beam, sampling, start.orig_prompt_len, start.output_config)
        if start.sampled or start.slot in self._sampled:
            (self._sampled.add if start.sampled else self._sampled.discard)(start.slot)
        is_searched = start.beam_width > 1 and not start.sampled
        most = min(start.num_candidates, self._sampler.vocab_size)
        self._num_candidates[start.slot] = most if is_searched else 0
        self._processing.start(start)
        if start.draft_logits is not None and start.draft_logits.numbers is not None:
            self._drawn[start.slot] = start.sampling, start.draft_logits.numbers
        elif self._drawn:
            self._drawn.pop(start.slot, None)

    def choose(self, step: TorchStep) -> None:
        """Tokens of each row, and what else its request wants."""
        raw = self._outputs.generation_logits(step.slots, step.firsts, step.logits, lambda own: own)
        raw = tuple((row, logits.to("cpu", copy=True)) for row, logits in raw)
        with torch.inference_mode():
            if self._depends_on_order(step):
                log_probs = self._verify_in_order(step)
            else:
                self._prepare(step)
                log_probs = settle(step, *self._pick(step))
        if raw or step.context_logits or log_probs is not None:
            step.extras = Extras(log_probs, raw, step.context_logits)
        self._forget_drawn(step)

    def receive(self, step: TorchStep) -> None:
        """Wait for what was chosen, where it does not come at once."""

    def _pick(self, step: TorchStep) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens and log probabilities of all S, behind the logits post-processors.

        The tokens are their sequences' next inputs, 0 where there is none; those behind a wrong
        guess are overwritten.
        """
        log_probs = self._outputs.log_probs(step.slots, len(step.lines))
        logits = step.logits.cpu()
        if self.max_beam_width > 1 and any(row.beam_width > 1 for row in step.rows):
            tokens = self._search(step, logits, log_probs)
        else:
            tokens = self._sampler.sample(logits, step.lines, step.positions, log_probs)
        # the last position of a sequence needs no input after it
        table = self._tables.tokens
        fits = step.positions < table.shape[1]
        table[step.lines[fits], step.positions[fits]] = np.maximum(tokens[fits], 0)
        return tokens, log_probs

    def _depends_on_order(self, step: TorchStep) -> bool:
        """Whether a token can be chosen only when the one before it is known.

        Penalties are no reason: guesses stand in the histories, and a choice behind a wrong one
        does not count.
        """
        if not step.schedule.drafts:
            return False
        guessed = [row.slot for row in step.rows if row.num_drafts]
        return not self._drawn.keys().isdisjoint(guessed) or (
            self._processing.is_on and self._processing.serves(np.array(guessed, dtype=np.int64))
        )

    def _verify_in_order(self, step: TorchStep) -> np.ndarray | None:
        """Choose one token after the other, as long as the guesses agree with what is chosen.

        So each token is chosen once, with the history that it has without guesses.
        """
        num_drafts = np.array([row.num_drafts for row in step.rows])
        guesses = {drafts.slot: drafts.tokens for drafts in step.schedule.drafts}
        found = np.zeros((len(step.rows), 1 + num_drafts.max()), dtype=np.int32)
        values = None if step.slots.size == 0 else self._outputs.log_probs(step.slots, found.size)
        values = None if values is None else values.reshape(found.shape)
        step.tokens, step.counts = found, np.ones(len(step.rows), dtype=np.int32)
        places = np.arange(len(step.rows))
        failed: dict[int, BaseException] = {}
        for offset in range(found.shape[1]):
            part = part_of(step, places, offset)
            self._prepare(part)
            drawn = self._drawn_guesses(part, offset) if self._drawn else []
            tokens, log_probs = self._pick(part)
            for place, (params, draft_logits), scores in drawn:
                if tokens[place] < 0:
                    continue
                position = int(part.positions[place])
                guess = guesses[int(part.lines[place]) // self.max_beam_width][offset]
                token = sample_guess(scores, draft_logits, guess, params, position)
                tokens[place] = self._tables.tokens[part.lines[place], position] = token
                if log_probs is not None:
                    log_probs[place] = scores[token]
            found[places, offset] = tokens[part.firsts[:-1]]
            if values is not None and log_probs is not None:
                values[places, offset] = log_probs[part.firsts[:-1]]
            failed |= {int(places[place]): error for place, error in part.failed.items()}
            step.counts[places] = offset + 1
            if not offset:
                step.beams = part.beams
            agree = [
                num_drafts[place] > offset
                and guesses[row.slot][offset] == found[place, offset]
                and int(place) not in failed
                for place, row in zip(places, part.rows, strict=True)
            ]
            places = places[agree]
            if not places.size:
                break
        step.failed = failed
        return values

    def _prepare(self, step: TorchStep) -> None:
        """Let logits post-processors change the logits; then each sampled beam gets its own."""
        if self._processing.is_on:
            step.failed = self._processing.run(
                step.logits,
                [row.request_id for row in step.rows],
                step.lines,
                step.positions,
                self._tables.tokens,
                step.firsts,
                self._tables.token_tensor,
            )
        if self._sampled and not self._sampled.isdisjoint(step.slots.tolist()):
            self._spread(step)

    def _spread(self, step: TorchStep) -> None:
        """After the context each sampled beam gets a row, of the same logits and history."""
        is_sampled = [row.slot in self._sampled for row in step.rows]
        starts, pieces, end = step.firsts.tolist(), [], 0
        copies = np.ones(len(step.lines), dtype=np.int64)
        for place in np.flatnonzero(is_sampled).tolist():
            first, width = starts[place], step.rows[place].beam_width
            if width == 1 or starts[place + 1] > first + 1:
                continue
            pieces += [step.logits[end:first], step.logits[first : first + 1].expand(width, -1)]
            end, copies[first] = first + 1, width
            self._tables.fork(int(step.lines[first]), [0] * width, int(step.positions[first]))
        if not pieces:
            return
        step.logits = torch.cat([*pieces, step.logits[end:]])
        firsts = np.concatenate(([0], np.cumsum(copies)))
        beams = np.arange(firsts[-1]) - firsts[:-1].repeat(copies)
        step.lines = step.lines.repeat(copies) + beams
        step.positions = step.positions.repeat(copies)
        step.firsts = firsts[step.firsts]

    def _forget_drawn(self, step: TorchStep) -> None:
        """A host's guesses follow the prompt alone."""
        for row in step.rows if self._drawn else ():
            self._drawn.pop(row.slot, None)

    def _drawn_guesses(
        self, part: TorchStep, offset: int
    ) -> list[tuple[int, DrawnGuesses, np.ndarray]]:
        """Sequences whose guess a host has drawn: place, from what, log probabilities."""
        found = []
        for row, first in zip(part.rows, part.firsts.tolist(), strict=False):
            drawn = self._drawn.get(row.slot)
            if drawn is not None and offset < row.num_drafts:
                place, mine = first, slice(first, first + 1)
                scores = self._sampler.log_probs(
                    part.logits[mine].to("cpu", copy=True), part.lines[mine], part.positions[mine]
                )
                found.append((place, (drawn[0], drawn[1][offset]), scores[0].numpy()))
        return found

    def _search(self, step: TorchStep, logits: Tensor, log_probs: np.ndarray | None) -> np.ndarray:
        """Tokens of what is sampled, of a searched beam 0 or NOT_FINITE; candidates of all."""
        counts = self._num_candidates[step.slots]
        searched = counts.repeat(np.diff(step.firsts)) > 0
        tokens = np.zeros(len(step.lines), dtype=np.int32)
        values = np.zeros(len(step.lines), dtype=np.float32) if log_probs is None else log_probs
        single, beams = np.flatnonzero(~searched), np.flatnonzero(searched)
        own = values[single]
        tokens[single] = self._sampler.sample(
            logits[torch.from_numpy(single)], step.lines[single], step.positions[single], own
        )
        values[single] = own
        scores = self._sampler.log_probs(
            logits[torch.from_numpy(beams)], step.lines[beams], step.positions[beams]
        )
        tokens[beams[torch.isnan(scores[:, 0]).numpy()]] = NOT_FINITE
        best = _best(scores, int(counts.max(initial=1)))
        most = best[0].shape[1]
        best_tokens = np.zeros((len(step.lines), most), dtype=np.int32)
        best_values = np.zeros((len(step.lines), most), dtype=np.float32)
        best_tokens[beams], best_values[beams] = best
        step.beams = candidates(step, counts, tokens, values, best_tokens, best_values)
        return tokens


def _best(log_probs: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log probabilities of the `count` best of each row, the lowest id on a tie."""
    values, ids = (found.numpy() for found in log_probs.topk(min(count, log_probs.shape[1]), dim=1))
    rows, last = log_probs.numpy(), values[:, -1:]
    ties = ((rows >= last).sum(1) > ids.shape[1]) & (last[:, 0] > -np.inf)
    for place in np.flatnonzero(ties):  # of equals any may have been found
        row, lowest = rows[place], last[place]
        best = np.flatnonzero(row > lowest)
        ids[place] = np.concatenate((best, np.flatnonzero(row == lowest)))[: ids.shape[1]]
        values[place] = row[ids[place]]
    order = np.lexsort((ids, -values))
    return np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)
