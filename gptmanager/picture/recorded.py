"""A `Trace` of a recorded run, read from what the recording says.

The scheduler decides once more in a replay, beside, to tell why requests waited.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gptmanager.errors import RecordingError, RequestError
from gptmanager.picture.builder import TraceBuilder
from gptmanager.picture.trace import Bounds, Trace
from gptmanager.picture.waiting import ToldWaits
from gptmanager.recorder.recording import End, Iteration, Recording
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
from gptmanager.scheduler.waiting import Wait

# ends that come of the intake, before anything of the iteration runs
_EARLY = ("CANCELLED", "TIMED_OUT", "ERROR")


# a picture follows so many who do not run for each that does, and some more
_WORK_PER_ROW = 64
_SPARE_WORK = 1 << 24


def trace_of(recording: Recording) -> Trace:
    """Rows, columns and ends of a recording.

    Why requests wait is unknown where the recording does not replay, as without a scheduler of the
    host's own.

    A black box does not tell of ends. Ends that follow from lengths, end tokens, stops and reused
    slots are found, a stop word is not. A request that was active before the first kept schedule
    shows from its first row on.
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
        len(turn.schedule.context_rows) + len(turn.schedule.generation_rows)
        for turn in recording.iterations
        if turn.schedule is not None
    )
    reader.builder.max_work = most = _SPARE_WORK + _WORK_PER_ROW * rows
    waits = _waits_of(recording, most)
    for iteration in recording.iterations:
        reader.read(iteration, next(waits, None))
    return reader.builder.build()


def _waits_of(recording: Recording, most: int) -> Iterator[Mapping[int, Wait]]:
    """Yield the scheduler's reasons for each iteration, until the replay diverges.

    It also ends once the scheduler was asked about `most` requests, over all iterations.
    """
    asked: list[ToldWaits] = []

    def ask(scheduler: RequestScheduler) -> RequestScheduler:
        asked.append(ToldWaits(scheduler))
        return asked[-1]

    try:
        for _ in completed(recording, wrap=ask):
            yield asked[-1].take()
            if sum(told.num_asked for told in asked) > most:
                return
    except RecordingError:
        return


@dataclass(frozen=True, slots=True)
class _Asked:
    """The lengths and end id that a request asked for, in tokens."""

    prompt_len: int
    max_new_tokens: int
    end_ids: frozenset[int]
    priority: float


@dataclass(frozen=True, slots=True)
class _Reader:
    builder: TraceBuilder
    vocab_size: int
    max_seq_len: int
    asked: dict[int, _Asked] = field(default_factory=dict)

    def read(self, iteration: Iteration, waits: Mapping[int, Wait] | None) -> None:
        builder, schedule, intake = self.builder, iteration.schedule, iteration.intake
        rows = () if schedule is None else (*schedule.context_rows, *schedule.generation_rows)
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
                if request_id not in builder:  # it came before the first schedule that was kept
                    self._arrive(request_id)
            builder.step(schedule, intake.now, waits)
        for end in late if iteration.ends is not None else self._find_ends(iteration):
            builder.end(end.request_id, end.error or end.reason)

    def _arrive(self, request_id: int) -> None:
        asked = self.asked.get(request_id)
        if asked is not None:
            self.builder.arrive(request_id, asked.prompt_len, asked.max_new_tokens, asked.priority)

    def _read_request(self, request: InferenceRequest) -> _Asked | None:
        """None: no loop would have taken it."""
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
        return _Asked(len(prompt), new_tokens, frozenset(end_ids), priority)

    def _find_ends(self, iteration: Iteration) -> Iterable[End]:
        """From lengths and end tokens, where the result is that of this very schedule."""
        schedule = iteration.schedule
        result = None if schedule is None else dict(iteration.results).get(schedule.iteration)
        if schedule is None or result is None:
            return
        failed = {failure.request_id for failure in result.failures}
        for row, tokens in zip(schedule.sampling_rows, result.tokens.tolist(), strict=False):
            has_token = row.request_id not in failed and min(tokens) >= 0
            asked = self.asked.get(row.request_id) if has_token else None
            if asked is not None and tokens[-1] in asked.end_ids:
                yield End(row.request_id, "END_ID")
            elif asked is not None and (
                row.position + row.num_tokens + 1 == asked.prompt_len + asked.max_new_tokens
            ):
                yield End(row.request_id, "LENGTH")


def _split_ends(iteration: Iteration, running: set[int]) -> tuple[list[End], list[End]]:
    """The ends before the iteration's step, and those after it."""
    if iteration.ends is None:
        intake = iteration.intake
        stopped = [End(request_id, "CANCELLED") for request_id in sorted(intake.stops)]
        failed = [End(f.request_id, "ERROR", str(f.error)) for f in intake.failures]
        return stopped + failed, []
    early: list[End] = []
    late: list[End] = []
    for end in iteration.ends:
        is_early = end.reason in _EARLY and end.request_id not in running
        (early if is_early else late).append(end)
    return early, late
