"""`GptManager`: a thread and a life around the token loop."""

from __future__ import annotations

import atexit
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from gptmanager.api import (
    GetInferenceRequestsCallback,
    InferenceRequest,
    PollStopSignalCallback,
    ReturnBatchManagerStatsCallback,
    SendResponseCallback,
)
from gptmanager.assembly import assemble, check_arguments
from gptmanager.clock import monotonic
from gptmanager.config import ModelType, OptionalParams, SchedulerConfig
from gptmanager.config_check import checked_optional_params, checked_scheduler_config
from gptmanager.errors import GptManagerError, ManagerDeadError, response_text
from gptmanager.host import CallbackHost
from gptmanager.inbox import Inbox
from gptmanager.inspection import AuditReport, Explanation, Fit, audit, explain, would_fit
from gptmanager.latch import Latch
from gptmanager.life import NEXT_MANAGER_STATES, Health, ManagerState, as_final
from gptmanager.log import logger
from gptmanager.loop import TokenLoop
from gptmanager.memory.heap import give_back
from gptmanager.progress import Progress
from gptmanager.recorder import Recorder
from gptmanager.recovery import Recovery
from gptmanager.watchdog import Watchdog

_T = TypeVar("_T")

_STALL_S = 0.01  # nobody was scheduled: how soon to ask again
_HANG_S = 0.3  # a callback that runs so long after an abort is not waited for
_STEP_GRACE_S = 5.0  # longer than a step takes
_ANSWER_S = 30.0  # how long a question waits for the end of an iteration


