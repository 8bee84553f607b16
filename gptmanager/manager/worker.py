"""`Worker`: what a manager's thread does: build the loop, turn it, answer for it at the end.

Asks nobody but the inbox whether to go on. Should the thread hang, a watchdog's answers for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from gptmanager.assembly.assemble import Assembly
from gptmanager.config import OptionalParams
from gptmanager.errors import ManagerDeadError
from gptmanager.host.callback_host import CallbackHost
from gptmanager.kernels.simd.threads import end_threads_of_caller
from gptmanager.lifecycle.clock import perf_counter_ns
from gptmanager.lifecycle.log import logger
from gptmanager.lifecycle.state import Deposed, ManagerState, as_final
from gptmanager.lifecycle.watchdog import CallbackTimer, whereabouts
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.manager.ending import Ending
from gptmanager.manager.inbox import Inbox
from gptmanager.manager.recovery import Recovery
from gptmanager.manager.stall_watch import Progress
from gptmanager.recorder import Recorder, build_recorded_loop
from gptmanager.statistics import PhaseTimes

_STALL_S = 0.01  # nobody was scheduled: how soon to ask again


class Worker:
    """`on_end` is called once, when the thread of `run` has nothing left to say."""

    def __init__(
        self,
        params: OptionalParams,
        host: CallbackHost,
        inbox: Inbox,
        recorder: Recorder,
        on_end: Callable[[], None],
    ) -> None:
        self._params = params
        self._host = host
        self._lifecycle = host.lifecycle
        self._inbox = inbox
        self._recorder = recorder
        # a rank that has lost an iteration is no longer where the others are
        most = params.max_step_failures if params.parallel_config is None else 1
        self._recovery = Recovery(host, recorder, most)
        self._turn = CallbackTimer("turn")  # of the loop; none while it rests
        self._ending = Ending(params, host, inbox, recorder, self._turn, on_end)
        self._thread: threading.Thread | None = None
        self.progress = Progress()
        self.loop: TokenLoop | None = None
        end_threads_of_caller()  # then those of the loop's thread wait actively between operations

    @property
    def is_here(self) -> bool:
        """The calling thread is one that calls the host's callbacks."""
        return threading.current_thread() in (self._thread, self._ending.deputy)

    def whereabouts(self) -> str:
        """Return what the thread does now. Safe from any thread."""
        thread = None if self._thread is None else self._thread.ident
        return whereabouts(self._host.timers.all, thread)

    def run(self, assemble: Callable[[], Assembly], booted: Future[None]) -> None:
        """From the start of the thread to its end; what `assemble` raises is raised by `booted`."""
        self._thread = threading.current_thread()
        try:
            self.loop = loop = self._build(assemble())
            self._host.timers.all.append(loop.scheduler_timer)
            watchdog = self._ending.watch(loop)
        except BaseException as error:  # noqa: B036 - raised in the constructor's line
            self._host.tell_failure(error)
            self.end_unborn(error)
            booted.set_exception(error)
            return
        self._lifecycle.move_to(ManagerState.RUNNING)
        booted.set_result(None)
        try:
            self._serve_to_the_end(loop)
        except Deposed:
            return  # the watchdog's thread does the rest
        if watchdog is not None:
            watchdog.stop()
        self._ending.release(self.loop)
        self._ending.close()
        self._inbox.answer(loop)

    def _build(self, assembly: Assembly) -> TokenLoop:
        self._host.attach(assembly)
        return build_recorded_loop(
            assembly.blueprint,
            *(self._host, assembly.executor, self._recorder),
            phase_times=PhaseTimes(perf_counter_ns),
        )

    def end_unborn(self, error: BaseException) -> None:
        """The loop could not be built, or had no thread to be built on."""
        self._host.is_accepting = False
        self._lifecycle.fail(error)
        self._ending.release(self.loop)
        self._ending.close()

    def _serve_to_the_end(self, loop: TokenLoop) -> None:
        try:
            self._serve(loop)
            self._lifecycle.leave(ManagerState.STOPPED)
        except Deposed:
            raise
        except BaseException as error:  # noqa: B036 - kept as `exception`
            # nothing that may raise stands between the failure and the final responses
            self._host.is_accepting = False
            self._lifecycle.fail(error)
            self._host.tell_failure(error)
            try:
                self._ending.end_requests(loop, as_final(error))
            except Deposed:
                raise
            except BaseException:  # noqa: B036 - the end must come
                logger.exception("the last responses could not be made")
            self._ending.tell_failure(error)
            self._lifecycle.leave(ManagerState.FAILED)

    def _serve(self, loop: TokenLoop) -> None:
        while True:
            self._turn.start()
            self._inbox.begin_turn()
            self._lifecycle.check()
            asked_to_end, aborts = self._inbox.is_to_end, self._inbox.is_to_abort
            self._inbox.answer(loop)
            if self._host.rests_in_orders:
                self._turn.stop()
            ends, aborts = self._host.orders(
                ends=asked_to_end, aborts=aborts, is_active=loop.holds_requests
            )
            self._turn.start()
            if aborts or ends:
                self._host.is_accepting = False
                if aborts:
                    self._recorder.close("aborted")
                    self._host.end(aborts=True)
                    self._ending.end_requests(loop, ManagerDeadError("the manager was shut down"))
                if not (loop.holds_requests or self._host.holds_requests):
                    self._recorder.close()
                    if not aborts:
                        self._host.end(aborts=False)
                    return
                self._lifecycle.move_to(ManagerState.DRAINING)
            had_active, pending = bool(loop.active), loop.pending
            try:
                worked = self._turn_once(loop)
            except Exception as error:
                self._recovery.recover(loop, error)
                continue
            self.progress.note(worked=worked, is_active=bool(loop.active))
            if not worked:
                self._host.rest()
            if worked and (pending[0] not in loop.pending if pending else not loop.pending):
                self._recovery.note_step()  # of one that is only launched the result may still fail
            if self._host.get_failures.fatal is not None:
                raise self._host.get_failures.fatal
            # a final response may have made the host submit: then Get knows more than it said
            ended_some = had_active and not loop.active
            if not (worked or ended_some or self._host.last_fetch.num_requests):
                self.progress.warn_of_stall(loop)
                self._rest(loop)

    def _turn_once(self, loop: TokenLoop) -> bool:
        """An iteration; did it have a step?"""
        is_idle = not (loop.holds_requests or loop.pending) and self._host.is_accepting
        # an idle turn asks Get and no more: it comes a hundred times a second
        if is_idle and not self._host.peek(loop.max_active):
            return False
        return loop.iterate()

    def _rest(self, loop: TokenLoop) -> None:
        """Sleep until somebody wakes the loop or it is time to ask Get again."""
        fetched = self._host.last_fetch
        seconds = self._params.idle_poll_s
        if not loop.active and fetched.is_empty:
            self._inbox.tell_idle()
        if loop.active:
            seconds = _STALL_S
        elif fetched.failed:
            seconds = self._host.get_failures.pause_s
        self._turn.stop()
        if self._host.rests_in_orders:
            return
        self._inbox.rest(seconds)  # woken for nothing, the loop only asks Get once more
