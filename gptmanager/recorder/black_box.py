"""`BlackBox`: keeps the last iterations of a loop in memory, to be written when the loop fails.

A recording can start in the middle of a run only where the state of the loop is known, so the box
copies the state from time to time. It keeps all intakes and results since the second newest copy. A
replay computes the schedules from the intakes and results, so the box keeps only the latest
schedules. If `max_bytes` is small, the box keeps fewer schedules and iterations.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from gptmanager.assembly.blueprint import Blueprint
from gptmanager.lifecycle.clock import thread_time_ns
from gptmanager.lifecycle.log import logger
from gptmanager.loop.token_loop import LoopState
from gptmanager.recorder.kept import Keeper, kept_schedule
from gptmanager.recorder.recording_file import Iteration, make_header
from gptmanager.recorder.sizes import OBJECT, value_bytes
from gptmanager.recorder.values import to_json
from gptmanager.step import Schedule

# CPU time of a copy of the state, spread over the iterations until the next copy
_STATE_NS_PER_ITERATION = 2000
_MIN_SEGMENT, _MAX_SEGMENT = 256, 1 << 14  # iterations


class BlackBox:
    """Keeps the schedules of the last `keep` iterations of `loop`, and what a replay of them needs.

    A quarter of `max_bytes` is for schedules; if they need more, fewer are kept. The rest is for at
    most two segments, each with a state and the iterations after it; the older segment is dropped
    first. If a state alone needs more than this rest, nothing is kept until a later state fits.
    `is_new`: whether the loop has not iterated yet.
    """

    def __init__(
        self, loop: Any, blueprint: Blueprint, keep: int, max_bytes: int, *, is_new: bool = True
    ) -> None:
        self._loop = loop
        self.blueprint = blueprint
        self.keeper = Keeper(blueprint.vocab_size, blueprint.hidden_size)
        self._keep = keep
        # (iteration, bytes of its schedule) of the latest iterations, which still have schedules
        self._recent: deque[tuple[Iteration, int]] = deque()
        self._recent_bytes = 0
        self._max_recent_bytes = max_bytes // 4
        self._max_segment_bytes = max_bytes - self._max_recent_bytes
        self._segments: deque[_Segment] = deque()
        self._segment_length = max(_MIN_SEGMENT, keep)
        self._num_lost = 0  # iterations since the last state was dropped as too large
        self._has_warned = False
        # a box that is created after a failure is worth writing only after a step has completed
        self.is_worth_writing = is_new
        if is_new:
            self._segments.append(_Segment(None, self._max_segment_bytes))
        else:
            self._begin_segment()

    def add(self, iteration: Iteration) -> None:
        """Add an iteration. Must be called between two iterations of the loop."""
        self.is_worth_writing |= iteration.result is not None
        if not self._segments:
            self._num_lost += 1
            if self._num_lost >= self._segment_length:
                self._begin_segment()
            return
        self._add_recent(iteration)
        segment = self._segments[-1]
        segment.iterations.append(iteration)
        segment.iteration_bytes += iteration_bytes(iteration)
        is_full = segment.iteration_bytes >= segment.max_iteration_bytes
        if is_full or len(segment.iterations) >= self._segment_length:
            self._begin_segment()

    def lines(self, last: Iteration | None) -> list[bytes]:
        """Return all lines of the recording except the end line; no lines if no state fits.

        `last` is the iteration that failed, or None.
        """
        if not self._segments:
            return []
        first = self._segments[0]
        iterations = [iteration for segment in self._segments for iteration in segment.iterations]
        if last is not None:
            iterations.append(last)
        return [
            to_json(make_header(self.blueprint, first.state)),
            *(iteration.line() for iteration in iterations),
        ]

    @property
    def _num_segment_bytes(self) -> int:
        return sum(segment.state_bytes + segment.iteration_bytes for segment in self._segments)

    def _add_recent(self, iteration: Iteration) -> None:
        recent = self._recent
        size = 0
        if iteration.schedule is not None:
            if iteration.schedule.starts:
                iteration.schedule = kept_schedule(iteration.schedule)
            size = schedule_bytes(iteration.schedule)
        recent.append((iteration, size))
        self._recent_bytes += size
        while len(recent) > self._keep or self._recent_bytes > self._max_recent_bytes:
            oldest, size = recent.popleft()
            self._recent_bytes -= size
            oldest.schedule, oldest.kept = None, False

    def _begin_segment(self) -> None:
        started = thread_time_ns()  # does not advance while a debugger stops the process
        state: LoopState = self._loop.state()
        state = state._replace(pending=tuple(map(kept_schedule, state.pending)))
        self._segments.append(_Segment(state, self._max_segment_bytes))
        taken = thread_time_ns() - started
        length = min(max(_MIN_SEGMENT, taken // _STATE_NS_PER_ITERATION), _MAX_SEGMENT)
        self._segment_length = max(self._keep, length)
        while len(self._segments) > 2 or self._num_segment_bytes > self._max_segment_bytes:
            self._segments.popleft()
            if not self._segments:
                self._lose(state)
                return

    def _lose(self, state: LoopState) -> None:
        self._num_lost = 0
        self._recent.clear()
        self._recent_bytes = 0
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the black box is off for now: the state of the loop takes about %d bytes, and "
                "three quarters of black_box_bytes are only %d",
                *(state_bytes(state), self._max_segment_bytes),
            )


class _Segment:
    """Consecutive iterations, and the state of the loop before the first one.

    `state` is None for a new loop. `max_bytes` is the limit for all segments of the box together.
    It suffices for two segments, or for only one if the states are large.
    """

    def __init__(self, state: LoopState | None, max_bytes: int) -> None:
        self.state = state
        self.state_bytes = 0 if state is None else state_bytes(state)
        self.iterations: list[Iteration] = []
        self.iteration_bytes = 0
        self.max_iteration_bytes = max(max_bytes // 2 - self.state_bytes, max_bytes // 8)


def iteration_bytes(iteration: Iteration) -> int:
    """Estimate the bytes of an iteration without its schedule, which is dropped earlier."""
    intake = iteration.intake
    size = 4 * OBJECT
    if intake.requests or intake.stops or intake.failures or intake.ready:
        size += value_bytes((intake.requests, *intake.stops, intake.failures, intake.ready))
    for result in [iteration.result, *(result for _, result in iteration.recalled)]:
        if result is None:
            continue
        size += result.tokens.nbytes
        if result.num_tokens is not None or result.beams or result.failures:
            size += value_bytes((result.num_tokens, result.beams, result.failures))
    return size


def schedule_bytes(schedule: Schedule) -> int:
    """Estimate the bytes of a schedule. All rows are assumed to have the same size."""
    rows = len(schedule.context_rows) + len(schedule.generation_rows)
    copies = len(schedule.block_copies) + len(schedule.state_loads) + len(schedule.state_saves)
    size = OBJECT * (1 + 2 * rows + copies)
    for others in (schedule.block_appends, schedule.starts, schedule.beam_forks, schedule.drafts):
        if others:
            size += value_bytes(others)
    return size


def state_bytes(state: LoopState) -> int:
    """Estimate the bytes of a state."""
    return value_bytes(state)
