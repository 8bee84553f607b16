"""The simulator: the real loop, scheduler and block accounting under a virtual clock.

Its world is one object: a host whose requests come from a load, and an executor that computes
nothing but how long a step would take. Knows no model, no device, and no real time.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from gptmanager.active import ActiveRequest
from gptmanager.api import InferenceRequest, NamedTensor
from gptmanager.assembly import Blueprint, build_loop, build_recorded_loop
from gptmanager.config import FinishReason
from gptmanager.cost_model import CostModel
from gptmanager.errors import SchedulerError
from gptmanager.loads import Load
from gptmanager.loop import TokenLoop
from gptmanager.recorder import Recorder
from gptmanager.statistics import Counts, Laps
from gptmanager.step import Intake, Schedule, StepResult

_STALL_S = 0.01  # active requests, none of which was scheduled: how soon the loop asks again
_MAX_STALLS = 10_000
_NO_TOKEN = -2  # behind the end of a known output: no end_id, no part of a stop word


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """What a simulated run came to. Times in virtual seconds; latencies of finished requests.

    `ttft`: from arrival to first token; `per_token`: between a request's tokens, its mean; each
    (median, 99th percentile). `kv_use`: mean and largest share of the blocks in use.
    `recomputed_tokens`: run in contexts of requests that had been paused. `request_steps`: rows of
    all schedules.
    """

    requests: int
    failed: int
    iterations: int
    makespan_s: float
    output_tokens: int
    ttft_s: tuple[float, float]
    per_token_s: tuple[float, float]
    mean_batch: float
    max_batch: int
    kv_use: tuple[float, float]
    pauses: int
    recomputed_tokens: int
    context_tokens: int
    request_steps: int

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.makespan_s if self.makespan_s else 0.0


def simulate(
    blueprint: Blueprint,
    load: Load,
    cost: CostModel,
    *,
    recorder: Recorder | None = None,
    on_progress: Callable[[int], object] = lambda finished: None,
) -> Figures:
    """Run `load` to its end. `on_progress` is told how many more requests have finished.

    Raises SchedulerError when the scheduler never lets anybody run again.
    """
    world = _World(load, cost, blueprint.params.max_batch_size)
    laps = Laps(lambda: 0)
    if recorder is None:
        loop = build_loop(blueprint, world, world, laps=laps, loop_class=SimulatedLoop)
    else:
        loop = build_recorded_loop(
            blueprint, world, world, recorder, laps=laps, loop_class=SimulatedLoop
        )
    assert isinstance(loop, SimulatedLoop)
    loop.on_finish = world.finished
    loop.makes_responses = recorder is not None
    reported = 0
    while loop.active or loop.pending is not None or world.has_more:
        loop.iterate()
        if world.num_ended - reported >= 256:
            on_progress(world.num_ended - reported)
            reported = world.num_ended
    on_progress(world.num_ended - reported)
    if recorder is not None:
        recorder.close()
    return world.figures()


class SimulatedLoop(TokenLoop):
    """The very loop, but that a final response is not made into tensors if nobody reads them."""

    makes_responses = False
    on_finish: Callable[[ActiveRequest], None] = staticmethod(lambda request: None)

    def finish_request(self, request: ActiveRequest, reason: FinishReason, end: int) -> None:
        if self.makes_responses:
            super().finish_request(request, reason, end)
        else:
            self._drop(request)
            self.host.respond(request.request_id, [], True, "")
        self.on_finish(request)


class _Step:
    """A step under way, and when it will be done."""

    __slots__ = ("end", "schedule", "tokens")

    def __init__(self, schedule: Schedule, end: float, tokens: np.ndarray) -> None:
        self.schedule = schedule
        self.end = end
        self.tokens = tokens


class _World:
    """Host and executor of a simulation."""

    def __init__(self, load: Load, cost: CostModel, max_batch_size: int) -> None:
        self.now = 0.0
        self.num_ended = 0
        self._load = load
        self._cost = cost
        self._arrivals: list[float] = load.arrivals.tolist()
        self._next = 0  # request of the load
        self._next_stop = 0
        self._turns = 0
        self._stalls = 0  # turns since the last launch
        self._in_flight = 0  # steps launched whose result is not taken
        self._device_free_at = 0.0
        self._zeros = np.zeros((2 * max_batch_size, 1), dtype=np.int32)
        self._arrived: dict[int, float] = {}
        self._outputs: dict[int, tuple[int, Sequence[int]]] = {}  # by id: prompt length, tokens
        self._paused: set[int] = set()
        self._failed = 0
        self._iterations = self._rows = self._output_tokens = self._max_batch = 0
        self._context_tokens = self._recomputed = self._pauses = 0
        self._used_blocks = self._max_used = self._total_blocks = 0
        self._ttft = array("d")
        self._per_token = array("d")

    @property
    def has_more(self) -> bool:
        return self._next < len(self._arrivals)

    # The host ------------------------------------------------------------------------------

    def fetch(self, room: int | None, num_active: int) -> Intake:
        self._advance(num_active)
        clock = self._turns if self._load.by_turns else self.now
        end = first = self._next
        # by turns the load says what each Get returned, which may have been more than was asked for
        limit = len(self._arrivals)
        if room is not None and not self._load.by_turns:
            limit = min(limit, first + room)
        while end < limit and self._arrivals[end] <= clock:
            end += 1
        self._next = end
        stops: frozenset[int] = frozenset()
        while (
            self._next_stop < len(self._load.stops)
            and self._load.stops[self._next_stop][0] <= clock
        ):
            stops |= self._load.stops[self._next_stop][1]
            self._next_stop += 1
        self._turns += 1
        return Intake(self.now, tuple(map(self._arrive, range(first, end))), stops)

    def _advance(self, num_active: int) -> None:
        """With nothing under way time goes on: to the next arrival, or until the loop asks."""
        if not num_active and not self._in_flight and self.has_more:
            due = self._arrivals[self._next]
            if self._load.by_turns:
                self._turns = max(self._turns, int(due))
            else:
                self.now = max(self.now, due)
        elif self._stalls > 1:  # the last turn launched nothing
            self.now += _STALL_S
            if self._stalls > _MAX_STALLS:
                raise SchedulerError(
                    f"{num_active} requests are active and the scheduler lets none run"
                )
        self._stalls += 1

    def _arrive(self, number: int) -> InferenceRequest:
        request = self._load.request(number)
        request_id = request.request_id
        when = self.now if self._load.by_turns else self._arrivals[number]
        self._arrived.setdefault(request_id, when)
        output = self._load.output(number)
        if output is not None and request_id not in self._outputs:
            prompt_len = int(np.size(request.tensors.get("input_ids", ())))
            self._outputs[request_id] = prompt_len, output
        return request

    def respond(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        if not is_final:
            return
        self.num_ended += 1
        if error:
            self._failed += 1
            if error.startswith("DuplicateRequestIdError"):
                return
            self._arrived.pop(request_id, None)
        self._outputs.pop(request_id, None)
        self._paused.discard(request_id)

    def finished(self, request: ActiveRequest) -> None:
        """The loop has ended a request without an error."""
        num_tokens = len(request.tokens) - request.orig_prompt_len
        self._output_tokens += num_tokens
        arrived = self._arrived.pop(request.request_id, self.now)
        first, last = request.first_token, request.last_token
        if first is not None and last is not None:
            self._ttft.append(first - arrived)
            if num_tokens > 1:
                self._per_token.append((last - first) / (num_tokens - 1))

    def poll(self) -> None:
        """Stops come with the intake."""

    def report(self, counts: Counts, laps: Laps) -> None:
        batch = counts.context + counts.generation
        self._iterations += 1
        self._rows += batch
        self._max_batch = max(self._max_batch, batch)
        self._context_tokens += counts.context_tokens
        used = counts.total_blocks - counts.free_blocks
        self._used_blocks += used
        self._max_used = max(self._max_used, used)
        self._total_blocks = counts.total_blocks

    # The executor --------------------------------------------------------------------------

    def forward(self, schedule: Schedule) -> _Step:
        self._stalls = 0
        self._in_flight += 1
        self._pauses += len(schedule.paused)
        self._paused.update(schedule.paused)
        if self._paused and schedule.context_rows:
            self._recomputed += sum(
                row.num_tokens for row in schedule.context_rows if row.request_id in self._paused
            )
        begin = max(self.now, self._device_free_at)
        end = self._device_free_at = begin + self._cost.seconds(schedule)
        return _Step(schedule, end, self._tokens(schedule))

    def _tokens(self, schedule: Schedule) -> np.ndarray:
        if not self._outputs:
            rows = len(schedule.context_rows) + len(schedule.generation_rows)
            if rows > len(self._zeros):
                self._zeros = np.zeros((rows, 1), dtype=np.int32)
            return self._zeros[: len(schedule.sampling_rows)]
        tokens = []
        for row in schedule.sampling_rows:
            prompt_len, output = self._outputs.get(row.request_id, (0, ()))
            place = row.position + row.num_tokens - prompt_len
            tokens.append(output[place] if 0 <= place < len(output) else _NO_TOKEN)
        return np.array(tokens, dtype=np.int32).reshape(-1, 1)

    def sample(self, step: _Step) -> None:
        """The tokens are given."""

    def result(self, step: _Step) -> StepResult:
        self._in_flight -= 1
        self.now = max(self.now, step.end)
        return StepResult(step.tokens, self.now)

    # What it came to -----------------------------------------------------------------------

    def figures(self) -> Figures:
        blocks = max(1, self._total_blocks)
        return Figures(
            requests=self.num_ended,
            failed=self._failed,
            iterations=self._iterations,
            makespan_s=self.now,
            output_tokens=self._output_tokens,
            ttft_s=_percentiles(self._ttft),
            per_token_s=_percentiles(self._per_token),
            mean_batch=self._rows / max(1, self._iterations),
            max_batch=self._max_batch,
            kv_use=(
                self._used_blocks / max(1, self._iterations) / blocks,
                self._max_used / blocks,
            ),
            pauses=self._pauses,
            recomputed_tokens=self._recomputed,
            context_tokens=self._context_tokens,
            request_steps=self._rows,
        )


def _percentiles(values: array[float]) -> tuple[float, float]:
    if not values:
        return math.nan, math.nan
    median, high = np.percentile(np.frombuffer(values), (50, 99))
    return float(median), float(high)
