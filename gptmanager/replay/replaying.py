"""`replay`: runs a recorded run again without the model, and finds where the two runs differ.

The loop, its scheduler and its block accounting are the real ones. The host and the executor are
replaced: they return the recorded input and the recorded tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from gptmanager.assembly.blueprint import Blueprint, build_loop
from gptmanager.config import FinishReason
from gptmanager.errors import RecordingError, response_text
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.loop.extras import HeldExtras
from gptmanager.loop.responses import final_beams, finish_reason_name, request_metrics
from gptmanager.loop.token_loop import LoopState, TokenLoop
from gptmanager.peft_cache.work import AdapterWork
from gptmanager.recorder.difference import difference, summary
from gptmanager.recorder.recording_file import End, Iteration, Recording, located
from gptmanager.request.inference_request import NamedTensor
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.scheduler import RequestScheduler
from gptmanager.statistics import Counts, PhaseTimes
from gptmanager.step import Failure, Intake, Schedule, StepResult


@dataclasses.dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between a recording and its replay.

    `index`: the number of the recorded iteration. `field`: "result", "error", or the path of the
    value within the schedule or the ends, such as "ends[0].reason". `recorded`, `replayed`: the
    values that differ.
    """

    index: int
    field: str
    recorded: Any
    replayed: Any
    recorded_schedule: Schedule | None = None
    replayed_schedule: Schedule | None = None

    def __str__(self) -> str:
        return "\n".join(
            [
                f"iteration {self.index}, {self.field}:",
                f"  recorded  {self.recorded}",
                f"  replayed  {self.replayed}",
                f"recorded schedule: {summary(self.recorded_schedule)}",
                f"replayed schedule: {summary(self.replayed_schedule)}",
            ]
        )

    def plain(self) -> dict[str, Any]:
        """Return the divergence as JSON values."""
        return {
            "index": self.index,
            "field": self.field,
            "recorded": str(self.recorded),
            "replayed": str(self.replayed),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayReport:
    """The result of a replay.

    `iterations`: number of iterations that ran. `compared`: number of these iterations in which the
    schedule was compared with the recorded schedule. `broke_off` is a text if neither the
    recording nor the replay completes the last iteration. The text has the recorded error, or says
    that the recording is cut off, and then says how the replay ended. If the replay completed every
    iteration, or diverged, `broke_off` is "".
    """

    iterations: int
    compared: int
    divergence: Divergence | None = None
    broke_off: str = ""


class EndedRequest(NamedTuple):
    """A request that has ended. Times are those of the recorded run, in seconds of its clock.

    `arrival` is when Get returned the request; it is NaN if this was before the recording.
    `outcome` is the name of a `FinishReason`, or the class of the error. `metrics` has the values
    of `REQUEST_METRICS`; it is empty with an error.
    """

    request_id: int
    arrival: float
    outcome: str
    metrics: tuple[float, ...]


def replay(
    recording: Recording,
    *,
    create_scheduler: Callable[..., Any] | None = None,
    track: Callable[[Iterable[Iteration]], Iterable[Iteration]] = iter,
    on_end: Callable[[EndedRequest], object] = lambda ended: None,
) -> ReplayReport:
    """Run the recording again, to its end or to the first divergence.

    `create_scheduler`: the value of this option in the recorded run, if the option was set. `track`
    wraps the iterations, for example to show progress. `on_end` is called for each request that has
    ended. Raise RecordingError if the recording contradicts itself, or if the run had a custom
    scheduler and `create_scheduler` is None.
    """
    run = _Replay(recording, create_scheduler)
    iterations = compared = 0
    for iteration in track(recording.iterations):
        divergence = run.step(iteration)
        iterations += 1
        compared += iteration.kept and iteration.recovered is None
        for ended in run.world.ended:
            on_end(ended)
        if divergence is not None or run.broke_off:
            return ReplayReport(iterations, compared, divergence, run.broke_off)
    return ReplayReport(iterations, compared)


def completed(
    recording: Recording, *, wrap: Callable[[RequestScheduler], RequestScheduler] | None = None
) -> Iterator[tuple[Iteration, TokenLoop]]:
    """Yield each iteration of a recording, with the loop as it is after the iteration.

    The iteration has the schedule and the ends of the replay, even if they were not recorded. The
    caller may read the loop, but not change it. `wrap` takes the loop's scheduler and returns its
    replacement, which must make the same decisions. Raise RecordingError at a divergence.
    """
    run = _Replay(recording, wrap=wrap)
    for iteration in recording.iterations:
        divergence = run.step(iteration)
        if divergence is not None:
            raise RecordingError(f"the recording does not replay: {divergence}")
        world = run.world
        ends = tuple(world.ends)
        yield (
            dataclasses.replace(iteration, schedule=world.schedule, kept=True, ends=ends),
            run.loop,
        )


class _EndOfRecording(Exception):
    """The replay cannot go on: a result was not recorded, or belongs to another schedule."""


class _Replay:
    """Runs a loop on the iterations of a recording."""

    def __init__(
        self,
        recording: Recording,
        create_scheduler: Callable[..., Any] | None = None,
        wrap: Callable[[RequestScheduler], RequestScheduler] | None = None,
    ) -> None:
        self._wrap = wrap
        self._blueprint = recorded_blueprint(recording, create_scheduler)
        self._recording = recording
        self.world = _RecordedWorld()
        self.broke_off = ""
        self._num_steps = 0
        with located(f"{recording.where()}: the state that the recording begins with"):
            self.loop = self._new_loop(recording.header.state)

    def _new_loop(self, state: LoopState | None) -> TokenLoop:
        loop = build_loop(
            *(self._blueprint, self.world, self.world),
            phase_times=PhaseTimes(lambda: 0),
            final=_final,
        )
        if self._wrap is not None:
            loop.scheduler = self._wrap(loop.scheduler)
        if state is not None:
            loop.restore(state, map(_Step, state.pending))
        return loop

    def step(self, iteration: Iteration) -> Divergence | None:
        """Run one iteration; return its divergence, or None."""
        world, number = self.world, self._num_steps
        self._num_steps += 1
        world.begin(iteration)
        if iteration.recovered is not None:  # it failed; the recording does not say where
            where = self._recording.where(number)
            with located(f"{where}: the state after iteration {iteration.index}"):
                self.loop = self._new_loop(iteration.recovered)
            world.schedule, world.ends = iteration.schedule, list(iteration.ends or ())
            return None
        try:
            self.loop.iterate()
            for _ in range(iteration.num_late):
                self.loop.finish_pending()
        except _EndOfRecording:
            return self._broken(iteration, "")
        except Exception as error:  # an error of the recorded run may also occur here
            return self._broken(iteration, response_text(error))
        found = _schedule_difference(iteration, world.schedule)
        if found is None and world.num_taken < len(iteration.results):
            found = ("result", "the tokens of a step", "no step was in flight")
        if found is None and iteration.ends is not None:
            ends = [end._replace(error=_class(end.error)) for end in iteration.ends]
            found = difference(ends, world.ends, "ends")
        return self._diverged(iteration, found)

    def _broken(self, iteration: Iteration, text: str) -> Divergence | None:
        """Return the divergence of an iteration that failed.

        If the recording ends here as well, with the same schedule and class of error, set
        `broke_off` and return None.
        """
        end = self._recording.end
        recorded = "" if end is None else end.error
        found = _schedule_difference(iteration, self.world.schedule)
        is_last = iteration is self._recording.iterations[-1]
        if found is None and (not is_last or (end is not None and end.reason != "failed")):
            found = ("error", "none", text or "the loop requests a result that was not recorded")
        if found is None and text and _class(text) != _class(recorded):
            found = ("error", recorded or "none", text)
        again = (
            "so did the replay"
            if text
            else "the replay stops here, too: the result of this step was not recorded"
        )
        self.broke_off = "" if found else f"{recorded or 'the recording is cut off'}; {again}"
        return self._diverged(iteration, found)

    def _diverged(
        self, iteration: Iteration, found: tuple[str, Any, Any] | None
    ) -> Divergence | None:
        if found is None:
            return None
        return Divergence(iteration.index, *found, iteration.schedule, self.world.schedule)


def recorded_blueprint(
    recording: Recording, create_scheduler: Callable[..., Any] | None = None
) -> Blueprint:
    """Return the blueprint of the recorded loop.

    Raise RecordingError if the run had a custom scheduler and `create_scheduler` is None.
    """
    blueprint = recording.header.blueprint
    if create_scheduler is not None:
        scheduler = dataclasses.replace(blueprint.scheduler, create_scheduler=create_scheduler)
        return dataclasses.replace(blueprint, scheduler=scheduler)
    if blueprint.custom_scheduler:
        raise RecordingError(
            f"the run had a scheduler of its own, {blueprint.custom_scheduler}: pass it as "
            "create_scheduler, or on the command line as --scheduler MODULE:NAME"
        )
    return blueprint


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    schedule: Schedule


def finish_reasons(
    request: ActiveRequest, reason: FinishReason, end: int, extras: HeldExtras
) -> list[NamedTensor]:
    """Return the tensors of a final response, with the finish reasons only.

    The tokens are left out: nothing reads them here, and there may be many.
    """
    reasons = [reason]
    if request.search is not None:
        reasons = final_beams(request, request.search, reason).reasons
    return [NamedTensor("finish_reasons", torch.tensor([reasons], dtype=torch.int32))]


def _final(
    request: ActiveRequest, reason: FinishReason, end: int, extras: HeldExtras
) -> list[NamedTensor]:
    """Return the finish reasons, and the metrics of the request."""
    metrics = NamedTensor("request_metrics", request_metrics(request))
    return [*finish_reasons(request, reason, end, extras), metrics]


class _RecordedWorld:
    """The host and the executor of a replay: both return the values of the recorded iteration."""

    def __init__(self) -> None:
        self._arrivals: dict[int, float] = {}  # arrival times of active requests
        self.begin(None)

    def begin(self, iteration: Iteration | None) -> None:
        """Let the other methods return the values of this iteration from now on."""
        self._iteration = iteration
        self.schedule: Schedule | None = None
        self.ends: list[End] = []
        self.ended: list[EndedRequest] = []
        self.num_taken = 0  # number of results returned

    def fetch(self, room: int | None, num_active: int) -> Intake:
        assert self._iteration is not None  # `begin` was called
        intake = self._iteration.intake
        for request in intake.requests:
            self._arrivals.setdefault(request.request_id, intake.now)
        return intake

    def respond(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        if is_final:
            reason, error = finish_reason_name(tensors, "ERROR"), _class(error)
            self.ends.append(End(request_id, reason, error))
            arrival = self._arrivals.get(request_id, math.nan)
            if error != "DuplicateRequestIdError":  # else another request with the id continues
                self._arrivals.pop(request_id, None)
            metrics = dict(tensors).get("request_metrics")
            values = () if metrics is None else tuple(metrics.tolist())
            self.ended.append(EndedRequest(request_id, arrival, error or reason, values))

    def prepare(self, request_id: int, processor: RequestProcessor) -> None:
        """Do nothing: the recorded intakes contain the id of each request that became ready."""

    def load(self, work: AdapterWork) -> None:
        """Do nothing: the recorded intakes contain the results of `work`."""

    def fail(self, failure: Failure) -> None:
        """Do nothing: failures are in the recorded intakes."""

    def poll(self) -> None:
        """Do nothing: stops are in the recorded intakes."""

    def report(self, counts: Counts, phase_times: PhaseTimes) -> None:
        """Do nothing: no statistics are needed."""

    def forward(self, schedule: Schedule) -> _Step:
        self.schedule = schedule
        iteration = self._iteration
        if iteration is not None and _schedule_difference(iteration, schedule) is not None:
            raise _EndOfRecording  # the recorded tokens belong to another schedule
        return _Step(schedule)

    def sample(self, step: _Step) -> None:
        """Do nothing: the tokens are recorded."""

    def result(self, step: _Step) -> StepResult:
        iteration = self._iteration
        if iteration is None or self.num_taken == len(iteration.results):
            raise _EndOfRecording
        number, result = iteration.results[self.num_taken]
        if number != step.schedule.iteration:
            raise _EndOfRecording
        self.num_taken += 1
        return result


def _schedule_difference(
    iteration: Iteration, schedule: Schedule | None
) -> tuple[str, Any, Any] | None:
    recorded = iteration.schedule
    if not iteration.kept or recorded == schedule:
        return None
    if recorded is None or schedule is None:
        return "schedule", summary(recorded), summary(schedule)
    return difference(recorded, schedule, "schedule")


def _class(text: str) -> str:
    """Return the class name in an error's text.

    The rest of the text may differ if a value was not recorded.
    """
    return text.removeprefix("RecordedError: ").partition(":")[0]
