"""`Stages`: the times when each stage of a pipeline works on each step."""

from __future__ import annotations

from typing import NamedTuple

from gptmanager.step import Schedule


class Work(NamedTuple):
    """The run of a step on one stage, from `begin` to `end` in virtual seconds."""

    stage: int
    iteration: int
    micro_batch_id: int
    begin: float
    end: float


class Stages:
    """Pipeline stages with equal parts of the layers. Each stage runs one step at a time, in order.

    The transfer of a step from one stage to the next takes `transfer` seconds. If `work` is a list,
    each run of a step on a stage is appended to the list.
    """

    def __init__(self, count: int, transfer: float, work: list[Work] | None = None) -> None:
        self.work = work
        self._free_at = [0.0] * count
        self._transfer = transfer

    def run(self, schedule: Schedule, now: float, seconds: float) -> float:
        """Run a step that is ready at `now`, and return when the last stage finishes it.

        `seconds`: the time of the step on a single stage with all layers.
        """
        own = seconds / len(self._free_at)
        for stage, free_at in enumerate(self._free_at):
            begin = max(now + self._transfer if stage else now, free_at)
            now = self._free_at[stage] = begin + own
            if self.work is not None:
                step = schedule.iteration, schedule.micro_batch_id
                self.work.append(Work(stage, *step, begin, now))
        return now
