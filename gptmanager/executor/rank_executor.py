"""The executor of a rank. Every rank runs each schedule, and rank 0 chooses the tokens for all.

This module decides when a result is sent, and which of its tokens are written to the sequence
tables. A `ResultLink` sends the result. Within a step, the model exchanges tensors between ranks.

| stages | device | rank 0 chooses | other ranks get the tokens |
| --- | --- | --- | --- |
| 1 | CPU | in `sample` | in `sample`, by a message |
| 1 | other | in `sample`, enqueued | in `sample` on the device; on the CPU in `result` |
| several | CPU | in `result` | in `result`, by a message |
| several | other | in `sample`, enqueued | in `result`, by a message |
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gptmanager.decoding.lines import Lines
from gptmanager.errors import RankError
from gptmanager.executor.device_runner import DeviceRunner
from gptmanager.executor.result_message import pack, unpack
from gptmanager.executor.runner import Runner
from gptmanager.executor.sequence_tables import SequenceTables
from gptmanager.executor.step_in_flight import SamplingRows, StepInFlight
from gptmanager.ranks.layout import RankLayout
from gptmanager.statistics import Memory
from gptmanager.step import Executor, Schedule, Step, StepResult

# overwrites a tensor with the values that it has on the first rank of a pipeline stage
Broadcast = Callable[[Tensor], None]


class ResultLink(Protocol):
    """Sends messages from rank 0 to all other ranks, in order."""

    def send(self, message: bytes) -> None:
        """Send a message to all other ranks; only on rank 0. Raises RankError if a rank failed."""

    def receive(self) -> bytes:
        """Wait for the next message; not on rank 0. Raises RankError if a rank failed."""


class LaunchedStep(Step, Protocol):
    """A step of an `InnerExecutor`."""

    def computed(self) -> StepInFlight:
        """Return the step after its forward pass, for which this call may wait."""


class InnerExecutor(Executor, Protocol):
    """The executor of a single rank, which a `RankExecutor` connects to the other ranks.

    `settles_in_sample`: tokens are known on the CPU when `sample` returns. `writes_tokens`:
    `sample` writes the tokens as the next inputs of their sequences.
    """

    settles_in_sample: bool
    writes_tokens: bool

    @property
    def lines(self) -> Lines: ...

    @property
    def runner(self) -> Runner: ...

    @property
    def memory(self) -> Memory: ...

    def take_gil_wait_us(self) -> int: ...

    def forward(self, schedule: Schedule) -> LaunchedStep: ...

    def close(self, timeout_s: float) -> bool: ...

    def mark(self) -> threading.Event | None: ...


class SharedChoice:
    """Copies the tokens chosen by rank 0 to the devices of the other ranks of its stage.

    The next forward pass can then be enqueued before the tokens are known on the CPU.
    """

    def __init__(self, runner: DeviceRunner, broadcast: Broadcast, num_slots: int) -> None:
        self._runner, self._broadcast = runner, broadcast
        self._has_beams = runner.tables.tokens.shape[0] > num_slots

    def exchange(self, step: StepInFlight, *, writes: bool) -> None:
        """Broadcast the tokens that the next forward pass may read.

        `writes`: this rank receives the tokens and writes them to its tables; otherwise it sends
        the tokens that it has chosen.
        """
        with self._runner.stream, torch.inference_mode():
            cells = self._cells(step)
            if cells is None:
                return
            token_cells = self._runner.tables.token_cells
            if writes:
                tokens = torch.empty(len(cells), dtype=torch.int32, device=cells.device)
                self._broadcast(tokens)
                token_cells.index_copy_(0, cells, tokens)
            else:
                self._broadcast(token_cells.index_select(0, cells))

    def _cells(self, step: StepInFlight) -> Tensor | None:
        rows = step.rows
        cells = self._runner.tables.cells(rows.lines, rows.positions)
        if self._has_beams:
            widths = np.array([row.beam_width for row in rows.rows], dtype=np.int64)
            cells = cells[widths.repeat(np.diff(rows.firsts)) == 1]
        return self._runner.upload((cells,))[0] if cells.size else None


@dataclass(slots=True, eq=False)
class RankStep:
    """A step of a `RankExecutor`. `inner`: the step of the `InnerExecutor`.

    `num_starts`: for each sampling row, the number of sequences started in its slot up to this
    step. `result`: the result, or None until this rank knows it.
    """

    schedule: Schedule
    inner: LaunchedStep
    num_starts: np.ndarray
    result: StepResult | None = None


class RankExecutor(ABC):
    """The base of the executors of all ranks.

    `shared` copies tokens between devices, so that the next forward pass can be enqueued before the
    tokens are known on the CPU. It is None if tokens are sent only by messages.
    """

    _receives = False  # whether the tokens come from rank 0

    def __init__(
        self,
        executor: InnerExecutor,
        link: ResultLink,
        *,
        shared: SharedChoice | None = None,
        chooses: bool = False,
    ) -> None:
        self._executor = executor
        self._chooses = chooses
        self._link = link
        self._shared = shared
        self._tables: SequenceTables = executor.runner.tables
        self.on_decision: Callable[[Schedule], None] = lambda schedule: None
        # number of sequences that have started in each slot
        self._starts = np.zeros(executor.lines.num_slots, dtype=np.int64)

    @property
    def runner(self) -> Runner:
        return self._executor.runner

    @property
    def memory(self) -> Memory:
        return self._executor.memory

    def take_gil_wait_us(self) -> int:
        return self._executor.take_gil_wait_us()

    def close(self, timeout_s: float) -> bool:
        """End the threads of the executor. Return False if they have not ended in time."""
        return self._executor.close(timeout_s)

    def mark(self) -> threading.Event | None:
        """Return an event that is set when all forward passes that were submitted have run.

        Returns None if they have run already, or if a CUDA stream runs them before all later work.
        """
        return self._executor.mark()

    def forward(self, schedule: Schedule) -> RankStep:
        """Run or enqueue the forward pass of a schedule."""
        self.on_decision(schedule)  # first: a rank with another schedule than rank 0 fails here
        for start in schedule.starts:
            self._starts[start.slot] += 1
        slots = [row.slot for row in schedule.sampling_rows]
        return RankStep(schedule, self._executor.forward(schedule), self._starts[slots])

    def sample(self, step: RankStep) -> None:
        """Choose or receive the tokens of a step, unless `result` does; see the module's table."""
        if self._chooses:
            self._executor.sample(step.inner)
        if self._shared is not None:
            self._shared.exchange(step.inner.computed(), writes=self._receives)
        if self._executor.settles_in_sample:
            self._settle(step)

    def result(self, step: RankStep) -> StepResult:
        """Return the result of a step. Its tokens are the same on all ranks."""
        return step.result or self._settle(step)

    @abstractmethod
    def _settle(self, step: RankStep) -> StepResult:
        """Send or receive the result of a step."""

    def _write(self, step: RankStep, result: StepResult) -> None:
        """Write the tokens of a result as the next inputs of their sequences.

        A row is skipped if another sequence has started in its slot since the launch. A row with
        several beams is also skipped, because the beam forks of the next schedule write its tokens.
        Tokens after a wrong draft are overwritten before they are read.
        """
        rows = step.inner.computed().rows
        is_current = step.num_starts == self._starts[rows.slots]
        if self._tables.tokens.shape[0] > len(self._starts):
            is_current &= np.array([row.beam_width == 1 for row in rows.rows], dtype=np.bool_)
        lines, positions, tokens = _cells(rows, result)
        width = result.tokens.shape[1]
        fits = is_current.repeat(width) & (positions < self._tables.tokens.shape[1])
        written = lines[fits], positions[fits], np.maximum(tokens[fits], 0)
        if self._shared is None:
            self._tables.write_cells(*written)
        else:  # only to the CPU's tables, because the device has the tokens already
            SequenceTables.write_cells(self._tables, *written)


