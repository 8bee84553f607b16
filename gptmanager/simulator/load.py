"""The loads of a simulation: which requests arrive at what time, and what they generate.

A synthetic request is built when it is due, so a million waiting requests need little memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from gptmanager.arguments import at_least, flag, length_range
from gptmanager.errors import ConfigError, RecordingError
from gptmanager.lifecycle.log import logger
from gptmanager.recorder.recording_file import Iteration, Recording
from gptmanager.request.inference_request import InferenceRequest
from gptmanager.step import BeamCandidates, Schedule, StepResult

# A simulation of a recorded load may take this many times the request-steps (see `request_steps`)
# of the recorded run, and _SPARE_STEPS more. The simulation can take more request-steps than the
# recorded run because of unfinished requests, another policy or a smaller batch.
_MAX_STEPS_RATIO = 64
_SPARE_STEPS = 1 << 20
ITERATION_STEPS = 32  # request-steps that an iteration takes, in addition to its schedule

VOCAB_SIZE = 2**31 - 1  # large enough for a different first token in every prompt


Stop = tuple[float, frozenset[int]]  # time, ids of the stopped requests


class Load(Protocol):
    """Requests by number, in the order of their arrival.

    `arrivals` float64 `[n]` are ascending, in seconds since the start, or, with `by_iterations`, in
    iterations of the loop. Other events have times in the same unit: `stops` has stops of requests,
    `clears` has clears of the KV cache, and `forgets` has (time, `lora_task_id`) of each dropped
    adapter.
    """

    arrivals: np.ndarray
    stops: Sequence[Stop]
    clears: Sequence[float]
    forgets: Sequence[tuple[float, int]]
    by_iterations: bool

    def request(self, number: int) -> InferenceRequest: ...

    def output(self, number: int) -> Sequence[int] | None:
        """Return the tokens that the request generates.

        If these are not known, the result is None, and the request gets arbitrary tokens that do
        not end it.
        """

    def beams(self, number: int) -> Mapping[int, BeamCandidates]:
        """Return the known candidates of the request's beams, by position."""


@dataclass
class SyntheticLoad:
    """Requests with random lengths, uniform in the given ranges, both ends included.

    Requests arrive at `rate` per second (Poisson), or all at once if `rate` is None. Every request
    runs to its `max_new_tokens`. All prompts have different first tokens.
    """

    num_requests: int
    prompt_len: tuple[int, int] = (64, 1024)
    output_len: tuple[int, int] = (16, 512)
    rate: float | None = None
    seed: int = 0
    stops: Sequence[Stop] = ()
    clears: Sequence[float] = ()
    forgets: Sequence[tuple[float, int]] = ()
    by_iterations: bool = False
    arrivals: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        at_least(1, "SyntheticLoad.num_requests", self.num_requests)
        at_least(0, "SyntheticLoad.seed", self.seed)
        flag("SyntheticLoad.by_iterations", self.by_iterations)
        prompt_len = length_range("SyntheticLoad.prompt_len", self.prompt_len)
        output_len = length_range("SyntheticLoad.output_len", self.output_len)
        is_number = isinstance(self.rate, (int, float)) and not isinstance(self.rate, bool)
        if self.rate is not None and not (is_number and 0 < self.rate < math.inf):
            raise ConfigError(f"SyntheticLoad.rate = {self.rate!r} must be a number above 0")
        generator = np.random.default_rng(self.seed)
        count = self.num_requests
        self._prompts = generator.integers(*prompt_len, size=count, endpoint=True)
        self._outputs = generator.integers(*output_len, size=count, endpoint=True)
        if self.rate is None:
            self.arrivals = np.zeros(count)
        else:
            self.arrivals = np.cumsum(generator.exponential(1 / self.rate, size=count))

    def request(self, number: int) -> InferenceRequest:
        prompt = np.zeros(self._prompts[number], dtype=np.int64)
        prompt[0] = number % VOCAB_SIZE
        tensors = {"input_ids": prompt, "request_output_len": self._outputs[number : number + 1]}
        return InferenceRequest(number, tensors)

    def output(self, number: int) -> None:
        return None

    def beams(self, number: int) -> Mapping[int, BeamCandidates]:
        return {}


