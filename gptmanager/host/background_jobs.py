"""`BackgroundJobs`: long work in pieces, done in parallel with the steps of a loop or between them.

`BackgroundJobs` decides which thread does the next piece, and when. If there is a spare core, a
separate thread does the work without delaying steps. If steps use all cores, a thread that wakes up
takes a core from a step, and each operation of the step waits for that core. In this case the
loop's thread does a small part of the work after each step.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from typing import Any, Generic, cast

import torch

from gptmanager.environment.machine.cores import num_cores
from gptmanager.lifecycle.clock import monotonic, perf_counter_ns, thread_time_ns
from gptmanager.request.pieces import Pieces, Result

_LOOK_UP_S = 0.05  # interval at which a waiting thread checks its job
_SOON_S = 0.001  # the same interval while it is unknown whether steps use all cores
# After a step the loop counts as busy for _BUSY_STEPS times the step's time, within limits.
_BUSY_STEPS, _LEAST_BUSY_S, _MOST_BUSY_S = 4, 0.05, 1.0
# While the loop is busy, a thread works for _PIECE_NS and then rests _RESTS times as long.
_PIECE_NS, _RESTS, _LONGEST_REST_S = 200_000, 5, 0.01
# After a step the loop's thread works for this fraction of the step's time, up to the maximum.
_SHARE, _LONGEST_WORK_S = 0.03, 0.05
# No work follows a step slower than _SLOW times the median of the last _USUAL_STEPS steps: the work
# would delay the slowest tokens even more.
_SLOW, _USUAL_STEPS = 1.05, 31
_LONGEST_WAIT_NS = 10_000_000  # if a piece waits longer, the loop's thread leaves the job alone


class Job(Generic[Result]):
    """A job that is done in pieces.

    Any thread may do a piece, the loop's thread only with `by_loop`. `woken` is set when the job
    has ended, and when the loop has no step to run.
    """

    def __init__(self, pieces: Pieces[Result], *, by_loop: bool) -> None:
        self.by_loop = by_loop
        self.ended = threading.Event()
        self.woken = threading.Event()
        self.result: Result | None = None
        self.error: BaseException | None = None
        self._pieces = pieces
        self._lock = threading.Lock()

    def advance(self, *, waits: bool) -> bool:
        """Do one piece. Return False if the job has ended, or if another thread is doing a piece.

        With `waits`, wait for the other thread and then do a piece.
        """
        if not self._lock.acquire(blocking=waits):
            return False
        try:
            if not self.ended.is_set():
                next(self._pieces)
                return True
        except StopIteration as end:
            self.result = end.value
            self._end()
        except BaseException as error:  # noqa: B036 - a host's tensor may raise, or memory run out
            self.error = error
            self._end()
        finally:
            self._lock.release()
        return False

    def _end(self) -> None:
        self.ended.set()
        self.woken.set()

    def advance_for(self, seconds: float) -> float:
        """Do pieces for about `seconds`; return the seconds used."""
        began = now = perf_counter_ns()
        is_left = True
        while is_left and self.by_loop and now - began < 1e9 * seconds:
            before, worked_ns = now, -thread_time_ns()
            is_left = self.advance(waits=False)
            now, worked_ns = perf_counter_ns(), worked_ns + thread_time_ns()
            self.by_loop = now - before - worked_ns < _LONGEST_WAIT_NS
        return (now - began) / 1e9


class BackgroundJobs:
    """The jobs of one loop and the rules for sharing the cores with its steps.

    With `loop_helps`, the loop's thread may do pieces. `pending` has the jobs that have started and
    not ended. `last_step` is when the last step ended, on the monotonic clock. It is -inf before
    the first step, and while the loop has no step to run, because idle time is not a step's time.
    """

    def __init__(self) -> None:
        self.loop_helps = False
        self.is_released = False
        self.pending: deque[Job[Any]] = deque()
        self.last_step = -math.inf
        self._busy_s = _LEAST_BUSY_S
        self._is_crowded: bool | None = None  # unknown at first
        self._credit_s = 0.0  # seconds that the loop's thread may work
        self._steps_s: deque[float] = deque(maxlen=_USUAL_STEPS)

    @property
    def is_busy(self) -> bool:
        """Whether steps are running."""
        return monotonic() - self.last_step < self._busy_s

    def finish(self, pieces: Pieces[Result], *, by_loop: bool = True) -> Result:
        """Do a whole job on the calling thread, except for the pieces that the loop's thread does.

        `by_loop`: the loop's thread may do pieces, because no piece blocks. Raise the error of the
        job, and RuntimeError once `is_released` is set.
        """
        job, since_ns = Job(pieces, by_loop=by_loop), thread_time_ns()
        self.pending.append(job)
        try:
            while True:
                job.woken.clear()  # cleared before reading the conditions that set it
                if job.ended.is_set():
                    break
                self.check()
                if self._is_left_to_loop(job):
                    job.woken.wait(_LOOK_UP_S if self._is_crowded else _SOON_S)
                else:
                    job.advance(waits=True)
                    since_ns = self.rest(since_ns)
        finally:
            self.pending.remove(job)
        if job.error is not None:
            raise job.error
        return cast("Result", job.result)

    def _is_left_to_loop(self, job: Job[Any]) -> bool:
        """Return whether the loop's thread does the next piece of a job.

        The condition is that steps run and use all cores. Until the use of cores is known, assume
        that steps use all.
        """
        may_be = self.loop_helps and self._is_crowded is not False
        return may_be and job.by_loop and self.is_busy

    def check(self) -> None:
        """Raise RuntimeError if the manager has ended."""
        if self.is_released:
            raise RuntimeError("the manager has ended")

    def rest(self, since_ns: int) -> int:
        """Sleep after a piece if steps are running, so that a thread works only part of the time.

        `since_ns`: the thread's CPU time at the end of its last rest. Return the new `since_ns`.
        """
        worked_ns = thread_time_ns() - since_ns
        if worked_ns < _PIECE_NS:
            return since_ns
        if self.is_busy:
            time.sleep(min(_RESTS * worked_ns / 1e9, _LONGEST_REST_S))
        return thread_time_ns()

    def rest_loop(self) -> None:
        """Note that the loop had no step to run: from now on threads do the jobs themselves."""
        self.last_step = -math.inf
        for job in tuple(self.pending):
            job.woken.set()

    def end_step(self) -> None:
        """Note that a step has ended, and do pieces if this is due. Called on the loop's thread."""
        now = monotonic()
        step_s = now - self.last_step
        if step_s < math.inf:
            self._busy_s = min(max(_BUSY_STEPS * step_s, _LEAST_BUSY_S), _MOST_BUSY_S)
        if self.pending and self.loop_helps:
            if self._is_crowded is None:
                self._is_crowded = torch.get_num_threads() >= num_cores()
            if self._is_crowded and step_s < math.inf:
                self._work_after_step(step_s)
                now = monotonic()
        self.last_step = now

    def _work_after_step(self, step_s: float) -> None:
        """Do pieces for a fraction of the step's time, less the excess of earlier pieces."""
        self._steps_s.append(step_s)
        if step_s > _SLOW * statistics.median(self._steps_s):
            return
        self._credit_s = min(self._credit_s, 0.0) + min(_SHARE * step_s, _LONGEST_WORK_S)
        for job in tuple(self.pending):
            if self._credit_s > 0:
                self._credit_s -= job.advance_for(self._credit_s)