def _cells(rows: SamplingRows, result: StepResult) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the lines, the positions (both int64) and the tokens of a result, all `[n]`."""
    heads, width = rows.firsts[:-1], result.tokens.shape[1]
    positions = (rows.positions[heads][:, None] + np.arange(width)).ravel()
    return rows.lines[heads].repeat(width), positions, result.tokens.ravel()


class LeadingExecutor(RankExecutor):
    """The executor of rank 0: chooses tokens and sends them.

    `sends_extras`: log probabilities and logits are also sent, for ranks that respond to their own
    hosts.
    """

    def __init__(
        self,
        executor: InnerExecutor,
        link: ResultLink,
        *,
        shared: SharedChoice | None = None,
        sends_extras: bool = False,
    ) -> None:
        super().__init__(executor, link, shared=shared, chooses=True)
        self._sends_extras = sends_extras

    def _settle(self, step: RankStep) -> StepResult:
        result = self._executor.result(step.inner)
        self._link.send(pack(step.schedule.iteration, result, with_extras=self._sends_extras))
        if not self._executor.writes_tokens:
            self._write(step, result)
        step.result = result
        return result


class FollowingExecutor(RankExecutor):
    """The executor of every other rank: runs the same schedules and receives the tokens.

    `chooses`: this rank also chooses tokens, which must equal the tokens of rank 0.
    """

    _receives = True

    def _settle(self, step: RankStep) -> StepResult:
        num_rows = len(step.inner.computed().rows.rows)
        own = self._executor.result(step.inner) if self._chooses else None
        result = unpack(self._link.receive(), step.schedule.iteration, num_rows)
        if own is not None:
            _check_equal(step, own, result)
        self._write(step, result)
        step.result = result
        return result


def _check_equal(step: RankStep, own: StepResult, leading: StepResult) -> None:
    """Raise RankError if this rank and rank 0 chose different tokens for a row with one beam."""
    rows = step.inner.computed().rows.rows
    for row, here, there in zip(rows, _valid_tokens(own), _valid_tokens(leading), strict=True):
        if here != there and row.beam_width == 1:
            raise RankError(
                f"request {row.request_id}: with this rank's logits post-processor the tokens are "
                f"{here}, but with that of rank 0 they are {there}"
            )


def _valid_tokens(result: StepResult) -> list[list[int]]:
    """Return the valid tokens of each row."""
    tokens = result.tokens.tolist()
    if result.num_tokens is None:
        return tokens  # type: ignore[no-any-return]
    return [row[:count] for row, count in zip(tokens, result.num_tokens.tolist(), strict=True)]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of an executor among the ranks.

    `broadcast`: copies tensors between the devices of a stage, or None if the ranks are on CPUs.
    `sends_extras`: rank 0 also sends log probabilities and logits. `replicates`: each rank that has
    logits calls the logits post-processors of its own host, and samples.
    """

    layout: RankLayout
    link: ResultLink
    broadcast: Broadcast | None = None
    sends_extras: bool = False
    replicates: bool = False

    @property
    def chooses(self) -> bool:
        """Whether this rank chooses tokens."""
        return self.layout.rank == 0 or (self.replicates and self.layout.is_last_stage)

    def executor(self, executor: InnerExecutor) -> RankExecutor:
        """Return the executor of this rank. `executor` must choose tokens if `chooses` is true."""
        one_stage, runner = self.layout.pipeline_parallel_size == 1, executor.runner
        shared: SharedChoice | None = None
        if self.broadcast is not None and one_stage and not self.replicates:
            if isinstance(runner, DeviceRunner):
                shared = SharedChoice(runner, self.broadcast, executor.lines.num_slots)
        if self.layout.rank == 0:
            sends = self.sends_extras
            return LeadingExecutor(executor, self.link, shared=shared, sends_extras=sends)
        return FollowingExecutor(executor, self.link, shared=shared, chooses=self.chooses)