@dataclass(frozen=True, slots=True)
class HostQueue:
    """The times when recorded requests arrived in their host's queue, as far as they are known.

    `arrivals` has the time of each request's arrival in seconds since the start, in the order in
    which Get, the host's callback, returned the requests. `num_held` is the number of requests
    that arrived before the Get that returned them, and `longest_s` is the longest of their waits.

    Get is never asked for more requests than the loop can accept, so a request may have waited in
    the host's queue. If the previous Get returned fewer requests than it was asked for, the queue
    was empty after that Get, and the request is assumed to arrive when its own Get returned it. If
    the previous Get was full (returned as many requests as it was asked for), the request may have
    waited. Then it is assumed to arrive at the first Get of the series of full Gets that ends with
    the previous Get, because the queue was empty before this series.
    """

    arrivals: tuple[float, ...]
    num_held: int
    longest_s: float


def host_queue(recording: Recording) -> HostQueue:
    """Return the times when the requests of a recording arrived in their host's queue."""
    max_active = recording.header.blueprint.max_active  # None means no limit, so no Get is full
    first = recording.iterations[0].intake.now
    arrivals: list[float] = []
    # time of the first Get in the series of full Gets that ends with the last Get; None if the last
    # Get was not full
    full_since: float | None = None
    num_held, longest_s, num_unknown = 0, 0.0, 0
    for iteration in recording.iterations:
        now = iteration.intake.now - first
        if full_since is not None and not iteration.num_active and iteration.idle_turns != 0:
            num_unknown += iteration.idle_turns is None
            # The loop was idle before this iteration. Get was called and returned nothing, so the
            # queue was empty. Older recordings do not contain this call; it is assumed.
            full_since = None
        since = now if full_since is None else full_since
        arrivals += [since] * len(iteration.intake.requests)
        if since < now:
            num_held += len(iteration.intake.requests)
            longest_s = max(longest_s, now - since if iteration.intake.requests else 0.0)
        full_since = since if _is_full(iteration, max_active) else None
    if num_unknown:
        logger.warning(
            "the recording has an older format: %d times no request was active, and it is not "
            "known whether Get was called and returned nothing; the requests after that are "
            "assumed to have arrived when Get returned them",
            num_unknown,
        )
    return HostQueue(tuple(arrivals), num_held, longest_s)


def _is_full(iteration: Iteration, max_active: int | None) -> bool:
    """Return whether Get returned as many requests as it was asked for.

    Return True also if the loop could accept no request, so that Get was not called.
    """
    return (
        max_active is not None
        and iteration.num_active + len(iteration.intake.requests) >= max_active
    )


