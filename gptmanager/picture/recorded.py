"""`trace_of`: creates a `Trace` of a recorded run.

Recordings lack the reasons why requests waited. So the recording is also replayed, and the
scheduler of the replay reports the reasons.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gptmanager.errors import DuplicateRequestIdError, RecordingError, RequestError, error_class
from gptmanager.picture.builder import TraceBuilder
from gptmanager.picture.trace import Bounds, Trace
from gptmanager.picture.wait_reporter import WaitReporter
from gptmanager.recorder.recording_file import End, Iteration, Recording
from gptmanager.replay.replaying import completed
from gptmanager.request.inference_request import TENSOR_ALIASES, InferenceRequest
from gptmanager.request.read_tensors import (
    INT32,
    read_end_ids,
    read_float,
    read_int,
    read_token_ids,
)
from gptmanager.scheduler.simple import RequestScheduler
from gptmanager.scheduler.wait_reasons import Wait
from gptmanager.step import Schedule

# reasons of ends that the intake causes, before the iteration runs anything
_EARLY = ("CANCELLED", "TIMED_OUT", "ERROR")

# `TraceBuilder.max_work` is _WORK_PER_ROW times the rows of the recording, plus _SPARE_WORK
_WORK_PER_ROW = 64
_SPARE_WORK = 1 << 24


def trace_of(recording: Recording) -> Trace:
    """Return the requests, iterations and ends of a recording as a trace.

    The reasons for waits are unknown if the recording cannot be replayed, for example without the
    host's own scheduler.

    A black box (the last iterations before a failure) has no ends. Ends by length, end id, stop
    signal or an error before a step are derived. A request also ends when another request uses its
    slot. Ends by stop words, and of requests with several beams, are unknown. A request that was
    active before the first kept schedule is drawn from its first row on.
    """
    blueprint = recording.header.blueprint
    params, sizes = blueprint.params, blueprint.sizes
    bounds = Bounds(
        max_batch_size=params.max_batch_size,
        max_num_tokens=params.max_num_tokens,
        num_blocks=sizes.num_blocks,
        tokens_per_block=sizes.tokens_per_block,
        policy=blueprint.custom_scheduler or blueprint.scheduler.capacity_scheduler_policy.name,
        chunk_unit=sizes.tokens_per_block if sizes.chunked else None,
    )
    reader = _Reader(TraceBuilder(bounds), blueprint.vocab_size, sizes.max_seq_len)
    rows = sum(
        len(iteration.schedule.rows)
        for iteration in recording.iterations
        if iteration.schedule is not None
    )
    reader.builder.max_work = max_asked = _SPARE_WORK + _WORK_PER_ROW * rows
    waits = _waits_of(recording, max_asked)
    for iteration in recording.iterations:
        reader.read(iteration, next(waits, None))
    return reader.builder.build()


def _waits_of(recording: Recording, max_asked: int) -> Iterator[Mapping[int, Wait]]:
    """Yield the reasons for waits in each iteration, until the replay diverges.

    Stop earlier if the scheduler has been asked about more than `max_asked` requests in total.
    """
    reporters: list[WaitReporter] = []

    def wrap(scheduler: RequestScheduler) -> RequestScheduler:
        reporters.append(WaitReporter(scheduler))
        return reporters[-1]

    try:
        for _ in completed(recording, wrap=wrap):
            yield reporters[-1].take()
            if sum(reporter.num_asked for reporter in reporters) > max_asked:
                return
    except RecordingError:
        return


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters of a request that its trace depends on. Lengths are in tokens."""

    prompt_len: int
    max_new_tokens: int
    end_ids: frozenset[int]
    priority: float


