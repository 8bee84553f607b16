"""`TokenChooser`: from the logits of a step to its tokens, and to what else was asked for.

Decides in which order a step's logits are processed, searched, sampled and compared with guesses;
how each of these is done is told elsewhere in this package's neighbors. Knows no model and no KV
cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptmanager.decoding.logits import PostProcessing
from gptmanager.decoding.random_numbers import derive_seed
from gptmanager.decoding.rejection import sample_guess
from gptmanager.decoding.sampling import Sampler
from gptmanager.request import SamplingParams
from gptmanager.slot_outputs import SlotOutputs
from gptmanager.step import (
    BeamCandidates,
    ContextLogits,
    Extras,
    Failure,
    Row,
    Schedule,
    SequenceStart,
)

DrawnGuesses = tuple[SamplingParams, np.ndarray]  # by what, and the logits `[n, vocab]`


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
    arrival: Any = None  # of tokens that are on their way from a device
    beams: tuple[BeamCandidates, ...] = ()
    failed: Mapping[int, BaseException] = field(default_factory=dict)  # by sampling row
    starved: tuple[Failure, ...] = ()  # what could not be run
    extras: Extras | None = None


class TokenChooser:
    """Chooses for slots of up to `max_beam_width` beams, whose histories lie in `token_table`.

    Line `slot * max_beam_width + beam` of `token_table` int32 `[lines, max_seq_len]` belongs to a
    beam; a chosen token is written to it. Logits post-processors get the logits where they are, all
    else has them on the CPU. `token_tensor`: the table where the logits are, None: on the CPU.
    """

    def __init__(
        self,
        token_table: np.ndarray,
        sampler: Sampler,
        max_beam_width: int,
        outputs: SlotOutputs,
        processing: PostProcessing,
        token_tensor: Tensor | None = None,
    ) -> None:
        self.max_beam_width = max_beam_width
        self._token_table = token_table
        self._token_tensor = token_tensor
        self._sampler = sampler
        self._outputs = outputs
        self._processing = processing
        self._drawn: dict[int, DrawnGuesses] = {}  # by slot
        self._sampled: set[int] = set()  # slots whose beams are not searched

    def load(self, start: SequenceStart) -> None:
        """A sequence starts."""
        first = start.slot * self.max_beam_width
        for beam in range(start.beam_width):
            sampling = start.sampling
            if start.sampled and beam:
                sampling = replace(sampling, seed=derive_seed(sampling.seed, beam))
            self._sampler.load(first + beam, sampling, start.orig_prompt_len, start.wanted)
        if start.sampled or start.slot in self._sampled:
            (self._sampled.add if start.sampled else self._sampled.discard)(start.slot)
        self._processing.start(start)
        if start.draft_logits is not None and start.draft_logits.numbers is not None:
            self._drawn[start.slot] = start.sampling, start.draft_logits.numbers
        elif self._drawn:
            self._drawn.pop(start.slot, None)

    def sees(self, step: TorchStep) -> bool:
        """More is done with these logits than to sample from them, or to search beams."""
        return bool(
            step.schedule.drafts
            or self._outputs.wants_generation_logits(step.slots)
            or self._processing.serves(step.slots)
            or (self._sampled and not self._sampled.isdisjoint(step.slots.tolist()))
        )

    def choose(self, step: TorchStep) -> None:
        """Tokens of each row, and what else its request wants."""
        raw = self._outputs.generation_logits(step.slots, step.firsts, step.logits)
        with torch.inference_mode():
            if step.schedule.drafts:
                log_probs = self._verify(step)
            else:
                tokens, log_probs = self._choose(step)
                step.tokens = tokens[step.firsts[:-1], None]
                log_probs = None if log_probs is None else log_probs[step.firsts[:-1], None]
        if raw or step.context_logits or log_probs is not None:
            step.extras = Extras(log_probs, raw, step.context_logits)
        for row in step.rows if self._drawn else ():  # a host's guesses follow the prompt alone
            self._drawn.pop(row.slot, None)

    def _choose(self, step: TorchStep) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens and log probabilities of all S; the tokens are their sequences' next inputs."""
        self._process(step)
        return self._pick(step)

    def _pick(self, step: TorchStep) -> tuple[np.ndarray, np.ndarray | None]:
        """As `_choose`, behind the logits post-processors."""
        log_probs = self._outputs.log_probs(step.slots, len(step.lines))
        logits = step.logits.cpu()
        if self.max_beam_width > 1 and any(row.beam_width > 1 for row in step.rows):
            tokens = self._search(step, logits, log_probs)
        else:
            tokens = self._sampler.sample(logits, step.lines, step.positions, log_probs)
        # the last position of a sequence needs no input after it
        fits = step.positions < self._token_table.shape[1]
        self._token_table[step.lines[fits], step.positions[fits]] = tokens[fits]
        return tokens, log_probs

    def _verify(self, step: TorchStep) -> np.ndarray | None:
        """Choose tokens as long as the guesses agree with what is chosen; log probabilities."""
        if (
            self._drawn
            or self._processing.serves(step.slots)
            or self._sampler.adjusts(step.lines)
            or any(row.beam_width > 1 for row in step.rows)
        ):
            return self._verify_in_order(step)
        return self._verify_at_once(step)

    def _verify_at_once(self, step: TorchStep) -> np.ndarray | None:
        """Where no choice depends on the ones before it all are made, and the right ones kept."""
        size = len(step.lines)
        log_probs = self._outputs.log_probs(step.slots, size)
        tokens = self._sampler.sample(step.logits.cpu(), step.lines, step.positions, log_probs)
        guesses = {drafts.slot: drafts.tokens for drafts in step.schedule.drafts}
        longest = int(np.diff(step.firsts).max(initial=1))
        step.tokens = np.zeros((len(step.rows), longest), dtype=np.int32)
        step.counts = np.ones(len(step.rows), dtype=np.int32)
        values = None if log_probs is None else np.zeros(step.tokens.shape, dtype=np.float32)
        for place, (row, first) in enumerate(zip(step.rows, step.firsts.tolist(), strict=False)):
            chosen, count = tokens[first : first + 1 + row.num_drafts], 1
            for guess in guesses[row.slot][: row.num_drafts] if row.num_drafts else ():
                if guess != chosen[count - 1]:
                    break
                count += 1
            step.tokens[place, :count] = chosen[:count]
            step.counts[place] = count
            if values is not None and log_probs is not None:
                values[place, :count] = log_probs[first : first + count]
            # the last position of a sequence needs no input after it
            line, position = step.lines[first], step.positions[first]
            own = self._token_table[line, position : position + count]
            own[:] = chosen[: len(own)]
        return values

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
            part = _part(step, places, offset)
            self._process(part)
            drawn = self._drawn_guesses(part, offset) if self._drawn else []
            tokens, log_probs = self._pick(part)
            for place, (params, draft_logits), scores in drawn:
                position = int(part.positions[place])
                guess = guesses[int(part.lines[place]) // self.max_beam_width][offset]
                token = sample_guess(scores, draft_logits, guess, params, position)
                tokens[place] = self._token_table[part.lines[place], position] = token
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

    def _process(self, step: TorchStep) -> None:
        """Let logits post-processors change the logits."""
        if not self._processing.is_on:
            return
        step.failed = self._processing.run(
            step.logits,
            [row.request_id for row in step.rows],
            step.lines,
            step.positions,
            self._token_table,
            step.firsts,
            self._token_tensor,
        )

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
        """Tokens of the sequences of one beam; candidates of the beams, whose tokens stay 0."""
        rows, firsts = step.rows, step.firsts
        widths = np.array([row.beam_width for row in rows], dtype=np.int64)
        searched = np.repeat(widths > 1, np.diff(firsts))
        tokens = np.zeros(len(step.lines), dtype=np.int32)
        single, beams = np.flatnonzero(~searched), np.flatnonzero(searched)
        values = None if log_probs is None else log_probs[single]
        tokens[single] = self._sampler.sample(
            logits[torch.from_numpy(single)], step.lines[single], step.positions[single], values
        )
        if log_probs is not None:
            log_probs[single] = values
        logits = logits[torch.from_numpy(beams)]
        lines, positions = step.lines[beams], step.positions[beams]
        found, first = [], 0
        for row, count in zip(rows, np.diff(firsts).tolist(), strict=True):
            if row.beam_width > 1:
                part = slice(first, first + count)
                find = self._sample_beams if row.slot in self._sampled else self._search_beams
                found.append(find(row, logits[part], lines[part], positions[part]))
                first += count
        step.beams = tuple(found)
        return tokens

    def _search_beams(
        self, row: Row, logits: Tensor, lines: np.ndarray, positions: np.ndarray
    ) -> BeamCandidates:
        scores = self._sampler.log_probs(logits, lines, positions)
        ids, best = _best(scores, 2 * row.beam_width)
        return BeamCandidates(tuple(map(tuple, ids.tolist())), tuple(map(tuple, best.tolist())))

    def _sample_beams(
        self, row: Row, logits: Tensor, lines: np.ndarray, positions: np.ndarray
    ) -> BeamCandidates:
        """A token for each beam; after the context all from the same logits and history."""
        count = row.beam_width
        if len(lines) < count:
            lines = lines[0] + np.arange(count)
            self._token_table[lines[1:], : positions[0]] = self._token_table[
                lines[0], : positions[0]
            ]
            logits, positions = logits.repeat(count, 1), positions.repeat(count)
        log_probs = np.zeros(count, dtype=np.float32)
        tokens = self._sampler.sample(logits, lines, positions, log_probs)
        return BeamCandidates(
            tuple((token,) for token in tokens.tolist()),
            tuple((value,) for value in log_probs.tolist()),
        )


def _part(step: TorchStep, places: np.ndarray, offset: int) -> TorchStep:
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


def _best(log_probs: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log probabilities of the `count` best of each row, the lowest id on a tie."""
    values, ids = log_probs.topk(min(count, log_probs.shape[1]), dim=1)
    order = np.lexsort((ids.numpy(), -values.numpy()))
    return np.take_along_axis(ids.numpy(), order, 1), np.take_along_axis(values.numpy(), order, 1)
