"""The black box: the last iterations of a loop as objects. They are written when the loop fails.

A recording can begin in the middle only where the state of the loop is known. So the box copies the
state from time to time. It keeps all intakes and results since the last copy but one. Schedules
follow from these: it keeps only the last ones. It keeps less of all where the bytes are few.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from gptmanager.assembly.blueprint import Blueprint
from gptmanager.lifecycle.clock import thread_time_ns
from gptmanager.lifecycle.log import logger
from gptmanager.loop.token_loop import LoopState
from gptmanager.recorder.kept import Keeper, kept_schedule
from gptmanager.recorder.recording import Iteration, make_header
from gptmanager.recorder.sizes import OBJECT, value_bytes
from gptmanager.recorder.values import to_json
from gptmanager.step import Schedule

# CPU time that copies of the state may cost, spread over the turns between them
_STATE_NS_PER_TURN = 2000
_MIN_SEGMENT, _MAX_SEGMENT = 256, 1 << 14  # turns


class BlackBox:
    """Keeps the schedules of the last `keep` turns of `loop`, and what leads to them.

    A quarter of `max_bytes` is for schedules: it keeps fewer if they need more. The rest is for at
    most two segments: it drops the older one first. While a state alone takes more, it keeps
    nothing. `is_new`: the loop has not iterated yet.
    """

    def __init__(
        self, loop: Any, blueprint: Blueprint, keep: int, max_bytes: int, *, is_new: bool = True
    ) -> None:
        self._loop = loop
        self.blueprint = blueprint
        self.keeper = Keeper(blueprint.vocab_size, blueprint.hidden_size)
        self._keep = keep
        self._recent: deque[tuple[Iteration, int]] = deque()  # whose schedule is kept; its bytes
        self._recent_bytes = 0
        self._max_recent_bytes = max_bytes // 4
        self._max_segment_bytes = max_bytes - self._max_recent_bytes
        self._segments: deque[_Segment] = deque()
        self._segment_length = max(_MIN_SEGMENT, keep)
        self._num_lost = 0  # turns since there was room for a state
        self._has_warned = False
        self.tells_something = is_new  # else: not before a step has come to its end
        if is_new:
            self._segments.append(_Segment(None, self._max_segment_bytes))
        else:
            self._begin_segment()

    def add(self, turn: Iteration) -> None:
        """To be called between two turns of the loop."""
        self.tells_something |= turn.result is not None
        if not self._segments:
            self._num_lost += 1
            if self._num_lost >= self._segment_length:
                self._begin_segment()
            return
        self._add_recent(turn)
        segment = self._segments[-1]
        segment.turns.append(turn)
        segment.turn_bytes += turn_bytes(turn)
        is_full = segment.turn_bytes >= segment.max_turn_bytes
        if is_full or len(segment.turns) >= self._segment_length:
            self._begin_segment()

    def lines(self, last: Iteration | None) -> list[bytes]:
        """The recording without its end. `last`: a turn that was not completed.

        None at all where no state fits.
        """
        if not self._segments:
            return []
        first = self._segments[0]
        turns = [turn for segment in self._segments for turn in segment.turns]
        if last is not None:
            turns.append(last)
        return [
            to_json(make_header(self.blueprint, first.state)),
            *(turn.line() for turn in turns),
        ]

    @property
    def _num_segment_bytes(self) -> int:
        return sum(segment.state_bytes + segment.turn_bytes for segment in self._segments)

    def _add_recent(self, turn: Iteration) -> None:
        recent = self._recent
        size = 0
        if turn.schedule is not None:
            if turn.schedule.starts:
                turn.schedule = kept_schedule(turn.schedule)
            size = schedule_bytes(turn.schedule)
        recent.append((turn, size))
        self._recent_bytes += size
        while len(recent) > self._keep or self._recent_bytes > self._max_recent_bytes:
            oldest, size = recent.popleft()
            self._recent_bytes -= size
            oldest.schedule, oldest.kept = None, False

    def _begin_segment(self) -> None:
        started = thread_time_ns()  # does not count the time that a debugger stops the process
        state: LoopState = self._loop.state()
        state = state._replace(pending=tuple(map(kept_schedule, state.pending)))
        self._segments.append(_Segment(state, self._max_segment_bytes))
        taken = thread_time_ns() - started
        length = min(max(_MIN_SEGMENT, taken // _STATE_NS_PER_TURN), _MAX_SEGMENT)
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
                "there is no black box for now: the state of the loop alone takes about %d bytes, "
                "three quarters of black_box_bytes are %d",
                *(state_bytes(state), self._max_segment_bytes),
            )


class _Segment:
    """Turns in a row, and the state of the loop before the first of them; None: a new loop's.

    `max_bytes` hold two segments, or one whose state is large.
    """

    def __init__(self, state: LoopState | None, max_bytes: int) -> None:
        self.state = state
        self.state_bytes = 0 if state is None else state_bytes(state)
        self.turns: list[Iteration] = []
        self.turn_bytes = 0
        self.max_turn_bytes = max(max_bytes // 2 - self.state_bytes, max_bytes // 8)


def turn_bytes(turn: Iteration) -> int:
    """Without the schedule, which is not kept as long. Most turns hold little to look at."""
    intake = turn.intake
    size = 4 * OBJECT
    if intake.requests or intake.stops or intake.failures or intake.ready:
        size += value_bytes((intake.requests, *intake.stops, intake.failures, intake.ready))
    for result in [turn.result, *(result for _, result in turn.recalled)]:
        if result is None:
            continue
        size += result.tokens.nbytes
        if result.num_tokens is not None or result.beams or result.failures:
            size += value_bytes((result.num_tokens, result.beams, result.failures))
    return size


def schedule_bytes(schedule: Schedule) -> int:
    """It counts the rows alone: they are many."""
    rows = len(schedule.context_rows) + len(schedule.generation_rows)
    size = OBJECT * (1 + 2 * rows + len(schedule.block_copies))
    for others in (schedule.block_appends, schedule.starts, schedule.beam_forks, schedule.drafts):
        if others:
            size += value_bytes(others)
    return size


def state_bytes(state: LoopState) -> int:
    return value_bytes(state)
