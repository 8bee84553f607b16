"""The black box: the last iterations of a loop as objects, to be written when it fails.

A recording may begin in the middle only where the state of the loop is known. So the state is
copied from time to time, intakes and results are kept since the last copy but one, and schedules,
which follow from them, only of the last iterations. Knows nothing of who fills it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from gptmanager.blueprint import Blueprint
from gptmanager.clock import perf_counter_ns
from gptmanager.loop_state import LoopState
from gptmanager.recorder.recording import Turn, make_header
from gptmanager.recorder.values import to_json

# the state of the loop is copied so seldom that the copies cost so much a turn of the loop
_STATE_NS_PER_TURN = 2000
_MIN_SEGMENT = 256


class BlackBox:
    """Keeps the schedules of the last `keep` turns of `loop`, and what leads to them.

    `is_new`: the loop has not iterated yet.
    """

    def __init__(self, loop: Any, blueprint: Blueprint, keep: int, *, is_new: bool = True) -> None:
        self._loop = loop
        self.blueprint = blueprint
        self._keep = keep
        self._recent: deque[Turn] = deque()  # those whose schedule is kept
        self._segments: deque[_Segment] = deque(
            [_Segment(None if is_new else loop.state())], maxlen=2
        )
        self._segment_length = max(_MIN_SEGMENT, keep)
        self.tells_something = is_new  # else: not before a step has come to its end

    def add(self, turn: Turn) -> None:
        """To be called between two turns of the loop."""
        recent = self._recent
        if len(recent) == self._keep:
            oldest = recent.popleft()
            oldest.schedule, oldest.kept = None, False
        recent.append(turn)
        self.tells_something |= turn.result is not None
        turns = self._segments[-1].turns
        turns.append(turn)
        if len(turns) >= self._segment_length:
            started = perf_counter_ns()
            self._segments.append(_Segment(self._loop.state()))
            taken = perf_counter_ns() - started
            self._segment_length = max(_MIN_SEGMENT, self._keep, taken // _STATE_NS_PER_TURN)

    def lines(self, last: Turn | None) -> list[bytes]:
        """The recording without its end. `last`: a turn that was not completed."""
        first = self._segments[0]
        turns = [turn for segment in self._segments for turn in segment.turns]
        if last is not None:
            turns.append(last)
        return [
            to_json(make_header(self.blueprint, first.state)),
            *(turn.line() for turn in turns),
        ]


class _Segment:
    """Turns in a row, and the state of the loop before the first of them; None: a new loop's."""

    def __init__(self, state: LoopState | None) -> None:
        self.state = state
        self.turns: list[Turn] = []