@dataclass(frozen=True, slots=True)
class _Reader:
    """A reader that passes iterations to `builder`.

    `asked` maps request ids to parameters. `drafted` has the schedules with draft tokens that
    await their results, by number.
    """

    builder: TraceBuilder
    vocab_size: int
    max_seq_len: int
    asked: dict[int, _Parameters] = field(default_factory=dict)
    drafted: dict[int, Schedule] = field(default_factory=dict)

    def read(self, iteration: Iteration, waits: Mapping[int, Wait] | None) -> None:
        builder, schedule, intake = self.builder, iteration.schedule, iteration.intake
        rows = () if schedule is None else schedule.rows
        running = {row.request_id for row in rows}
        early, late = _split_ends(iteration, running)
        for end in early:
            builder.end(end.request_id, end.error or end.reason)
        refused = {end.request_id for end in early if end.reason == "ERROR"}
        for request in intake.requests:
            if request.request_id not in refused and request.request_id not in builder:
                asked = self._read_request(request)
                if asked is not None:
                    self.asked[request.request_id] = asked
                    if iteration.kept:
                        self._arrive(request.request_id)
        if schedule is not None:
            for request_id in running:
                if request_id not in builder:  # arrived before the first kept schedule
                    self._arrive(request_id)
            builder.step(schedule, intake.now, waits)
            if any(row.num_drafts for row in rows):
                self.drafted[schedule.iteration] = schedule
        for number, result in iteration.results:
            if number in self.drafted:
                builder.confirm(self.drafted.pop(number), result)
        for end in late if iteration.ends is not None else self._find_ends(iteration):
            builder.end(end.request_id, end.error or end.reason)

    def _arrive(self, request_id: int) -> None:
        asked = self.asked.get(request_id)
        if asked is not None:
            self.builder.arrive(request_id, asked.prompt_len, asked.max_new_tokens, asked.priority)

    def _read_request(self, request: InferenceRequest) -> _Parameters | None:
        """Return a request's parameters, or None if they are invalid."""
        tensors = {TENSOR_ALIASES.get(name, name): v for name, v in request.tensors.items()}
        try:
            prompt = read_token_ids("input_ids", tensors.get("input_ids"), self.vocab_size)
            name = "request_output_len"
            new_tokens = read_int(name, tensors.get(name), 1, INT32[1])
            end_ids = read_end_ids(tensors.get("end_id", -1), INT32[1])
            priority = read_float("priority", request.priority, -1e300)
        except RequestError:
            return None
        new_tokens = min(new_tokens, self.max_seq_len - len(prompt))
        return _Parameters(len(prompt), new_tokens, frozenset(end_ids), priority)

    def _find_ends(self, iteration: Iteration) -> Iterable[End]:
        """Yield ends by length or end id, if the iteration has the result of its schedule."""
        schedule = iteration.schedule
        result = None if schedule is None else dict(iteration.results).get(schedule.iteration)
        if schedule is None or result is None:
            return
        counts = itertools.repeat(None) if result.num_tokens is None else result.num_tokens.tolist()
        every = zip(schedule.sampling_rows, result.tokens.tolist(), counts, strict=False)
        for row, tokens, count in every:
            found, asked = tokens[:count], self.asked.get(row.request_id)
            if asked is None or row.beam_width > 1 or min(found, default=-1) < 0:
                continue
            length = row.position + row.num_tokens - row.num_drafts + len(found)
            if not asked.end_ids.isdisjoint(found):
                yield End(row.request_id, "END_ID")
            elif length == asked.prompt_len + asked.max_new_tokens:
                yield End(row.request_id, "LENGTH")


def _split_ends(iteration: Iteration, running: set[int]) -> tuple[list[End], list[End]]:
    """Return the ends before the iteration's step, and the ends after the step.

    Leave out refused duplicates, because the other request with their id continues.
    """
    if iteration.ends is None:
        intake = iteration.intake
        stopped = [End(request_id, "CANCELLED") for request_id in sorted(intake.stops)]
        failed = [End(f.request_id, "ERROR", str(f.error)) for f in intake.failures]
        return stopped + failed, []
    early: list[End] = []
    late: list[End] = []
    for end in iteration.ends:
        if error_class(end.error) == DuplicateRequestIdError.__name__:
            continue
        is_early = end.reason in _EARLY and end.request_id not in running
        (early if is_early else late).append(end)
    return early, late
