"""The executor of a rank: every rank runs every schedule, rank 0 chooses the tokens, all get them.

Decides when a result travels, and which of its tokens are still wanted. How it travels is a
`ResultLink`'s affair; what ranks exchange in the middle of a step is the model's.

| stages | device | rank 0 chooses | others have the tokens |
| --- | --- | --- | --- |
| 1 | CPU | in `sample` | in `sample`, of the message |
| 1 | any other | in `sample`, enqueued | in `sample` on the device; here in `result` |
| more | CPU | in `result` | in `result`, of the message |
| more | any other | in `sample`, enqueued | in `result`, of the message |
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

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
from gptmanager.step import Schedule, StepResult

Share = Callable[[Tensor], None]  # fills a tensor with what it is on part 0 of the stage


class ResultLink(Protocol):
    """From rank 0 to each other rank, in order."""

    def send(self, message: bytes) -> None:
        """Rank 0. RankError when a rank has failed."""

    def receive(self) -> bytes:
        """The others. RankError when a rank has failed."""


class LaunchedStep(Protocol):
    """A step of an `InnerExecutor`."""

    def computed(self) -> StepInFlight:
        """Wait for the forward where another thread runs it."""


class InnerExecutor(Protocol):
    """The executor that a rank's executor runs its schedules on.

    `settles_in_sample`: tokens are known on the CPU when `sample` returns. `writes_tokens`:
    `sample` makes them the next inputs of their sequences.
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

    def sample(self, step: Any) -> None: ...

    def result(self, step: Any) -> StepResult: ...

    def close(self, timeout_s: float) -> bool: ...

    def mark(self) -> threading.Event | None: ...


class SharedChoice:
    """The tokens that part 0 of a stage has chosen, copied to its other parts on their devices.

    The next forward may then be enqueued before the tokens are known on the CPU.
    """

    def __init__(self, runner: DeviceRunner, share: Share, num_slots: int) -> None:
        self._runner, self._share = runner, share
        self._has_beams = runner.tables.tokens.shape[0] > num_slots

    def exchange(self, step: StepInFlight, *, writes: bool) -> None:
        """Send the tokens of a step that the next forward may read, or write those received."""
        with self._runner.stream, torch.inference_mode():
            cells = self._cells(step)
            if cells is None:
                return
            token_cells = self._runner.tables.token_cells
            if writes:
                tokens = torch.empty(len(cells), dtype=torch.int32, device=cells.device)
                self._share(tokens)
                token_cells.index_copy_(0, cells, tokens)
            else:
                self._share(token_cells.index_select(0, cells))

    def _cells(self, step: StepInFlight) -> Tensor | None:
        rows = step.rows
        cells = self._runner.tables.cells(rows.lines, rows.positions)
        if self._has_beams:
            widths = np.array([row.beam_width for row in rows.rows], dtype=np.int64)
            cells = cells[widths.repeat(np.diff(rows.firsts)) == 1]
        return self._runner.upload((cells,))[0] if cells.size else None


@dataclass(slots=True, eq=False)
class RankStep:
    """`inner`: the step of the executor that runs it. `num_starts`: by sampling row, how often its
    slot had been taken. `result`: once it is known here.
    """

    schedule: Schedule
    inner: LaunchedStep
    num_starts: np.ndarray
    result: StepResult | None = None


class RankExecutor(ABC):
    """The part of a rank's executor that is the same on rank 0 and on the others.

    `share`: the share of a stage that may enqueue its next forward before its tokens are known
    on the CPU; None if there is no such stage.
    """

    def __init__(
        self, executor: InnerExecutor, link: ResultLink, *, shared: SharedChoice | None = None
    ) -> None:
        self._executor = executor
        self._link = link
        self._shared = shared
        self._tables: SequenceTables = executor.runner.tables
        self.on_decision: Callable[[Schedule], None] = lambda schedule: None
        self._starts = np.zeros(executor.lines.num_slots, dtype=np.int64)  # by slot, ever

    @property
    def runner(self) -> Runner:
        return self._executor.runner

    @property
    def memory(self) -> Memory:
        return self._executor.memory

    def take_gil_wait_us(self) -> int:
        return self._executor.take_gil_wait_us()

    def close(self, timeout_s: float) -> bool:
        """End the work in parallel with the loop; False: it has not ended in time."""
        return self._executor.close(timeout_s)

    def mark(self) -> threading.Event | None:
        """Is set when the forwards that were begun have run; None: they have, or a stream orders
        what touches the same memory.
        """
        return self._executor.mark()

    def forward(self, schedule: Schedule) -> RankStep:
        self.on_decision(schedule)  # before ranks compute different rows together
        for start in schedule.starts:
            self._starts[start.slot] += 1
        slots = [row.slot for row in schedule.sampling_rows]
        return RankStep(schedule, self._executor.forward(schedule), self._starts[slots])

    @abstractmethod
    def sample(self, step: RankStep) -> None: ...

    @abstractmethod
    def result(self, step: RankStep) -> StepResult: ...

    def _write(self, step: RankStep, result: StepResult) -> None:
        """Write the tokens of a result as the next inputs of their sequences.

        Leave out a sequence that ended during its step if another one has taken its slot: the slot
        holds the other's tokens. Tokens of several beams are written with the forks of the next
        schedule. Tokens after a wrong draft are overwritten before they are read.
        """
        rows = step.inner.computed().rows
        wanted = step.num_starts == self._starts[rows.slots]
        if self._tables.tokens.shape[0] > len(self._starts):
            wanted &= np.array([row.beam_width == 1 for row in rows.rows], dtype=np.bool_)
        lines, positions, tokens = _cells(rows, result)
        width = result.tokens.shape[1]
        fits = wanted.repeat(width) & (positions < self._tables.tokens.shape[1])
        written = lines[fits], positions[fits], np.maximum(tokens[fits], 0)
        if self._shared is None:
            self._tables.write_cells(*written)
        else:  # the device has them
            SequenceTables.write_cells(self._tables, *written)


