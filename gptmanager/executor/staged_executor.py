"""`StagedExecutor`: runs a pipeline stage on the CPU, in parallel with the loop.

The loop submits micro batches while earlier micro batches are computed. When the tokens of a step
are chosen, the forward passes of later steps may have run already. Therefore the chooser has
separate tables, which are updated with each result, in the order of the steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from gptmanager.decoding.lines import Lines
from gptmanager.executor.choice.gathered_logits import GatheredLogits
from gptmanager.executor.choice.token_chooser import TokenChooser
from gptmanager.executor.forward_thread import ForwardThread
from gptmanager.executor.runner import Runner
from gptmanager.executor.sequence_tables import SequenceTables
from gptmanager.executor.step_in_flight import PendingTokens, StepInFlight
from gptmanager.executor.torch_executor import TorchExecutor, load_tokens
from gptmanager.statistics import Memory
from gptmanager.step import Schedule, SequenceStart, StepResult


class NoChooser:
    """The chooser of an executor that does not choose tokens itself.

    The tokens come from another rank, or the `StagedExecutor` around the executor chooses them.
    """

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.gathered = GatheredLogits(lines.num_slots)

    def load(self, start: SequenceStart) -> None:
        """Do nothing: this chooser needs no sampling parameters."""

    def choose(self, step: StepInFlight) -> PendingTokens:
        """Raise RuntimeError, because this executor does not choose tokens."""
        raise RuntimeError("this executor does not choose tokens")


@dataclass(slots=True, eq=False)
class StagedStep:
    """A step of a stage. `computed` waits for the forward pass, and raises its errors."""

    schedule: Schedule
    computed: Callable[[], StepInFlight]


class StagedExecutor:
    """Runs the forward passes of `executor`, which has a `NoChooser`, in a thread.

    `chooser` is None if this rank receives its tokens from another rank. `histories` has the tables
    that the chooser reads and writes. The `RankExecutor` writes the tokens to the tables of
    `executor`.
    """

    settles_in_sample = writes_tokens = False

    def __init__(
        self,
        executor: TorchExecutor,
        chooser: TokenChooser | None = None,
        histories: SequenceTables | None = None,
    ) -> None:
        self.executor = executor
        self._chooser = chooser
        self._histories = histories
        self._forwards = ForwardThread(executor.forward)

    def forward(self, schedule: Schedule) -> StagedStep:
        """Enqueue a forward pass, which runs after all forward passes that were enqueued before."""
        return StagedStep(schedule, self._forwards.submit(schedule))

    def sample(self, step: StagedStep) -> None:
        """Do nothing: `result` chooses the tokens, because choosing waits for the logits."""

    def result(self, step: StagedStep) -> StepResult:
        """Wait for the logits, choose tokens and return the result."""
        computed = step.computed()
        if self._chooser is not None:
            computed.pending = self._choose(computed, self._chooser)
        return self.executor.result(computed)

    def close(self, timeout_s: float) -> bool:
        """End the forward thread; see `ForwardThread.close`."""
        return self._forwards.close(timeout_s)

    def mark(self) -> threading.Event:
        """Return an event that is set when all submitted forward passes have run."""
        return self._forwards.mark()

    @property
    def lines(self) -> Lines:
        return self.executor.lines

    @property
    def runner(self) -> Runner:
        return self.executor.runner

    @property
    def memory(self) -> Memory:
        return self.executor.memory

    def take_gil_wait_us(self) -> int:
        return self.executor.take_gil_wait_us()

    def _choose(self, step: StepInFlight, chooser: TokenChooser) -> PendingTokens:
        schedule = step.schedule
        if self._histories is not None:
            load_tokens(schedule, chooser.lines, self._histories)
        for start in schedule.starts:
            chooser.load(start)
        if schedule.starts:
            chooser.gathered.load(schedule.starts)
        return chooser.choose(step)
