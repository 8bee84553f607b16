"""The simulator: the real loop, scheduler and block accounting under a virtual clock.

One object is both the host and the executor. The host takes the requests from a load. The executor
computes the duration of each step with a cost model, and takes the generated tokens from the load.
A simulation uses no model, no device, and no real time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np

from gptmanager.assembly.blueprint import Blueprint, build_loop
from gptmanager.config import FinishReason, ModelType
from gptmanager.errors import RecordingError, SchedulerError
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.loop.extras import HeldExtras
from gptmanager.peft_cache.work import (
    AdapterDone,
    AdapterWork,
    CopyAdapter,
    ReadAdapter,
    WriteAdapter,
)
from gptmanager.recorder import Recorder, build_recorded_loop
from gptmanager.replay.replaying import finish_reasons
from gptmanager.request.inference_request import InferenceRequest, NamedTensor
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.simulator.cost_model import CostModel
from gptmanager.simulator.figures import Figures, Tally
from gptmanager.simulator.known_outputs import KnownOutputs
from gptmanager.simulator.load import ITERATION_STEPS, Load, RecordedLoad, request_steps
from gptmanager.simulator.stages import Stages, Work
from gptmanager.statistics import Counts, PhaseTimes
from gptmanager.step import Failure, Intake, Schedule, StepResult

_STALL_S = 0.01  # virtual seconds between iterations that launch no step
_MAX_STALLS = 10_000


def simulate(
    blueprint: Blueprint,
    load: Load,
    cost: CostModel,
    *,
    recorder: Recorder | None = None,
    work: list[Work] | None = None,
    on_progress: Callable[[int], object] = lambda finished: None,
) -> Figures:
    """Run `load` to its end and return its figures.

    The steps of each stage are appended to `work`. `on_progress` is passed the number of requests
    that ended since its last call. Raise SchedulerError if requests are active but the scheduler no
    longer runs any of them, and RecordingError if a recorded load takes far more steps than were
    recorded.
    """
    fused = blueprint.model_type is not ModelType.INFLIGHT_BATCHING
    most = load.max_request_steps if isinstance(load, RecordedLoad) else None
    stages = Stages(blueprint.num_stages, cost.transfer, work)
    batch = blueprint.params.max_batch_size
    world = World(load, cost, batch, fused=fused, max_steps=most, stages=stages)
    phase_times = PhaseTimes(lambda: 0)
    final = world.final if recorder is None else world.recorded_final
    if recorder is None:
        loop = build_loop(blueprint, world, world, phase_times=phase_times, final=final)
    else:
        loop = build_recorded_loop(
            blueprint, world, world, recorder, phase_times=phase_times, final=final
        )
    reported = 0
    while loop.active or loop.pending or world.has_more:
        loop.iterate()
        if world.tally.num_ended - reported >= 256:
            on_progress(world.tally.num_ended - reported)
            reported = world.tally.num_ended
    on_progress(world.tally.num_ended - reported)
    if recorder is not None:
        recorder.close()
    return world.tally.figures(world.now)


_T = TypeVar("_T")


def _take_due(events: deque[tuple[float, _T]], now: float) -> list[_T]:
    """Remove the events up to the time `now` and return them without their times."""
    due: list[_T] = []
    while events and events[0][0] <= now:
        due.append(events.popleft()[1])
    return due


class _Step(NamedTuple):
    """A step in flight. `end` is when it will be done, in virtual seconds."""

    schedule: Schedule
    end: float
    tokens: np.ndarray
    counts: np.ndarray | None


class World:
    """The host and executor of a simulation."""

    def __init__(
        self,
        load: Load,
        cost: CostModel,
        max_batch_size: int,
        *,
        fused: bool = True,
        max_steps: int | None = None,
        stages: Stages | None = None,
    ) -> None:
        self.now = 0.0
        self.tally = Tally()
        self._load = load
        self._cost = cost
        self._fused = fused
        self._arrivals: list[float] = load.arrivals.tolist()
        self._next = 0  # number of the load's next request
        self._stops, self._forgets = deque(load.stops), deque(load.forgets)
        self._clears = deque((when, None) for when in load.clears)
        # `_max_steps` and `_steps_left` count request-steps. An iteration costs a request-step for
        # each row of its schedule, ITERATION_STEPS, and one for each 64 active requests.
        self._max_steps = self._steps_left = max_steps
        self._iterations = 0
        self._was_idle = False  # the last result of `_is_idle`
        self._stalls = 0  # iterations since the last launch
        self._in_flight = 0  # launched steps without a fetched result
        self._stages = stages or Stages(1, 0.0)
        self._known = KnownOutputs(load, 2 * max_batch_size)
        self._ready: list[int] = []
        self._loaded: list[AdapterDone] = []

    @property
    def has_more(self) -> bool:
        """Whether requests of the load have not arrived yet."""
        return self._next < len(self._arrivals)

    # The host ------------------------------------------------------------------------------

    def fetch(self, room: int | None, num_active: int) -> Intake:
        if self._is_idle(num_active):
            return Intake(self.now)
        self._advance(num_active)
        self._spend(ITERATION_STEPS + num_active // 64)
        load = self._load
        clock = self._iterations if load.by_iterations else self.now
        first, limit = self._next, len(self._arrivals)
        if room is not None and not load.by_iterations:  # `by_iterations` ignores `room`
            limit = min(limit, first + room)
        while self._next < limit and self._arrivals[self._next] <= clock:
            self._next += 1
        self._iterations += 1
        ready, self._ready = tuple(self._ready), []
        loaded, self._loaded = tuple(self._loaded), []
        requests = tuple(map(self._arrive, range(first, self._next)))
        stops = frozenset[int]().union(*_take_due(self._stops, clock))
        clears_cache = bool(_take_due(self._clears, clock))
        forgotten = tuple(_take_due(self._forgets, clock))
        return Intake(self.now, requests, stops, ready, (), clears_cache, loaded, forgotten)

    def _is_idle(self, num_active: int) -> bool:
        """Return whether the loop must wait for the next arrival; never True twice in a row.

        If True, the loop idles for one iteration, as the loop of a manager does between arrivals.
        The next `fetch` then advances the clock to the next arrival. Always False if the load has
        its arrivals in iterations instead of seconds.
        """
        self._was_idle = (
            not (self._was_idle or num_active or self._in_flight or self._load.by_iterations)
            and self.has_more
            and self._arrivals[self._next] > self.now
        )
        return self._was_idle

    def _advance(self, num_active: int) -> None:
        """Advance the clock: to the next arrival if nothing is active, by `_STALL_S` in a stall."""
        if not num_active and not self._in_flight and self.has_more:
            due = self._arrivals[self._next]
            if self._load.by_iterations:
                self._iterations = max(self._iterations, int(due))
            else:
                self.now = max(self.now, due)
        elif self._stalls > 1:  # the last two iterations launched nothing
            self.now += _STALL_S
            if self._stalls > _MAX_STALLS:
                raise SchedulerError(
                    f"{num_active} requests are active but the scheduler does not run any of them"
                )
        self._stalls += 1

    def _spend(self, steps: int) -> None:
        if self._steps_left is None:
            return
        self._steps_left -= steps
        if self._steps_left < 0:
            raise RecordingError(
                f"the load takes more than {self._max_steps} request-steps, far more than its "
                "recording: its requests may continue to run long after the end of the recorded run"
            )

    def _arrive(self, number: int) -> InferenceRequest:
        request = self._load.request(number)
        when = self.now if self._load.by_iterations else self._arrivals[number]
        self.tally.arrived(request.request_id, when)
        self._known.add(number, request)
        return request

    def respond(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        if not is_final:
            return
        was_duplicate = error.startswith("DuplicateRequestIdError")
        if error:
            self.tally.failed(request_id, error, was_duplicate=was_duplicate)
        if not was_duplicate:
            self._known.remove(request_id)

    def final(
        self, request: ActiveRequest, reason: FinishReason, end: int, extras: HeldExtras
    ) -> list[NamedTensor]:
        """Return no tensors: nothing reads the final response."""
        self.tally.finished(request)
        return []

    def recorded_final(
        self, request: ActiveRequest, reason: FinishReason, end: int, extras: HeldExtras
    ) -> list[NamedTensor]:
        """Return the finish reason alone, for a recording."""
        self.tally.finished(request)
        return finish_reasons(request, reason, end, extras)

    def prepare(self, request_id: int, processor: RequestProcessor) -> None:
        """Report the processor as ready at once. A simulation never calls it."""
        self._ready.append(request_id)

    def load(self, work: AdapterWork) -> None:
        """Finish work on an adapter at once; the digest of the adapter is its task id."""
        if isinstance(work, ReadAdapter):
            self._loaded.append(AdapterDone(work.job, str(work.task_id)))
        elif isinstance(work, (WriteAdapter, CopyAdapter)):
            self._loaded.append(AdapterDone(work.job))

    def fail(self, failure: Failure) -> None:
        """Do nothing: no step of a simulation fails."""

    def poll(self) -> None:
        """Do nothing: stops are in the intake."""

    def report(self, counts: Counts, phase_times: PhaseTimes) -> None:
        self.tally.reported(counts)

    # The executor --------------------------------------------------------------------------

    def forward(self, schedule: Schedule) -> _Step:
        self._stalls = 0
        self._in_flight += 1
        if self._steps_left is not None:
            self._spend(request_steps(schedule))
        self.tally.scheduled(schedule)
        seconds = self._cost.seconds(schedule, fused=self._fused)
        end = self._stages.run(schedule, self.now, seconds)
        return _Step(schedule, end, *self._known.tokens(schedule))

    def sample(self, step: _Step) -> None:
        """Do nothing: the tokens are known."""

    def result(self, step: _Step) -> StepResult:
        self._in_flight -= 1
        self.now = max(self.now, step.end)
        beams = self._known.candidates(step.schedule)
        return StepResult(step.tokens, self.now, step.counts, beams)