class GptManager:
    """Serves requests through four callbacks, from a worker thread that runs the token loop.

    `model_path`: a Hugging Face checkpoint folder, an object implementing `Model`, or a pair
    (config dict, state dict). Construction returns when the model is loaded and the loop runs;
    what is wrong with checkpoint or options raises ConfigError here.

    The callbacks run on the worker thread only, outside any lock, possibly before the constructor
    has returned. `get_inference_requests_cb(max_num_requests)` must not block.

    Leaving a `with` block normally drains, leaving it on an exception aborts.
    """

    def __init__(
        self,
        model_path: Any,
        model_type: ModelType,
        max_beam_width: int = 1,
        scheduler_config: SchedulerConfig | None = None,
        get_inference_requests_cb: GetInferenceRequestsCallback | None = None,
        send_response_cb: SendResponseCallback | None = None,
        poll_stop_signal_cb: PollStopSignalCallback | None = None,
        return_batch_manager_stats_cb: ReturnBatchManagerStatsCallback | None = None,
        optional_params: OptionalParams | None = None,
    ) -> None:
        params = checked_optional_params(
            OptionalParams() if optional_params is None else optional_params
        )
        config = checked_scheduler_config(
            SchedulerConfig() if scheduler_config is None else scheduler_config
        )
        check_arguments(model_type, max_beam_width, params, config)
        self._host = CallbackHost(
            get_inference_requests_cb,  # type: ignore[arg-type]  # None is refused there
            send_response_cb,  # type: ignore[arg-type]
            poll_stop_signal_cb,
            return_batch_manager_stats_cb,
            max_get_failures=params.max_get_failures,
        )
        self._params = params
        # set from any thread, never taken back:
        self._is_to_end = False
        self._is_to_abort = False
        # written by the loop thread only:
        self._state = ManagerState.STARTING
        self._exception: BaseException | None = None
        self._progress = Progress()
        self._loop: TokenLoop | None = None
        self._inbox = Inbox()
        self._host.wake = self.notify
        self._ended = Latch()  # the loop thread's last act
        self._process = os.getpid()
        self._recorder = Recorder(
            params.recording_path,
            keep=params.black_box_iterations,
            black_box_path=params.black_box_path,
        )
        self._recovery = Recovery(self._host, self._recorder, params.max_step_failures)

        build = functools.partial(
            assemble,
            *(model_path, params, config, model_type, max_beam_width),
            *(self._host, self._recorder),
        )
        booted: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run,
            args=(build, booted),
            name="gptmanager-loop",
            daemon=True,
        )
        atexit.register(self._at_exit)
        try:
            self._thread.start()
            booted.result()
        except BaseException:
            self.shutdown(drain=False)
            raise

    # Life, from any thread -----------------------------------------------------------------

    @property
    def state(self) -> ManagerState:
        """In a forked process STOPPED, or FAILED: the loop does not run there."""
        if self._is_forked and self._state is not ManagerState.FAILED:
            return ManagerState.STOPPED
        return self._state

    @property
    def exception(self) -> BaseException | None:
        """What ended the loop; None unless the state is FAILED."""
        return self._exception

    def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """End the loop; Get is not called any more. Idempotent.

        `drain` runs the accepted requests to their end; otherwise, or when `timeout` seconds have
        passed, each one gets one final error. Returns when the loop has ended, without a timeout
        at any rate; with one, a callback that does not return keeps its thread but not the
        caller, and a step gets five more seconds to end. Called from a callback it only asks, in
        a forked process it does nothing.
        """
        self._ask_to_end(aborts=not drain)
        if self._is_elsewhere or self.wait(timeout):
            return
        self._ask_to_end(aborts=True)
        give_up = monotonic() + _STEP_GRACE_S
        while not self.wait(_HANG_S / 2) and monotonic() < give_up:
            if any(timer.running_s > _HANG_S for timer in self._host.timers):
                return

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the loop has ended; False: it has not within `timeout` seconds.

        At once False in a callback, and True in a forked process.
        """
        if self._is_forked:
            return True
        if self._is_elsewhere or not self._ended.wait(_bounded(timeout)):
            return False
        self._thread.join(_HANG_S)  # it is on its last line; not the way to wait: an interrupted
        return True  # join leaves a thread that runs on marked as ended

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is active and a Get made after this call has returned nothing.

        False: not within `timeout` seconds, or called from a callback. Raises ManagerDeadError
        when the loop fails.
        """
        self._raise_if_forked()
        if self._is_elsewhere:
            return False
        if self._inbox.wait_idle(_bounded(timeout)):
            return True
        self._raise_if_failed()
        return self._ended.is_set

    def notify(self) -> None:
        """Wake an idle loop: there may be something to get. Raises ManagerDeadError when dead."""
        self._raise_if_forked()
        self._raise_if_failed()
        self._inbox.wake()

    def clear_cached(self) -> None:
        """Forget what block reuse could find: requests that Get returns from now on find nothing
        that was computed before, nor is what runs now found when it ends.

        For weights that were replaced in place; a load into the model's own `weights` is noticed
        without it. Takes effect before the next step. Raises ManagerDeadError when dead.
        """
        self._raise_if_forked()
        self._host.clear_cached()
        self.notify()

    def __enter__(self) -> GptManager:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown(drain=exc_type is None)

    # Questions, from any thread ------------------------------------------------------------

    def health(self) -> Health:
        """What the manager is doing; answered at once, even while a callback hangs."""
        num_active = 0 if self._loop is None else len(self._loop.active)
        alive = not (self._ended.is_set or self._is_forked)
        return Health(
            alive=alive,
            progressing=alive and self._progress.is_progressing(num_active),
            accepting=alive and self._host.is_accepting,
            num_active=num_active,
            last_step_age_s=self._progress.last_step_age_s(),
            callbacks={timer.name: timer.snapshot() for timer in self._host.timers},
        )

    def audit(self, timeout: float | None = _ANSWER_S) -> AuditReport:
        """The KV cache's ledger, proven; also after the end.

        Answered by the loop, between two iterations: raises TimeoutError, which says what the loop
        does meanwhile, when that takes more than `timeout` seconds. None: however long.
        """
        return self._ask("audit", audit, timeout)

    def explain(self, request_id: int, timeout: float | None = _ANSWER_S) -> Explanation:
        """Why a request waits, in numbers; answered as `audit` is.

        Raises ManagerDeadError when the loop has failed.
        """
        self._raise_if_failed()
        return self._ask("explain", lambda loop: explain(loop, request_id), timeout)

    def would_fit(self, request: InferenceRequest, timeout: float | None = _ANSWER_S) -> Fit:
        """What admission would say of a request, and the blocks that its whole life needs.

        Answered as `audit` is.
        """
        return self._ask("would_fit", lambda loop: would_fit(loop, request), timeout)

    def _ask(self, name: str, function: Callable[[TokenLoop], _T], timeout: float | None) -> _T:
        self._raise_if_forked()
        if self._is_elsewhere and self._loop is not None:
            return function(self._loop)
        question = self._inbox.ask(function)
        if self._ended.is_set and self._inbox.take_back(question):
            if self._loop is None:
                raise ManagerDeadError(f"{name}: the manager was never built")
            question.settle(self._loop)
        elif not question.wait(_bounded(timeout)):
            self._inbox.take_back(question)
            raise TimeoutError(
                f"{name}: no answer within timeout = {timeout:g} s; {self._standing()}"
            )
        return question.answer()

    def _standing(self) -> str:
        """Where the loop thread is."""
        running = [(timer.running_s, timer.name) for timer in self._host.timers]
        seconds, name = min((pair for pair in running if pair[0]), default=(0.0, ""))
        if name:
            return f"the loop stands in callback {name}, for {seconds:.1f} s"
        age = self._progress.last_step_age_s()
        ended = "has ended yet" if age is None else f"has ended for {age:.1f} s"
        return f"the loop is in an iteration, no step {ended}"

    # The worker thread ---------------------------------------------------------------------

    def _run(self, build: Callable[[], TokenLoop], booted: Future[None]) -> None:
        watchdog = None
        try:
            loop = self._loop = build()
            if self._params.callback_budget_s is not None:
                watchdog = Watchdog(
                    self._host.timers, self._params.callback_budget_s, threading.get_ident()
                )
                watchdog.start()
        except BaseException as error:  # noqa: B036 - raised in the constructor's line
            self._fail(error)
            self._end()
            booted.set_exception(error)
            return
        self._move_to(ManagerState.RUNNING)
        booted.set_result(None)
        try:
            self._serve(loop)
            self._move_to(ManagerState.STOPPED)
        except BaseException as error:  # noqa: B036 - kept as `exception`
            # nothing that may raise stands between the failure and the final responses
            self._fail(error)
            self._end_requests(loop, as_final(error))
            self._tell_failure(error)
        finally:
            if watchdog is not None:
                watchdog.stop()
            self._end()

    def _serve(self, loop: TokenLoop) -> None:
        while True:
            self._inbox.begin_turn()
            aborts = self._is_to_abort
            ends = aborts or self._is_to_end
            self._inbox.answer(loop)
            if ends:
                self._host.is_accepting = False
                if aborts:
                    self._recorder.close("aborted")
                    self._end_requests(loop, ManagerDeadError("the manager was shut down"))
                if not (loop.holds_requests or self._host.holds_requests):
                    self._recorder.close()
                    return
                self._move_to(ManagerState.DRAINING)
            had_active = bool(loop.active)
            try:
                worked = self._turn_once(loop)
            except Exception as error:
                self._recovery.recover(loop, error)
                continue
            self._progress.note(worked=worked, is_active=bool(loop.active))
            if worked:
                self._recovery.note_step()
            if self._host.fatal is not None:
                raise self._host.fatal
            # a final response may have made the host submit: then Get knows more than it said
            ended_some = had_active and not loop.active
            if not (worked or ended_some or self._host.last_fetch.num_requests):
                self._progress.warn_of_stall(loop)
                self._rest(loop)

    def _turn_once(self, loop: TokenLoop) -> bool:
        """An iteration; did it have a step?"""
        is_idle = not loop.holds_requests and loop.pending is None and self._host.is_accepting
        # an idle turn asks Get and no more: it comes a hundred times a second
        if is_idle and not self._host.peek(loop.max_active):
            return False
        return loop.iterate()

    def _end_requests(self, loop: TokenLoop, error: GptManagerError) -> None:
        """A final error for each request, also for those that the loop has lost."""
        try:
            loop.abort(error)
        finally:
            self._host.answer_all(error)

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
        self._inbox.rest(seconds)  # woken for nothing, the loop only asks Get once more

    def _fail(self, error: BaseException) -> None:
        self._host.is_accepting = False
        self._exception = error
        self._move_to(ManagerState.FAILED)

    def _tell_failure(self, error: BaseException) -> None:
        try:
            logger.error("the token loop has failed", exc_info=error)
            self._recorder.fail(error)
        except Exception:  # a log handler of the host's
            self._recorder.close("failed")

    def _end(self) -> None:
        """The loop thread's last act: whoever waits learns of it."""
        atexit.unregister(self._at_exit)
        self._host.release()
        if self._loop is not None:
            self._loop.release()
        give_back()
        self._host.is_accepting = False
        self._ended.set()
        self._inbox.close()
        if self._loop is not None:
            self._inbox.answer(self._loop)

    def _move_to(self, state: ManagerState) -> None:
        if state is not self._state:
            if state not in NEXT_MANAGER_STATES[self._state]:
                raise RuntimeError(f"{self._state} cannot become {state}")
            self._state = state

    def _ask_to_end(self, *, aborts: bool) -> None:
        if aborts:
            self._is_to_abort = True
        self._is_to_end = True
        self._inbox.wake()

    @property
    def _is_forked(self) -> bool:
        """This is a copy of the process, which has a copy of the manager, but no loop."""
        return os.getpid() != self._process

    @property
    def _is_elsewhere(self) -> bool:
        """This is a callback, or a forked process: there is nothing to wait for."""
        return threading.current_thread() is self._thread or self._is_forked

    def _raise_if_failed(self) -> None:
        if self._state is ManagerState.FAILED:
            raise ManagerDeadError(
                f"the manager has failed: {response_text(self._exception or RuntimeError())}"
            ) from self._exception

    def _raise_if_forked(self) -> None:
        if self._is_forked:
            raise ManagerDeadError(f"the manager lives in process {self._process}, not in its fork")

    def _at_exit(self) -> None:
        if not self._is_forked:
            self.shutdown(drain=False, timeout=5.0)


def _bounded(timeout: float | None) -> float | None:
    return None if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)