class RecordedLoad:
    """The requests of a recording, with the tokens that they generated.

    A policy never changes a request's tokens, so a request that ended early in the recording ends
    early here. A request arrives at the time when it arrived at its host (see `HostQueue`) if
    `arrivals` is "time", in the iteration in which Get returned it if `arrivals` is "iterations",
    and at the start if `arrivals` is "at_once". Stop signals, clears of the KV cache and dropped
    adapters keep their times; with "at_once" they are left out. Errors of the recorded host's calls
    are always left out. `queue` has the arrivals in the host's queue; it is None unless `arrivals`
    is "time". A simulation that takes more than `max_request_steps`, which is far more than the
    recorded run took, is given up. `name` is the name of the recording.

    Raise ConfigError for other `arrivals`. Raise RecordingError for a recording without iterations,
    and for a black box (the last iterations before a failure), because it lacks the beginnings of
    requests.
    """

    def __init__(
        self, recording: Recording, arrivals: Literal["time", "iterations", "at_once"] = "time"
    ) -> None:
        if arrivals not in ("time", "iterations", "at_once"):
            raise ConfigError(
                f"RecordedLoad.arrivals = {arrivals!r} must be 'time', 'iterations' or 'at_once'"
            )
        if recording.header.state is not None or not recording.iterations:
            raise RecordingError("a load needs a recording from the start of a run")
        self.name = recording.name
        self.by_iterations = arrivals == "iterations"
        self.max_request_steps = _SPARE_STEPS
        self._requests: list[InferenceRequest] = []
        self._outputs: list[dict[int, int]] = []  # position -> token
        self._beams: list[dict[int, BeamCandidates]] = []
        first = recording.iterations[0].intake.now
        times: list[float] = []
        self.queue = host_queue(recording) if arrivals == "time" else None
        stops: list[Stop] = []
        clears: list[float] = []
        forgets: list[tuple[float, int]] = []
        live: dict[int, int] = {}
        schedules: dict[int, Schedule] = {}
        for iteration in recording.iterations:
            intake = iteration.intake
            when = float(iteration.index) if self.by_iterations else intake.now - first
            if intake.stops and arrivals != "at_once":
                stops.append((when, intake.stops))
            if intake.clears_cache and arrivals != "at_once":
                clears.append(when)
            if arrivals != "at_once":
                forgets += [(when, task_id) for task_id in intake.forgotten_adapters]
            self._take_requests(iteration, live)
            times += [0.0 if arrivals == "at_once" else when] * len(intake.requests)
            if iteration.schedule is not None:
                schedules[iteration.schedule.iteration] = iteration.schedule
                steps = ITERATION_STEPS + request_steps(iteration.schedule)
                self.max_request_steps += _MAX_STEPS_RATIO * steps
            for number, result in iteration.results:
                schedule = schedules.pop(number, None)
                if schedule is None:
                    raise RecordingError(
                        f"iteration {iteration.index} has the result of a schedule that is not "
                        "recorded: a load needs a recording from the start of a run"
                    )
                self._take_tokens(schedule, result, live)
        self.arrivals = np.array(times if self.queue is None else self.queue.arrivals)
        self.stops: Sequence[Stop] = stops
        self.clears: Sequence[float] = clears
        self.forgets: Sequence[tuple[float, int]] = forgets

    def request(self, number: int) -> InferenceRequest:
        return self._requests[number]

    def output(self, number: int) -> Sequence[int]:
        tokens = self._outputs[number]
        return [tokens[position] for position in sorted(tokens)]

    def beams(self, number: int) -> Mapping[int, BeamCandidates]:
        return self._beams[number]

    def _take_requests(self, iteration: Iteration, live: dict[int, int]) -> None:
        requests = iteration.intake.requests
        refused = Counter(
            end.request_id
            for end in iteration.ends or ()
            if end.error.startswith("DuplicateRequestIdError")
        )
        # of several requests with the same id, only the first can be admitted
        admitted = Counter(request.request_id for request in requests) - refused
        for request in requests:
            if admitted[request.request_id] > 0:
                admitted[request.request_id] -= 1
                live[request.request_id] = len(self._requests)
            # whether responses are streamed does not affect schedules
            copied = InferenceRequest(**{**vars(request), "is_streaming": False})
            self._requests.append(copied)
            self._outputs.append({})
            self._beams.append({})

    def _take_tokens(self, schedule: Schedule, result: StepResult, live: dict[int, int]) -> None:
        counts, beams = result.num_tokens, iter(result.beams)
        rows = schedule.sampling_rows
        num_searched = sum(row.beam_width > 1 for row in rows)
        if len(result.tokens) != len(rows) or len(result.beams) != num_searched:
            raise RecordingError(
                f"schedule {schedule.iteration} has {len(rows)} rows that sample, {num_searched} "
                f"of them with several beams; its result has tokens of {len(result.tokens)} rows "
                f"and beam candidates of {len(result.beams)}"
            )
        for index, row in enumerate(rows):
            tokens = result.tokens[index, : None if counts is None else counts[index]]
            candidates = next(beams) if row.beam_width > 1 else None
            if row.request_id in live:
                number = live[row.request_id]
                output, start = self._outputs[number], row.position + row.num_tokens
                start -= row.num_drafts
                if candidates is not None:
                    self._beams[number].setdefault(start, candidates)
                    continue
                for offset, token in enumerate(tokens.tolist()):
                    if token >= 0:  # otherwise it is a fault, and no simulated step fails
                        output.setdefault(start + offset, token)


def request_steps(schedule: Schedule) -> int:
    """Return the request-steps of a schedule, a measure of the time that simulating it takes.

    Each row counts as the square of its beam width, and every 64 appended blocks as one. (The
    figure `Figures.request_steps` counts each row as one.)
    """
    rows = schedule.rows
    num_blocks = sum(len(append.block_ids) for append in schedule.block_appends)
    return sum(row.beam_width * row.beam_width for row in rows) + num_blocks // 64