def _cells(rows: SamplingRows, result: StepResult) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return lines and positions (int64) of all tokens of a result, and the tokens."""
    heads, width = rows.firsts[:-1], result.tokens.shape[1]
    positions = (rows.positions[heads][:, None] + np.arange(width)).ravel()
    return rows.lines[heads].repeat(width), positions, result.tokens.ravel()


class LeadingExecutor(RankExecutor):
    """Rank 0's: chooses, and sends what it chose. `sends_extras`: log probabilities and logits,
    too, for ranks that answer their hosts.
    """

    def __init__(
        self,
        executor: InnerExecutor,
        link: ResultLink,
        *,
        shared: SharedChoice | None = None,
        sends_extras: bool = False,
    ) -> None:
        super().__init__(executor, link, shared=shared)
        self._sends_extras = sends_extras

    def sample(self, step: RankStep) -> None:
        self._executor.sample(step.inner)
        if self._shared is not None:
            self._shared.exchange(step.inner.computed(), writes=False)
        if self._executor.settles_in_sample:
            self._settle(step)

    def result(self, step: RankStep) -> StepResult:
        return step.result or self._settle(step)

    def _settle(self, step: RankStep) -> StepResult:
        result = self._executor.result(step.inner)
        self._link.send(pack(step.schedule.iteration, result, with_extras=self._sends_extras))
        if not self._executor.writes_tokens:
            self._write(step, result)
        step.result = result
        return result


class FollowingExecutor(RankExecutor):
    """Every other rank's: runs the same schedules, and receives what was chosen.

    `chooses`: it also chooses by itself, and its choice must be the same.
    """

    def __init__(
        self,
        executor: InnerExecutor,
        link: ResultLink,
        *,
        shared: SharedChoice | None = None,
        chooses: bool = False,
    ) -> None:
        super().__init__(executor, link, shared=shared)
        self._chooses = chooses

    def sample(self, step: RankStep) -> None:
        if self._chooses:
            self._executor.sample(step.inner)
        if self._shared is not None:
            self._shared.exchange(step.inner.computed(), writes=True)
        if self._executor.settles_in_sample:
            self._settle(step)

    def result(self, step: RankStep) -> StepResult:
        return step.result or self._settle(step)

    def _settle(self, step: RankStep) -> StepResult:
        num_rows = len(step.inner.computed().rows.rows)
        own = self._executor.result(step.inner) if self._chooses else None
        result = unpack(self._link.receive(), step.schedule.iteration, num_rows)
        if own is not None:
            _check_alike(step, own, result)
        self._write(step, result)
        step.result = result
        return result


def _check_alike(step: RankStep, own: StepResult, leading: StepResult) -> None:
    """RankError unless this rank and rank 0 chose the same, in rows that have not ended since."""
    rows = step.inner.computed().rows.rows
    for row, here, there in zip(rows, _chosen(own), _chosen(leading), strict=True):
        if here != there and row.beam_width == 1:
            raise RankError(
                f"request {row.request_id}: this rank's logits post-processor led to the tokens "
                f"{here}, that of rank 0 to {there}"
            )


def _chosen(result: StepResult) -> list[list[int]]:
    """The tokens of each row that count."""
    tokens = result.tokens.tolist()
    if result.num_tokens is None:
        return tokens  # type: ignore[no-any-return]
    return [row[:count] for row, count in zip(tokens, result.num_tokens.tolist(), strict=True)]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The values that make an executor the executor of a rank.

    `share`: the share of its stage, if ranks are on devices. `replicates`: each rank that has
    logits calls its own host's post-processors, and samples.
    """

    layout: RankLayout
    link: ResultLink
    share: Share | None = None
    sends_extras: bool = False
    replicates: bool = False

    @property
    def chooses(self) -> bool:
        return self.layout.rank == 0 or (self.replicates and self.layout.is_last_stage)

    def executor(self, executor: InnerExecutor) -> RankExecutor:
        """Return the executor of this rank; `executor` chooses tokens if `chooses` is true."""
        one_stage, runner = self.layout.pipeline_parallel_size == 1, executor.runner
        shared: SharedChoice | None = None
        if self.share is not None and one_stage and not self.replicates:
            if isinstance(runner, DeviceRunner):
                shared = SharedChoice(runner, self.share, executor.lines.num_slots)
        if self.layout.rank == 0:
            sends = self.sends_extras
            return LeadingExecutor(executor, self.link, shared=shared, sends_extras=sends)
        return FollowingExecutor(executor, self.link, shared=shared, chooses=self.chooses)
