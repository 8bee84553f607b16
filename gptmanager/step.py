"""The only values that cross between the loop and an executor, and between the world and the loop.

All are frozen. `Intake` is the one door through which anything that is not deterministic enters:
a recording of the intakes replays a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from gptmanager.api import InferenceRequest
from gptmanager.kv_cache.block import BlockCopy
from gptmanager.prompt_table import PromptTable
from gptmanager.request import NO_EXTRAS, SamplingParams, Wanted


class Failure(NamedTuple):
    """An effect of an earlier iteration that failed; ends the request that it names."""

    request_id: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Intake:
    """What the world says before one iteration. `now` is in seconds of a monotonic clock."""

    now: float
    requests: tuple[InferenceRequest, ...] = ()
    stops: frozenset[int] = frozenset()
    ready: tuple[int, ...] = ()
    failures: tuple[Failure, ...] = ()


class Row(NamedTuple):
    """One sequence in one step: `num_tokens` positions from `position` on are computed.

    `samples` False: an unfinished context chunk, no token comes of it. `epoch` tells the starts
    of one request apart, so that a result never reaches a later start of the same id.
    """

    request_id: int
    epoch: int
    slot: int
    position: int
    num_tokens: int
    samples: bool


class SequenceStart(NamedTuple):
    """A sequence takes a slot: everything the executor must know of it from now on.

    `tokens` is the history to compute from (prompt, and what was generated before a pause);
    the first `orig_prompt_len` of them came from the host.
    """

    slot: int
    tokens: tuple[int, ...]
    orig_prompt_len: int
    sampling: SamplingParams
    wanted: Wanted = NO_EXTRAS
    prompt_table: PromptTable | None = None


class BlockAppend(NamedTuple):
    """Blocks that the sequence in `slot` holds from entry `first` of its block table on."""

    slot: int
    first: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """One decided iteration, memory included; context rows stand before generation rows.

    `block_copies` come first, in order, before the rows write to any block. A sequence that starts
    may have its first row at a position above 0: its blocks hold what comes before.
    """

    iteration: int
    context_rows: tuple[Row, ...] = ()
    generation_rows: tuple[Row, ...] = ()
    starts: tuple[SequenceStart, ...] = ()
    block_appends: tuple[BlockAppend, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()
    paused: tuple[int, ...] = ()
    micro_batch_id: int = 0

    @property
    def num_context_tokens(self) -> int:
        return sum(row.num_tokens for row in self.context_rows)

    @property
    def sampling_rows(self) -> tuple[Row, ...]:
        """The rows that yield tokens, in the order of a result's rows."""
        return (*(row for row in self.context_rows if row.samples), *self.generation_rows)


class ContextLogits(NamedTuple):
    """Float32 logits `[n, vocab]` of a prompt's positions from `position` on."""

    request_id: int
    epoch: int
    position: int
    logits: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Extras:
    """What some rows of a step were to yield besides tokens, on the CPU.

    `log_probs` float32 `[rows, n]` as `StepResult.tokens`, of meaning where the row's `Wanted`
    says so. `generation_logits`: places of rows, each with float32 `[n, vocab]`.
    """

    log_probs: np.ndarray | None = None
    generation_logits: tuple[tuple[int, Tensor], ...] = ()
    context_logits: tuple[ContextLogits, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step yielded, a row for each of `Schedule.sampling_rows`.

    `tokens` int32 `[rows, n]`; `num_tokens` int32 `[rows]` says how many of the n count, None:
    all. `now`: when the result was there, in seconds of the clock of `Intake.now`. `extras` is not
    recorded: a replay has none.
    """

    tokens: np.ndarray
    now: float
    num_tokens: np.ndarray | None = None
    extras: Extras | None = None


class Step(Protocol):
    """A step under way: opaque to the loop but for the schedule that it runs."""

    @property
    def schedule(self) -> Schedule: ...


class Executor(Protocol):
    """Runs schedules: torch, scripted, replayed, or a cost model.

    `forward` enqueues the network over the rows, `sample` chooses the tokens, `result` waits for
    them. `forward` of the next step may come before `result` of this one (run-ahead): a sampled
    token is the input of its sequence's next row without passing through the host.
    """

    def forward(self, schedule: Schedule) -> Step: ...

    def sample(self, step: Any) -> None: ...

    def result(self, step: Any) -> StepResult: ...
