"""`CostModel`: computes the time of a step from its schedule, with given or fitted costs.

The time is a linear function of five quantities, so a person can check it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import combinations
from operator import itemgetter
from typing import Any

import numpy as np

from gptmanager.config import ModelType
from gptmanager.errors import ConfigError, RecordingError
from gptmanager.recorder.recording_file import Iteration, Recording
from gptmanager.step import Row, Schedule

_position = itemgetter(Row._fields.index("position"))


@dataclasses.dataclass(frozen=True, slots=True)
class CostModel:
    """The costs of a step in seconds, if one pipeline stage has all layers.

    `fixed` is the cost of each forward pass. The next costs are per unit of work: `context_token`
    per context token, `context_pair` per pair of a context token and a token that it attends to,
    `generation_row` per sequence in generation, and `kv_token` per cached token that a sequence in
    generation reads. `transfer` is the time from one stage to the next. The defaults do not
    describe a particular machine.
    """

    fixed: float = 5e-3
    context_token: float = 2e-5
    generation_row: float = 2e-5
    kv_token: float = 1e-8
    context_pair: float = 0.0
    transfer: float = 2e-4

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 <= value < float("inf"):
                raise ConfigError(
                    f"cost model: {field.name} = {value!r} must be a number of seconds, 0 or more"
                )

    def seconds(self, schedule: Schedule, *, fused: bool = True) -> float:
        """Return a step's time. Unless `fused`, a mixed step has two passes, each with `fixed`."""
        tokens, rows, kv_tokens, pairs = quantities(schedule)
        return (
            self.fixed * num_passes(schedule, fused)
            + tokens * self.context_token
            + rows * self.generation_row
            + kv_tokens * self.kv_token
            + pairs * self.context_pair
        )

    @classmethod
    def parse(cls, text: str) -> CostModel:
        """Parse `fixed=0.004,context_token=1e-5`; other costs keep their defaults."""
        values: dict[str, float] = {}
        for item in filter(None, text.split(",")):
            name, _, value = item.partition("=")
            try:
                values[name.strip()] = float(value)
            except ValueError:
                raise ConfigError(f"cost model: {item!r} must be NAME=SECONDS") from None
        return cls.from_plain(values)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> CostModel:
        """Return the model with these costs, by name. Raise ConfigError for an unknown name."""
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise ConfigError(f"cost model: {unknown[0]!r} must be one of {', '.join(names)}")
        return cls(**values)


def num_passes(schedule: Schedule, fused: bool) -> int:
    """Return the number of forward passes of a step: 2 for a mixed step that is not fused."""
    return 1 if fused or not (schedule.context_rows and schedule.generation_rows) else 2


def quantities(schedule: Schedule) -> tuple[int, int, int, float]:
    """Return the numbers of context tokens, generation rows, cached tokens read, and pairs."""
    tokens, pairs = 0, 0.0
    for row in schedule.context_rows:
        n = row.num_tokens
        tokens += n
        pairs += n * (row.position + (n + 1) / 2)
    generation = schedule.generation_rows
    rows = len(generation)
    return tokens, rows, sum(map(_position, generation)) + rows, pairs


def fit(recording: Recording) -> CostModel:
    """Return the model with the least squared error over the recorded steps. No cost is negative.

    A step's time is from the intake of its iteration to the next intake, so it includes the loop
    and the callbacks. Without a next intake, or if no request was active before the next
    intake, the time ends at the last result of the iteration; without a result, the step is left
    out. `transfer` keeps its default. Raise RecordingError if no step has a time.
    """
    measured = list(_timed_steps(recording))
    if not measured:
        raise RecordingError("the recording must have at least one step with a known time")
    fused = recording.header.blueprint.model_type is not ModelType.INFLIGHT_BATCHING
    features = np.array(
        [(num_passes(schedule, fused), *quantities(schedule)) for schedule, _ in measured],
        dtype=np.float64,
    )
    seconds = np.array([taken for _, taken in measured])
    values = _non_negative_least_squares(features, seconds)
    return CostModel(*(float(value) for value in values))


def _timed_steps(recording: Recording) -> Iterator[tuple[Schedule, float]]:
    """Yield each schedule with the seconds that its iteration took, if they are known."""
    iterations: list[Iteration | None] = [*recording.iterations, None]
    for iteration, following in zip(iterations, iterations[1:], strict=False):
        if iteration is None or iteration.schedule is None:
            continue
        end = iteration.results[-1][1].now if iteration.results else None
        if following is not None and following.num_active:
            end = following.intake.now
        if end is not None and end > iteration.intake.now:
            yield iteration.schedule, end - iteration.intake.now


def _non_negative_least_squares(features: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the best nonnegative solution, by plain least squares over each subset of columns."""
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = features / scale
    count = scaled.shape[1]
    best, least = np.zeros(count), float(seconds @ seconds)
    for size in range(1, count + 1):
        for columns in map(list, combinations(range(count), size)):
            solution = np.linalg.lstsq(scaled[:, columns], seconds, rcond=None)[0]
            error = seconds - scaled[:, columns] @ solution
            # a larger subset must reduce the error, or equal columns would share a cost arbitrarily
            if (solution >= 0).all() and float(error @ error) < least * (1 - 1e-9):
                best, least = np.zeros(count), float(error @ error)
                best[columns] = solution
    result: np.ndarray = best / scale
    return result
