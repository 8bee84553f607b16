"""The recorder: stands between a loop and its world and writes down what passes.

`RecordingHost` and `RecordingExecutor` wrap the two doors of a `TokenLoop`; the loop does not know.
Either everything goes to a file, or the last iterations stay in memory as they are, to be written
when the loop fails. Never changes what it sees, never raises into the loop.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from gptmanager.api import NamedTensor
from gptmanager.config import FinishReason
from gptmanager.errors import ConfigError, response_text
from gptmanager.object_graph import GraphWriter
from gptmanager.recorded_values import RecordingError, to_json
from gptmanager.recording import End, make_header
from gptmanager.step import Intake, Schedule, StepResult

logger = logging.getLogger("gptmanager")

_FLUSH_S = 1.0
# the state of the loop is copied so seldom that the copies cost so much a turn of the loop
_STATE_NS_PER_TURN = 1000
_MIN_SEGMENT = 256

# what a loop is made of; all else in it is state
_MADE_OF = frozenset(
    {
        *("host", "executor", "scheduler", "limits", "laps"),
        *("max_active", "max_batch_size", "max_num_tokens", "run_ahead"),
    }
)


class _Turn:
    """An iteration under way, and later what is kept of it."""

    __slots__ = (
        "ends", "index", "intake", "kept", "num_active", "result", "result_of", "schedule",
    )  # fmt: skip

    def __init__(self, index: int, num_active: int, intake: Intake, ends: list[End] | None) -> None:
        self.index = index
        self.num_active = num_active
        self.intake = intake
        self.schedule: Schedule | None = None
        self.kept = True
        self.result_of: int | None = None
        self.result: StepResult | None = None
        self.ends = ends

    @property
    def is_idle(self) -> bool:
        """Nothing could happen, and nothing did."""
        intake = self.intake
        return not (
            self.num_active
            or self.schedule is not None
            or self.result is not None
            or intake.requests
            or intake.stops
            or intake.failures
            or intake.ready
        )

    def line(self) -> bytes:
        values = {name: getattr(self, name) for name in self.__slots__}
        return to_json({"kind": "iteration", **values})


class Recorder:
    """Writes a recording to `path`, or keeps the last `keep` iterations for `fail` to write.

    `black_box_path` None: a new file in the temporary folder, readable by its owner only. With
    `path`, or with `keep` = 0, there is no black box.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        keep: int = 64,
        black_box_path: str | os.PathLike[str] | None = None,
    ) -> None:
        self._keep = 0 if path is not None else keep
        self._black_box_path = black_box_path
        self._blueprint: Mapping[str, Any] = {}
        self._loop: Any = None
        self._turn: _Turn | None = None
        self._num_turns = 0
        self._recent: deque[_Turn] = deque()  # those whose schedule is kept
        self._segments: deque[_Segment] = deque([_Segment(None)], maxlen=2)
        self._segment_length = max(_MIN_SEGMENT, keep)
        self._flushed = 0.0
        self._path = path
        self._file: IO[bytes] | None = None

    @property
    def is_on(self) -> bool:
        return self.writes_file or self._keep > 0

    @property
    def writes_file(self) -> bool:
        return self._path is not None

    def start(self, loop: Any, blueprint: Mapping[str, Any]) -> None:
        """`loop` stands on this recorder's host and executor and has not iterated yet.

        Raises ConfigError if the file cannot be written.
        """
        self._loop = loop
        self._blueprint = blueprint
        if self._path is not None:
            try:
                self._file = Path(self._path).open("wb")
            except OSError as error:
                raise ConfigError(
                    f"the recording {str(self._path)!r} cannot be written: {error.strerror}"
                ) from error
        self._write(to_json(make_header(blueprint)))

    def close(self, reason: str = "drained", error: str = "") -> None:
        """The run is over: what is still said belongs to no iteration."""
        self.end_turn()
        self._keep = 0
        if self._file is not None:
            self._write(to_json({"kind": "end", "reason": reason, "error": error}))
        self._close_file()

    def fail(self, error: BaseException) -> Path | None:
        """The loop has failed: write the black box, if there is one; returns where."""
        text = response_text(error)
        written = None
        try:
            self._end_turn()
            if self._keep:
                written = self._write_black_box(text)
                logger.error(
                    "the last %d iterations are written to %s; look at them with "
                    "`gptmanager replay %s`",
                    *(len(self._recent), written, written),
                )
        except Exception:  # the recorder must not cost the final responses
            logger.exception("the black box could not be written")
        self.close("failed", text)
        return written

    # What the two doors call ---------------------------------------------------------------

    def end_turn(self) -> None:
        """The turn under way is complete; called at the start of the next one."""
        try:
            self._end_turn()
        except Exception as error:  # what cannot be written must not end the loop
            self._give_up(error)

    def begin_turn(self, num_active: int, intake: Intake) -> _Turn:
        ends: list[End] | None = None if self._file is None else []
        self._turn = turn = _Turn(self._num_turns, num_active, intake, ends)
        return turn

    def record_schedule(self, schedule: Schedule) -> None:
        if self._turn is not None:
            self._turn.schedule = schedule

    def record_result(self, iteration: int, result: StepResult) -> None:
        if self._turn is not None:
            self._turn.result_of = iteration
            self._turn.result = result

    def record_end(self, request_id: int, tensors: list[NamedTensor], error: str) -> None:
        turn = self._turn
        if turn is not None and turn.ends is not None:
            reasons = (value for name, value in reversed(tensors) if name == "finish_reasons")
            value = next(reasons, None)
            reason = "ERROR" if value is None else FinishReason(int(value)).name
            turn.ends.append(End(request_id, reason, error))

    # Inside --------------------------------------------------------------------------------

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is None or turn.is_idle:
            return
        self._num_turns += 1
        if self._file is not None:
            flushes = turn.intake.now - self._flushed >= _FLUSH_S
            self._flushed = turn.intake.now if flushes else self._flushed
            self._write(turn.line(), flushes)
        elif self._keep:
            self._remember(turn)

    def _remember(self, turn: _Turn) -> None:
        recent = self._recent
        if len(recent) == self._keep:
            oldest = recent.popleft()
            oldest.schedule, oldest.kept = None, False
        recent.append(turn)
        turns = self._segments[-1].turns
        turns.append(turn)
        if len(turns) >= self._segment_length:
            started = time.perf_counter_ns()
            self._segments.append(_Segment(_LoopState(self._loop)))
            taken = time.perf_counter_ns() - started
            self._segment_length = max(_MIN_SEGMENT, self._keep, taken // _STATE_NS_PER_TURN)

    def _write_black_box(self, text: str) -> Path:
        first = self._segments[0]
        state = None if first.state is None else first.state.plain()
        lines = [to_json(make_header(self._blueprint, state))]
        lines += [turn.line() for segment in self._segments for turn in segment.turns]
        lines.append(to_json({"kind": "end", "reason": "failed", "error": text}))
        if self._black_box_path is None:
            number, name = tempfile.mkstemp(prefix="gptmanager-black-box-", suffix=".jsonl")
            os.close(number)
            path = Path(name)
        else:
            path = Path(self._black_box_path)
        path.write_bytes(b"\n".join(lines) + b"\n")
        return path

    def _write(self, line: bytes, flushes: bool = False) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line + b"\n")
            if flushes:
                self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        logger.error("recording ends here: %s", response_text(error), exc_info=error)
        self._keep = 0
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:  # what was still to be flushed
                logger.error("the recording is cut off: %s", response_text(error))


