"""`StagedExecutor`: one stage of a pipeline on the CPU. Its forwards run in parallel to the loop.

The loop launches micro batches while earlier ones are computed. So tokens are chosen, on the loop's
thread, when forwards of later steps may have run: the inputs of the choice are updated with each
result, in the order of the steps.
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
    """The chooser of an executor that receives its tokens from another rank."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.gathered = GatheredLogits(lines.num_slots)

    def load(self, start: SequenceStart) -> None:
        """Nothing depends on it."""

    def choose(self, step: StepInFlight) -> PendingTokens:
        raise RuntimeError("this rank receives its tokens")


@dataclass(slots=True, eq=False)
class StagedStep:
    """`computed` waits for the forward, and raises what it raised."""

    schedule: Schedule
    computed: Callable[[], StepInFlight]


class StagedExecutor:
    """`executor` has a `NoChooser`. `chooser`: uses `histories`, tables that nothing else
    writes to; None: this rank receives its tokens.

    Chosen tokens are not written to the tables of `executor`: see `rank_executor`.
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
        """Begin, when what was begun before has run."""
        return StagedStep(schedule, self._forwards.submit(schedule))

    def sample(self, step: StagedStep) -> None:
        """Not before the result: the logits would be waited for."""

    def result(self, step: StagedStep) -> StepResult:
        """Wait for the logits and choose."""
        computed = step.computed()
        if self._chooser is not None:
            computed.pending = self._choose(computed, self._chooser)
        return self.executor.result(computed)

    def close(self, timeout_s: float) -> bool:
        """End the forward thread; see `ForwardThread.close`."""
        return self._forwards.close(timeout_s)

    def mark(self) -> threading.Event:
        """Return an event that is set when all submitted forwards have run."""
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
