"""`Stages`: the times when each stage of a pipeline works on each step."""

from __future__ import annotations

from typing import NamedTuple

from gptmanager.step import Schedule


class Work(NamedTuple):
    """A step on one stage, in virtual seconds."""

    stage: int
    iteration: int
    micro_batch_id: int
    begin: float
    end: float


class Stages:
    """Pipeline stages with equal parts of the layers; each runs one step at a time, in order.

    A step takes `transfer` seconds from one stage to the next. The steps that ran are appended to
    the list `work`.
    """

    def __init__(self, count: int, transfer: float, work: list[Work] | None = None) -> None:
        self.work = work
        self._free_at = [0.0] * count
        self._transfer = transfer

    def run(self, schedule: Schedule, now: float, seconds: float) -> float:
        """Return when the last stage finishes a step that takes `seconds` on a single stage."""
        own = seconds / len(self._free_at)
        for stage, free_at in enumerate(self._free_at):
            begin = max(now + self._transfer if stage else now, free_at)
            now = self._free_at[stage] = begin + own
            if self.work is not None:
                step = schedule.iteration, schedule.micro_batch_id
                self.work.append(Work(stage, *step, begin, now))
        return now
