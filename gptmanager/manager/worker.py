"""`Worker`: a manager's thread, which builds the loop, runs it, and ends the remaining requests.

If the thread hangs and `on_hang` is "fail", the watchdog's thread sends the last responses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from gptmanager.assembly.assemble import Assembly
from gptmanager.config import OptionalParams
from gptmanager.errors import ManagerDeadError
from gptmanager.executor.runner import StepSignal
from gptmanager.host.callback_host import CallbackHost
from gptmanager.host.loop_host import LoopHost, Turn
from gptmanager.host.ranked_host import loop_host
from gptmanager.journal.opening import open_journal
from gptmanager.kernels.simd.threads import end_threads_of_caller
from gptmanager.lifecycle.clock import perf_counter_ns
from gptmanager.lifecycle.log import logger
from gptmanager.lifecycle.state import LoopAbandoned, ManagerState, as_final
from gptmanager.lifecycle.watchdog import CallbackTimer, whereabouts
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.manager.ending import LoopEnding
from gptmanager.manager.inbox import Inbox
from gptmanager.manager.rank_calls import RankCalls
from gptmanager.manager.recovery import Recovery
from gptmanager.manager.stall_watch import StallWatch
from gptmanager.manager.weight_updates import WeightUpdates
from gptmanager.recorder import Recorder, build_recorded_loop
from gptmanager.statistics import PhaseTimes

_PAUSE_S = 0.1  # how long a paused loop sleeps before it checks the other ranks again


class Worker:
    """Builds, runs and ends the loop of one manager."""

    def __init__(
        self,
        params: OptionalParams,
        host: CallbackHost,
        inbox: Inbox,
        recorder: Recorder,
    ) -> None:
        self._params = params
        self._host = host
        self._loop_host: LoopHost = host  # with several ranks, the host of this rank
        self._lifecycle = host.lifecycle
        self._inbox = inbox
        self._recorder = recorder
        # with several ranks the first failed iteration ends the manager: the rank that failed would
        # be out of step with the other ranks
        most = params.max_step_failures if params.parallel_config is None else 1
        self._recovery = Recovery(host, recorder, most)
        self._timer = CallbackTimer("iteration")  # stopped while the loop sleeps
        self._ending = LoopEnding(params, host, inbox, recorder, self._timer)
        self._calls = RankCalls(host, inbox, self._timer)
        self.updates = WeightUpdates(host.cache_invalidation, self._calls)
        self._thread: threading.Thread | None = None
        self._starts = [None]
        self.stall_watch = StallWatch()
        self.steps = StepSignal()
        self.loop: TokenLoop | None = None
        end_threads_of_caller()  # so that the loop's compute threads may spin between operations

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the one that calls the host's callbacks."""
        return threading.current_thread() in (self._thread, self._ending.stand_in)

    def whereabouts(self) -> str:
        """Return what the loop's thread is doing. Any thread may call it."""
        thread = None if self._thread is None else self._thread.ident
        return whereabouts(self._host.timers.all, thread)

    def stop_all(self, loop: TokenLoop) -> int:
        """Stop all active requests with the next intake, on all ranks. Return how many they are."""

        def stop() -> int:
            self._calls.agree("abort_all", lambda: None)  # raises if a rank makes a different call
            return self._host.stop_all(loop)

        return self._calls.run("abort_all", loop, stop)

    def run(self, assemble: Callable[[], Assembly], booted: Future[None]) -> None:
        """Build and run the loop, from the start of the thread to its end.

        `booted` gets its result when the loop is built, or the error if the loop cannot be built.
        """
        if not self._is_first():
            return
        self._thread = threading.current_thread()
        try:
            self.loop = loop = self._build(assemble())
            self._host.timers.all.append(loop.scheduler_timer)
            watchdog = self._ending.watch(loop, self._loop_host)
        except BaseException as error:  # noqa: B036 - the manager's constructor raises it
            self._fail_startup(error)
            booted.set_exception(error)
            return
        self._lifecycle.move_to(ManagerState.RUNNING)
        booted.set_result(None)
        try:
            self._serve_to_the_end(loop)
        except LoopAbandoned:
            return  # the watchdog's thread does the rest
        if watchdog is not None:
            watchdog.stop()
        self.updates.release()
        self._ending.release(self.loop, self._loop_host)
        self._ending.close()
        self._inbox.answer(loop)

    def _build(self, assembly: Assembly) -> TokenLoop:
        self._host.attach(assembly)
        self.updates.attach(assembly.executor.runner)
        assembly.executor.runner.begin_step = self.steps.begin
        self._loop_host = host = loop_host(self._host, assembly, self._inbox.bells, self._timer)
        is_leader = assembly.ranks is None or assembly.ranks.collectives.layout.rank == 0
        journaled = None
        if self._params.journal_path is not None and is_leader:
            journaled = open_journal(self._params, self._host, host, assembly.checkpoint)
        loop = build_recorded_loop(
            assembly.blueprint,
            *(journaled or host, assembly.executor, self._recorder),
            phase_times=PhaseTimes(perf_counter_ns),
        )
        if journaled is not None:
            journaled.table = loop.table
        self._calls.attach(assembly.ranks, loop)
        return loop

    def fail_start(self, error: BaseException) -> None:
        """End the manager if the loop's thread has not begun to run; then it never will."""
        if self._is_first():
            self._fail_startup(error)

    def _is_first(self) -> bool:
        """Return True to one caller only: the loop's thread, or the one that could not start it."""
        with suppress(IndexError):
            self._starts.pop()
            return True
        return False

    def _fail_startup(self, error: BaseException) -> None:
        """Release everything after an error in building the loop or starting its thread."""
        self._lifecycle.fail(error)
        self._loop_host.stop(error)
        self._ending.release(self.loop, self._loop_host)
        self._ending.close()

    def _serve_to_the_end(self, loop: TokenLoop) -> None:
        try:
            self._serve(loop)
            self._lifecycle.leave(ManagerState.STOPPED)
        except LoopAbandoned:
            raise
        except BaseException as error:  # noqa: B036 - kept as `exception`
            # nothing between the failure and the final responses may raise
            self._lifecycle.fail(error)
            self._loop_host.stop(error)
            try:
                self._ending.end_requests(loop, as_final(error))
            except LoopAbandoned:
                raise
            except BaseException:  # noqa: B036 - the thread must still end
                logger.exception("an error while the last responses were sent")
            self._ending.log_failure(error)
            self._lifecycle.leave(ManagerState.FAILED)

    def _serve(self, loop: TokenLoop) -> None:
        """Iterate until the end. Each round looks for these interruptions, in this order:

        | interruption | where it is found | effect |
        | --- | --- | --- |
        | the watchdog has abandoned the loop | `Lifecycle.check` | LoopAbandoned |
        | questions of other threads | `Inbox.answer` | answered between two iterations |
        | shutdown, here or on rank 0 | `await_turn` | DRAIN, END or ABORT |
        | a rank has failed | `await_turn` | RankError |
        | `pause_generation`, `sleep`, or incomplete weights | `_serve`, `await_turn` | wait |
        | an iteration or a step raised | `Recovery` | continue without started requests, or raise |
        | Get failed too often | `GetFailures.fatal` | raised |
        | nothing to do | `_rest` | sleep until woken |
        """
        self._host.journal.flush()  # send the responses that an earlier process could not send
        while (turn := self._next_turn(loop)) not in (Turn.ABORT, Turn.END):
            if turn is Turn.DRAIN:
                self._lifecycle.move_to(ManagerState.DRAINING)
            elif not self._calls.has_failed and (turn is Turn.PAUSE or self._is_paused):
                self._calls.note_pause()
                self.stall_watch.note(worked=False, is_active=False)  # waits for the host: no stall
                self.steps.interrupt()
                if turn is not Turn.PAUSE:  # `await_turn` waits
                    self._timer.stop()
                    self._inbox.rest(_PAUSE_S)
                continue
            try:
                is_idle = not self._iterate(loop)
            except Exception as error:
                self.steps.interrupt()
                self._recovery.recover(loop, error)
                continue
            if self._host.get_failures.fatal is not None:
                raise self._host.get_failures.fatal
            if is_idle:
                self.stall_watch.warn_of_stall(loop)
                self._rest(loop)
        self._recorder.close("aborted" if turn is Turn.ABORT else "drained")
        if turn is Turn.ABORT:
            self._ending.end_requests(loop, ManagerDeadError("the manager was shut down"))

    @property
    def _is_paused(self) -> bool:
        return self._inbox.is_paused or not self.updates.can_run

    def _next_turn(self, loop: TokenLoop) -> Turn:
        self._timer.start()
        self._inbox.begin_iteration()
        self._lifecycle.check()
        ends, aborts = self._inbox.is_to_end, self._inbox.is_to_abort
        self._inbox.answer(loop, self.steps.interrupt)
        if ends and not self.updates.can_run and not self._inbox.defers_calls:
            aborts = True

        def is_active() -> bool:
            return loop.holds_requests or bool(loop.pending)  # a step may outlive its requests

        return self._loop_host.await_turn(ends=ends, aborts=aborts, is_active=is_active)

    def _iterate(self, loop: TokenLoop) -> bool:
        """Run an iteration if there is work. Return False if the loop may rest now."""
        self._calls.raise_failure()
        had_active, pending = bool(loop.active), loop.pending
        is_idle = not (loop.holds_requests or loop.pending) and self._host.is_accepting
        # an idle loop only calls Get, in `peek`, by default a hundred times a second
        has_work = not is_idle or self._loop_host.peek(loop.max_active)
        worked = has_work and loop.iterate()
        self.steps.end_iteration()
        self._host.journal.flush()
        self.stall_watch.note(worked=worked, is_active=bool(loop.active))
        if not worked:
            self._host.adapter_loader.jobs.rest_loop()
        elif _has_finished_a_step(pending, loop.pending):
            self._recovery.note_step()  # not earlier: a step may fail until its result is in
        # a final response may have made the host submit another request: do not rest yet
        ended_some = had_active and not loop.active
        return worked or ended_some or self._host.last_fetch.num_requests > 0

    def _rest(self, loop: TokenLoop) -> None:
        """Sleep until another thread wakes the loop or it is time to call Get again."""
        is_active = bool(loop.active)
        if not is_active and self._host.last_fetch.is_empty:
            self._inbox.report_idle()
        self._timer.stop()
        idle_poll_s = self._params.idle_poll_s
        self._inbox.rest(self._loop_host.pause_s(idle_poll_s, is_active=is_active))


def _has_finished_a_step(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Return whether an iteration that worked has applied a result, by its pending steps."""
    return before[0] not in after if before else not after
