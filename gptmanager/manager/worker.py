"""`Worker`: what a manager's thread does: build the loop, turn it, answer for it at the end.

Asks nobody but the inbox whether to go on. Should the thread hang, the watchdog's answers for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from gptmanager.assembly.assemble import Assembly
from gptmanager.config import OptionalParams
from gptmanager.errors import GptManagerError, ManagerDeadError, response_text
from gptmanager.host.callback_host import CallbackHost
from gptmanager.lifecycle.clock import perf_counter_ns
from gptmanager.lifecycle.log import logger
from gptmanager.lifecycle.state import Deposed, ManagerState, as_final
from gptmanager.lifecycle.watchdog import CallbackTimer, Hang, Watchdog, whereabouts
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.manager.inbox import Inbox
from gptmanager.manager.recovery import Recovery
from gptmanager.manager.stall_watch import Progress
from gptmanager.memory.heap import give_back
from gptmanager.recorder import Recorder, build_recorded_loop
from gptmanager.statistics import PhaseTimes

_STALL_S = 0.01  # nobody was scheduled: how soon to ask again
_SEND_S = 0.3  # a SendResponse that runs so long when the loop is given up hangs, too


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
        self._on_end = on_end
        self._recovery = Recovery(host, recorder, params.max_step_failures)
        self._turn = CallbackTimer("turn")  # of the loop; none while it rests
        self._thread: threading.Thread | None = None
        self._deputy: threading.Thread | None = None  # answers for it, since it hangs
        self.progress = Progress()
        self.loop: TokenLoop | None = None

    @property
    def is_here(self) -> bool:
        """The calling thread is one that calls the host's callbacks."""
        return threading.current_thread() in (self._thread, self._deputy)

    def whereabouts(self) -> str:
        """What the thread does now. From any thread."""
        thread = None if self._thread is None else self._thread.ident
        return whereabouts(self._host.timers.all, thread)

    def run(self, assemble: Callable[[], Assembly], booted: Future[None]) -> None:
        """From the start of the thread to its end; what `assemble` raises is raised by `booted`."""
        self._thread = threading.current_thread()
        try:
            self.loop = loop = self._build(assemble())
            self._host.timers.all.append(loop.scheduler_timer)
            watchdog = self._watch()
        except BaseException as error:  # noqa: B036 - raised in the constructor's line
            self.end_unborn(error)
            booted.set_exception(error)
            return
        self._lifecycle.move_to(ManagerState.RUNNING)
        booted.set_result(None)
        try:
            self._serve_to_the_end(loop)
        except Deposed:
            return  # the watchdog has done the rest
        if watchdog is not None:
            watchdog.stop()
        self._release()
        self._end()
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
        self._release()
        self._end()

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
            try:
                self._end_requests(loop, as_final(error))
            except Deposed:
                raise
            except BaseException:  # noqa: B036 - the end must come
                logger.exception("the last responses could not be made")
            self._tell_failure(error)
            self._lifecycle.leave(ManagerState.FAILED)

    def _serve(self, loop: TokenLoop) -> None:
        while True:
            self._turn.start()
            self._inbox.begin_turn()
            self._lifecycle.check()
            aborts = self._inbox.is_to_abort
            self._inbox.answer(loop)
            if aborts or self._inbox.is_to_end:
                self._host.is_accepting = False
                if aborts:
                    self._recorder.close("aborted")
                    self._end_requests(loop, ManagerDeadError("the manager was shut down"))
                if not (loop.holds_requests or self._host.holds_requests):
                    self._recorder.close()
                    return
                self._lifecycle.move_to(ManagerState.DRAINING)
            had_active, had_pending = bool(loop.active), loop.pending is not None
            try:
                worked = self._turn_once(loop)
            except Exception as error:
                self._recovery.recover(loop, error)
                continue
            self.progress.note(worked=worked, is_active=bool(loop.active))
            if worked and (had_pending or loop.pending is None):
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
        is_idle = not loop.holds_requests and loop.pending is None and self._host.is_accepting
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
        self._inbox.rest(seconds)  # woken for nothing, the loop only asks Get once more

    # The end ---------------------------------------------------------------------------------

    def _end_requests(self, loop: TokenLoop, error: GptManagerError) -> None:
        """A final error for each request, also for those that the loop has lost."""
        try:
            loop.abort(error)
        finally:
            self._host.answer_all(error)

    def _tell_failure(self, error: BaseException) -> None:
        logger.error("the token loop has failed", exc_info=error)
        try:
            self._recorder.fail(error)
        except Exception:
            self._recorder.close("failed")

    def _release(self) -> None:
        """Weights and pages go now, not when the host forgets the manager."""
        self._host.release()
        if self.loop is not None:
            self.loop.release()
        give_back()

    def _end(self) -> None:
        """Whoever waits learns of it."""
        self._host.is_accepting = False
        self._turn.abandon()
        self._lifecycle.ended.set()
        self._inbox.close()
        on_end, self._on_end = self._on_end, lambda: None  # whose it is, is free to go
        on_end()

    # A hang: on the watchdog's thread --------------------------------------------------------

    def _watch(self) -> Watchdog | None:
        params = self._params
        if params.callback_budget_s is None and params.step_budget_s is None:
            return None
        watchdog = Watchdog(
            self._host.timers.all,
            threading.get_ident(),
            budget_s=params.callback_budget_s,
            turn=self._turn,
            step_budget_s=params.step_budget_s,
            on_hang=self._on_hang,
        )
        watchdog.start()
        return watchdog

    def _on_hang(self, hang: Hang) -> bool:
        try:
            statistics = self._host.statistics.so_far()
        except Exception as error:  # the hang must end at any rate
            statistics = f"none: {response_text(error)}"
        if self._params.on_hang == "log":
            hang.tell(f"; statistics: {statistics}")
            return True
        self._give_up(hang, statistics)
        return False

    def _give_up(self, hang: Hang, statistics: str) -> None:
        """Answer for the loop's thread, which does nothing any more should it come back."""
        error = ManagerDeadError(hang.text)
        if not self._lifecycle.depose(error):
            return  # it ends at this moment
        self._deputy = threading.current_thread()
        self._host.is_accepting = False
        is_sent = self._host.answer_deposed(error, _SEND_S)
        self._end()
        self._inbox.refuse(error)
        hang.tell(f"; on_hang = 'fail': the manager has ended; statistics: {statistics}")
        if not is_sent:
            logger.error("SendResponse hangs itself: no final response can be sent before it ends")
        self._tell_failure(error)
        self._host.answer_deposed(error)
        if self._thread is not None:
            self._thread.join()  # what a Get that hung returns at last is answered, too
        self._host.answer_deposed(error)
        self._release()
        self._deputy = None
