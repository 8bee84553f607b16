"""`BackgroundJobs`: long work in pieces, done beside the steps of a loop, or between them.

Decides who does the next piece, and when. On a thread of its own the work keeps no step from a
core, where there is one to spare. Where steps want all cores, a thread that wakes up takes one from
a step, which waits for it in each of its operations. There the loop's thread does the work, a
little after each step.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from typing import Any, Generic, cast

import torch

from gptmanager.environment.cores import num_cores
from gptmanager.lifecycle.clock import monotonic, perf_counter_ns, thread_time_ns
from gptmanager.request.pieces import Pieces, Result

_LOOK_UP_S = 0.05  # how often a thread asks whether its job is left to the loop, if nobody wakes it
_SOON_S = 0.001  # the same, until a step has ended that knows
# Steps run until none has ended for so many times as long as the last one took, within these.
_BUSY_STEPS, _LEAST_BUSY_S, _MOST_BUSY_S = 4, 0.05, 1.0
# While they do, a thread works for so long without a rest, and rests so many times as long.
_PIECE_NS, _RESTS, _LONGEST_REST_S = 200_000, 5, 0.01
# The share of an iteration that the loop's thread works after it, and its longest turn.
_SHARE, _LONGEST_TURN_S = 0.03, 0.05
# None behind a step that took longer than usual, which is the median of so many: what waits longest
# for a token is not to wait for this, too.
_SLOW, _USUAL_STEPS = 1.05, 31
_LONGEST_WAIT_NS = 10_000_000  # in a piece, for a disk perhaps: the next one is left to a thread


class Job(Generic[Result]):
    """Each piece may be done on another thread than the one before; `by_loop`: on the loop's.

    `woken` is set when the job has ended and when the loop has no step to run.
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
        """One piece more. False: there is none, or another thread is at one and nobody `waits`."""
        if not self._lock.acquire(blocking=waits):
            return False
        try:
            if not self.ended.is_set():
                next(self._pieces)
                return True
        except StopIteration as end:
            self.result = end.value
            self._end()
        except BaseException as error:  # noqa: B036 - what a host's tensor raises, or no memory
            self.error = error
            self._end()
        finally:
            self._lock.release()
        return False

    def _end(self) -> None:
        self.ended.set()
        self.woken.set()

    def advance_for(self, seconds: float) -> float:
        """Piece after piece, for about so long. Gives how long it was."""
        began = now = perf_counter_ns()
        is_left = True
        while is_left and self.by_loop and now - began < 1e9 * seconds:
            before, worked_ns = now, -thread_time_ns()
            is_left = self.advance(waits=False)
            now, worked_ns = perf_counter_ns(), worked_ns + thread_time_ns()
            self.by_loop = now - before - worked_ns < _LONGEST_WAIT_NS
        return (now - began) / 1e9


class BackgroundJobs:
    """`loop_helps`: whether the loop's thread may take pieces. `pending`: jobs that have begun.

    `last_step`: when the last step ended, on the monotonic clock; -inf before the first step and
    once the loop has had no step to run. What passes until the next step is no step's time.
    """

    def __init__(self) -> None:
        self.loop_helps = False
        self.is_released = False
        self.pending: deque[Job[Any]] = deque()
        self.last_step = -math.inf
        self._busy_s = _LEAST_BUSY_S
        self._is_crowded: bool | None = None  # None: not known yet
        self._credit_s = 0.0  # of the loop's thread
        self._steps_s: deque[float] = deque(maxlen=_USUAL_STEPS)

    @property
    def is_busy(self) -> bool:
        """Steps run."""
        return monotonic() - self.last_step < self._busy_s

    def finish(self, pieces: Pieces[Result], *, by_loop: bool = True) -> Result:
        """All of a job, by the calling thread as far as the loop does not do it.

        `by_loop`: it may, since no piece waits for anything. RuntimeError once nobody wants it.
        """
        job, since_ns = Job(pieces, by_loop=by_loop), thread_time_ns()
        self.pending.append(job)
        try:
            while True:
                job.woken.clear()  # before it is asked what may set it
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
        """Also where the next step is the first to know."""
        may_be = self.loop_helps and self._is_crowded is not False
        return may_be and job.by_loop and self.is_busy

    def check(self) -> None:
        """RuntimeError once nobody wants any job."""
        if self.is_released:
            raise RuntimeError("the manager has ended")

    def rest(self, since_ns: int) -> int:
        """A thread has done a piece. While steps run it works a part of the time only.

        `since_ns`: its own time when it had rested. Gives the same for the next call.
        """
        worked_ns = thread_time_ns() - since_ns
        if worked_ns < _PIECE_NS:
            return since_ns
        if self.is_busy:
            time.sleep(min(_RESTS * worked_ns / 1e9, _LONGEST_REST_S))
        return thread_time_ns()

    def rest_loop(self) -> None:
        """Note that the loop had no step to run: the threads need not leave their jobs to it."""
        self.last_step = -math.inf
        for job in tuple(self.pending):
            job.woken.set()

    def end_step(self) -> None:
        """A step has ended. On the loop's thread, which may have a turn now."""
        now = monotonic()
        step_s = now - self.last_step
        if step_s < math.inf:
            self._busy_s = min(max(_BUSY_STEPS * step_s, _LEAST_BUSY_S), _MOST_BUSY_S)
        if self.pending and self.loop_helps:
            if self._is_crowded is None:
                self._is_crowded = torch.get_num_threads() >= num_cores()
            if self._is_crowded and step_s < math.inf:
                self._take_turn(step_s)
                now = monotonic()
        self.last_step = now

    def _take_turn(self, step_s: float) -> None:
        """The last piece may take longer than there is time: then the next turn is shorter."""
        self._steps_s.append(step_s)
        if step_s > _SLOW * statistics.median(self._steps_s):
            return
        self._credit_s = min(self._credit_s, 0.0) + min(_SHARE * step_s, _LONGEST_TURN_S)
        for job in tuple(self.pending):
            if self._credit_s > 0:
                self._credit_s -= job.advance_for(self._credit_s)
