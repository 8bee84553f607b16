"""`Recorder`: records everything that passes between a loop, its host and its executor.

`RecordingHost` and `RecordingExecutor` wrap the host and the executor of a `TokenLoop`. Either
everything is written to a file, or the last iterations stay in memory and are written when the loop
fails. The loop makes the same decisions with and without a recorder, and errors of the recorder do
not reach the loop.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

from gptmanager.assembly.blueprint import Blueprint, build_loop
from gptmanager.errors import ConfigError, RecordingError, response_text
from gptmanager.lifecycle.log import logger
from gptmanager.loop.responses import MakeFinal, final_tensors, finish_reason_name
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.recorder.black_box import BlackBox
from gptmanager.recorder.black_box_file import BlackBoxFile
from gptmanager.recorder.kept import kept_result
from gptmanager.recorder.recording_file import End, Iteration, make_header
from gptmanager.recorder.taps import ExecutorTap, HostTap
from gptmanager.recorder.values import to_json
from gptmanager.request.inference_request import NamedTensor
from gptmanager.statistics import PhaseTimes
from gptmanager.step import Executor, Host, Intake, Schedule, Step, StepResult

_FLUSH_S = 1.0


class Recorder:
    """A recorder that writes to `path`, or keeps the last `keep` iterations in a black box.

    The black box takes about `max_bytes` of memory. `fail` writes the black box to
    `black_box_path`, by default a new file in the temporary folder that only its owner can read.
    With a `path`, or with `keep` = 0, no black box is kept.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        keep: int = 64,
        max_bytes: int = 64 << 20,
        black_box_path: str | os.PathLike[str] | None = None,
    ) -> None:
        self._keep = 0 if path is not None else keep
        self._max_bytes = max_bytes
        self._black_box_file = BlackBoxFile(black_box_path)
        self._iteration: Iteration | None = None
        self._has_polled = False  # whether the iteration has polled, after all its results
        self._num_iterations = 0
        self._num_idle = 0  # iterations without work since the last recorded iteration
        self._black_box: BlackBox | None = None
        self._flushed = 0.0
        self._path = path
        self._file: IO[bytes] | None = None
        self.error = ""  # the error that ended the file early

    @property
    def is_on(self) -> bool:
        return self.writes_file or self._keep > 0

    @property
    def writes_file(self) -> bool:
        return self._path is not None

    def start(self, loop: Any, blueprint: Blueprint) -> None:
        """Begin to record `loop`, which is new and uses the host and executor of this recorder.

        Raise ConfigError if the file cannot be written.
        """
        if self._keep:
            self._black_box = BlackBox(loop, blueprint, self._keep, self._max_bytes)
        if self._path is not None:
            try:
                self._file = Path(self._path).open("wb")
            except OSError as error:
                raise ConfigError(
                    f"cannot write the recording {str(self._path)!r}: {error.strerror}"
                ) from error
        self._write(to_json(make_header(blueprint)))

    def close(self, reason: str = "drained", error: str = "") -> None:
        """End the recording. Nothing is recorded from now on."""
        self.end_iteration()
        self._black_box = None
        if self._file is not None:
            self._write(to_json({"kind": "end", "reason": reason, "error": error}))
        self._close_file()

    def fail(self, error: BaseException) -> None:
        """Write the black box if one is kept, and end the recording. The loop has failed."""
        text = response_text(error)
        if self._black_box is not None:
            self._write_black_box(self._black_box, text)
        self.close("failed", text)

    def restart(self, loop: Any, error: BaseException) -> None:
        """Continue after a failed iteration; the loop has ended all requests that had started.

        The recorded iterations do not lead to the loop's new state, so a recording stores this
        state. The black box is written to its file, and a new black box begins.
        """
        try:
            box = self._black_box
            if box is not None:
                self._write_black_box(box, response_text(error))
                parts = loop, box.blueprint, self._keep, self._max_bytes
                self._black_box = BlackBox(*parts, is_new=False)
                return
            if self._iteration is not None:
                self._iteration.recovered = loop.state()
                self.end_iteration()
            elif self._num_iterations:
                self._give_up(error)  # no iteration is there to store the state
        except BaseException as raised:  # noqa: B036 - the loop must still continue
            self._give_up(raised)

    # Called by the host and the executor -----------------------------------------------------

    def end_iteration(self) -> None:
        """Complete the current iteration; called at the start of the next iteration."""
        iteration, self._iteration = self._iteration, None
        if iteration is None:
            return
        if not iteration.num_active and iteration.is_empty:
            self._num_idle += 1
            return
        self._num_iterations += 1
        self._num_idle = 0
        try:
            if self._file is not None:
                flushes = iteration.intake.now - self._flushed >= _FLUSH_S
                self._flushed = iteration.intake.now if flushes else self._flushed
                self._write(iteration.line(), flushes)
            elif self._black_box is not None:
                self._black_box.add(iteration)
        except BaseException as error:  # noqa: B036 - a failed write must not end the loop
            self._give_up(error)

    def begin_iteration(self, num_active: int, intake: Intake) -> None:
        """Begin to record an iteration, with `num_active` active requests before its intake."""
        if self._black_box is not None and (intake.requests or intake.failures or intake.adapters):
            try:
                intake = self._black_box.keeper.intake(intake)
            except BaseException as error:  # noqa: B036 - a failed copy must not end the loop
                self._give_up(error)
        self._iteration = iteration = Iteration(self._num_iterations, num_active, intake)
        self._has_polled = False
        iteration.ends, iteration.idle_turns = None if self._file is None else (), self._num_idle

    def record_schedule(self, schedule: Schedule) -> None:
        """Record the schedule of the current iteration."""
        if self._iteration is not None:
            self._iteration.schedule = schedule

    def record_result(self, iteration: int, result: StepResult) -> None:
        """Record the result of the schedule with the number `iteration`."""
        current = self._iteration
        if current is not None:
            if current.result is not None:
                current.recalled = current.results
            current.num_late += self._has_polled
            is_plain = result.extras is None and not result.failures
            current.result_of = iteration
            current.result = result if is_plain else kept_result(result)

    def record_poll(self) -> None:
        """Record that the host has polled: the loop takes no more results in this iteration."""
        self._has_polled = True

    def record_end(self, request_id: int, tensors: list[NamedTensor], error: str) -> None:
        """Record a final response, without its tensors."""
        iteration = self._iteration
        if iteration is not None and iteration.ends is not None:
            reason = finish_reason_name(tensors, "ERROR")
            iteration.ends += (End(request_id, reason, error),)

    # Private -------------------------------------------------------------------------------

    def _write_black_box(self, box: BlackBox, text: str) -> None:
        """Write the black box, unless no step has completed since the last failure."""
        last, self._iteration = self._iteration, None
        if not box.is_worth_writing:
            return
        try:
            lines = box.lines(last)
            if not lines:
                raise RecordingError("the state of the loop alone takes more than black_box_bytes")
            lines.append(to_json({"kind": "end", "reason": "failed", "error": text}))
            path = self._black_box_file.write(b"\n".join(lines) + b"\n")
            logger.error(
                "the last iterations are written to %s; inspect them with `gptmanager replay %s`",
                *(path, path),
            )
        except BaseException:  # noqa: B036 - the final responses must still be sent
            logger.exception("cannot write the black box")

    def _write(self, line: bytes, flushes: bool = False) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line + b"\n")
            if flushes:
                self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        self.error = response_text(error)
        trace = None if isinstance(error, OSError) else error
        logger.error("the recording ends early: %s", self.error, exc_info=trace)
        self._black_box = None
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:  # raised by the last flush
                self.error = self.error or response_text(error)
                logger.error("the recording is truncated: %s", response_text(error))


