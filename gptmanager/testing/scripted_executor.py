"""`ScriptedExecutor` runs steps without a model: a function of the history returns the tokens.

The executor refuses a schedule that no executor could run. It also checks each position of the KV
cache that a row reads: its value must have been computed from the tokens of the row's sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from gptmanager.arguments import function
from gptmanager.step import BeamCandidates, BeamFork, Row, Schedule, StepResult

NextToken = Callable[[list[int]], int]  # the history, prompt included -> the next token

_NOTHING = 0  # the value of a position that was never written


@dataclass(slots=True)
class _Sequence:
    """A running sequence, or a beam of it.

    `expected[position]` is the value that the KV cache must hold at a position.
    """

    tokens: list[int]
    num_computed: int | None = None  # tokens in the KV cache; None before the first row
    block_ids: list[int] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)

    def extend_expected(self) -> None:
        """Compute the value of each new position from its token and all tokens before it."""
        new = self.tokens[len(self.expected) :]
        last = self.expected[-1] if self.expected else _NOTHING
        mixed = accumulate(new, lambda before, token: hash((before, token)), initial=last)
        self.expected.extend(list(mixed)[1:])

    def accept(self, next_token: NextToken, num_drafts: int) -> list[int]:
        """Append the next tokens and return them.

        `tokens` ends with `num_drafts` drafts. The drafts before the first wrong draft are
        accepted.
        """
        drafts = self.tokens[len(self.tokens) - num_drafts :]
        del self.tokens[len(self.tokens) - num_drafts :]
        found: list[int] = []
        for draft in [*drafts, None]:
            found.append(next_token(self.tokens))
            self.tokens.append(found[-1])
            if found[-1] != draft:
                break
        return found

    def rewind(self, tokens_per_block: int) -> None:
        """Drop the values of wrong drafts, and the blocks that hold no other values."""
        self.num_computed = len(self.tokens) - 1
        del self.expected[self.num_computed :]
        del self.block_ids[-(-self.num_computed // tokens_per_block) :]

    def fork(self, token: int, *, same: bool) -> _Sequence:
        """Return a new beam that continues this beam with `token`.

        If `same`, the new beam has the same index as this beam, and so keeps its blocks.
        """
        block_ids = self.block_ids if same else []
        return _Sequence([*self.tokens, token], self.num_computed, block_ids, self.expected.copy())


@dataclass(slots=True)
class ScriptedStep:
    """A step that has run.

    `tokens` has the new tokens of each row that samples, and `beams` the candidates of each row
    with several beams. `ScriptedExecutor.sample` sets both.
    """

    schedule: Schedule
    tokens: list[list[int]] = field(default_factory=list)
    beams: list[BeamCandidates] = field(default_factory=list)


class ScriptedExecutor:
    """An `Executor` that takes its tokens from a function of the history.

    `forward` raises ValueError for a schedule that no executor could run: a position does not
    continue its sequence, a position has no block, or a token is not known yet. `forward` also
    tracks the content of each block, and raises ValueError for a row that would read the values of
    other tokens. Shared or copied blocks must have exactly the content that the sequence would have
    computed. The candidates of a beam are the scripted token and the next higher token ids.
    """

    def __init__(self, next_token: NextToken, tokens_per_block: int) -> None:
        self.next_token = function("ScriptedExecutor.next_token", next_token)
        self.tokens_per_block = tokens_per_block
        self.schedules: list[Schedule] = []
        self._sequences: dict[tuple[int, int], _Sequence] = {}  # by slot and beam
        self._contents: dict[int, list[int]] = {}  # by block
        self._num_candidates: dict[int, int] = {}  # by slot

    def forward(self, schedule: Schedule) -> ScriptedStep:
        """Start a step: write the tokens of its rows to their blocks."""
        self.schedules.append(schedule)
        for source, destination, num_tokens in schedule.block_copies:
            self._content(destination)[:num_tokens] = self._content(source)[:num_tokens]
        for start in schedule.starts:
            self._sequences[start.slot, 0] = _Sequence(list(start.tokens))
            self._num_candidates[start.slot] = start.num_candidates
        for fork in schedule.beam_forks:
            self._fork(fork)
        for append in schedule.block_appends:
            blocks = self._sequence(append.slot, append.beam).block_ids
            if len(blocks) != append.first:
                raise ValueError(f"slot {append.slot} has {len(blocks)} blocks: {append}")
            blocks.extend(append.block_ids)
        for drafts in schedule.drafts:
            tokens = self._sequence(drafts.slot, 0).tokens
            if len(tokens) != drafts.position:
                raise ValueError(f"slot {drafts.slot} has {len(tokens)} tokens: {drafts}")
            tokens.extend(drafts.tokens)
        running = [(row, self._sequence(row.slot, 0)) for row in schedule.context_rows]
        for row in schedule.generation_rows:
            running += ((row, self._sequence(row.slot, beam)) for beam in range(row.beam_width))
        for row, sequence in running:
            self._check(row, sequence)
        for row, sequence in running:
            self._write(row, sequence)
        for row, sequence in running:  # the rows of one step must not overwrite each other
            self._check_content(row, sequence, row.position + row.num_tokens)
        return ScriptedStep(schedule)

    def sample(self, step: ScriptedStep) -> None:
        """Choose the step's tokens by the script."""
        contexts = sum(row.samples for row in step.schedule.context_rows)
        for index, row in enumerate(step.schedule.sampling_rows):
            num_beams = 1 if index < contexts else row.beam_width
            sequences = [self._sequences[row.slot, beam] for beam in range(num_beams)]
            if row.beam_width == 1:
                step.tokens.append(sequences[0].accept(self.next_token, row.num_drafts))
                if row.num_drafts:
                    sequences[0].rewind(self.tokens_per_block)
            else:
                tokens = [self.next_token(sequence.tokens) for sequence in sequences]
                step.tokens.append(tokens[:1])
                step.beams.append(candidates(tokens, self._num_candidates[row.slot]))

    def result(self, step: ScriptedStep) -> StepResult:
        """Return the step's tokens."""
        counts = np.array([len(tokens) for tokens in step.tokens], dtype=np.int32)
        tokens = np.zeros((len(counts), max(counts, default=1)), dtype=np.int32)
        for row, found in zip(tokens, step.tokens, strict=True):
            row[: len(found)] = found
        return StepResult(tokens, now=0.0, num_tokens=counts, beams=tuple(step.beams))

    def _sequence(self, slot: int, beam: int) -> _Sequence:
        if (slot, beam) not in self._sequences:
            raise ValueError(f"no sequence has started in slot {slot}, beam {beam}")
        return self._sequences[slot, beam]

    def _fork(self, fork: BeamFork) -> None:
        parents = [self._sequence(fork.slot, parent) for parent in fork.parents]
        if any(len(parent.tokens) != fork.position for parent in parents):
            raise ValueError(f"{fork} does not continue its parents")
        for beam, (parent, token) in enumerate(zip(parents, fork.tokens, strict=True)):
            same = beam == fork.parents[beam]
            self._sequences[fork.slot, beam] = parent.fork(token, same=same)

    def _check(self, row: Row, sequence: _Sequence) -> None:
        end = row.position + row.num_tokens
        if (
            row.position != sequence.num_computed
            and sequence.num_computed is not None
            or end > len(sequence.tokens)
            or end > len(sequence.block_ids) * self.tokens_per_block
            or row.num_tokens < 1
        ):
            raise ValueError(f"{row} cannot continue {sequence}")
        sequence.extend_expected()
        self._check_content(row, sequence, row.position)

    def _check_content(self, row: Row, sequence: _Sequence, end: int) -> None:
        size = self.tokens_per_block
        for start, block in zip(range(0, end, size), sequence.block_ids, strict=False):
            expected = sequence.expected[start : min(end, start + size)]
            if self._content(block)[: len(expected)] != expected:
                raise ValueError(f"{row}: block {block} does not hold the tokens from {start} on")

    def _write(self, row: Row, sequence: _Sequence) -> None:
        for position in range(row.position, row.position + row.num_tokens):
            index, offset = divmod(position, self.tokens_per_block)
            content = self._content(sequence.block_ids[index])
            content[offset] = sequence.expected[position]
        sequence.num_computed = row.position + row.num_tokens

    def _content(self, block: int) -> list[int]:
        return self._contents.setdefault(block, [_NOTHING] * self.tokens_per_block)


def candidates(tokens: Sequence[int], count: int) -> BeamCandidates:
    """Return `count` candidates of each beam, the most probable first.

    `tokens` has the scripted token of each beam. The candidates of a beam are its scripted token
    and the next higher token ids.
    """
    return BeamCandidates(
        tuple(tuple(range(token, token + count)) for token in tokens),
        tuple(
            tuple(-0.25 * (rank + 1) - token % 7 / 16 for rank in range(count)) for token in tokens
        ),
    )