class _LoopState:
    """The state of a loop between two iterations, copied but for what only grows."""

    def __init__(self, loop: Any) -> None:
        state = {name: value for name, value in vars(loop).items() if name not in _MADE_OF}
        pending = state["pending"]
        state["pending"] = None if pending is None else pending.schedule
        self._graph = GraphWriter(growing=frozenset({"tokens"}))
        self._root = self._graph.add(state)

    def plain(self) -> dict[str, Any]:
        return {"objects": self._graph.entries(), "root": self._root}


class _Segment:
    """Turns in a row, and the state of the loop before the first of them; None: a new loop's."""

    def __init__(self, state: _LoopState | None) -> None:
        self.state = state
        self.turns: list[_Turn] = []


class RecordingHost:
    """A `Host` that tells `recorder` what the host inside says."""

    def __init__(self, host: Any, recorder: Recorder) -> None:
        self._host = host
        self._fetch = host.fetch
        self._recorder = recorder
        self.poll = host.poll
        self.report = host.report
        # responses are many; only a file tells of those that end a request
        self.respond = self._respond if recorder.writes_file else host.respond

    def fetch(self, room: int | None, num_active: int) -> Intake:
        recorder = self._recorder
        recorder.end_turn()
        intake: Intake = self._fetch(room, num_active)
        recorder.begin_turn(num_active, intake)
        return intake

    def _respond(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        if is_final:
            self._recorder.record_end(request_id, tensors, error)
        self._host.respond(request_id, tensors, is_final, error)


class RecordingExecutor:
    """An `Executor` that tells `recorder` what it is asked to run and what came of it."""

    def __init__(self, executor: Any, recorder: Recorder) -> None:
        self._forward = executor.forward
        self._result = executor.result
        self._recorder = recorder
        self.sample = executor.sample

    def forward(self, schedule: Schedule) -> Any:
        self._recorder.record_schedule(schedule)
        return self._forward(schedule)

    def result(self, step: Any) -> StepResult:
        result: StepResult = self._result(step)
        self._recorder.record_result(step.schedule.iteration, result)
        return result


__all__ = ["Recorder", "RecordingError", "RecordingExecutor", "RecordingHost"]