class RecordingHost(HostTap):
    """A `Host` that calls another host, and reports intakes, polls and final responses."""

    def __init__(self, host: Host, recorder: Recorder) -> None:
        super().__init__(host)

        def fetch(room: int | None, num_active: int) -> Intake:
            intake = host_fetch(room, num_active)
            recorder.end_iteration()  # not earlier: `restart` needs it if the host's fetch fails
            recorder.begin_iteration(num_active, intake)
            return intake

        def respond(
            request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
        ) -> None:
            if is_final:
                recorder.record_end(request_id, tensors, error)
            host.respond(request_id, tensors, is_final, error)

        def poll() -> None:
            host_poll()
            recorder.record_poll()

        host_fetch, self.fetch = host.fetch, fetch
        host_poll, self.poll = host.poll, poll
        if recorder.writes_file:  # a black box keeps no responses
            self.respond = respond


class RecordingExecutor(ExecutorTap):
    """An `Executor` that calls another, and reports schedules and results to `recorder`."""

    def __init__(self, executor: Executor, recorder: Recorder) -> None:
        super().__init__(executor)

        def forward(schedule: Schedule) -> Step:
            recorder.record_schedule(schedule)
            return executor_forward(schedule)

        def result(step: Any) -> StepResult:
            result = executor_result(step)
            recorder.record_result(step.schedule.iteration, result)
            return result

        executor_forward, self.forward = executor.forward, forward
        executor_result, self.result = executor.result, result


def build_recorded_loop(
    blueprint: Blueprint,
    host: Host,
    executor: Executor,
    recorder: Recorder,
    *,
    phase_times: PhaseTimes,
    final: MakeFinal = final_tensors,
) -> TokenLoop:
    """Build a loop as `build_loop` does, and record it if `recorder` is on."""
    if not recorder.is_on:
        return build_loop(blueprint, host, executor, phase_times=phase_times, final=final)
    loop = build_loop(
        blueprint,
        RecordingHost(host, recorder),
        RecordingExecutor(executor, recorder),
        phase_times=phase_times,
        final=final,
    )
    recorder.start(loop, blueprint)
    return loop
