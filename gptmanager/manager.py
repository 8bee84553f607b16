"""`GptManager`: a thread and a life around the token loop."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
from collections import deque
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
from gptmanager.config import ModelType, OptionalParams, SchedulerConfig
from gptmanager.config_check import checked_optional_params, checked_scheduler_config
from gptmanager.errors import ManagerDeadError, response_text
from gptmanager.host import CallbackHost
from gptmanager.inspection import AuditReport, Explanation, Fit, audit, explain, would_fit
from gptmanager.life import NEXT_MANAGER_STATES, Health, ManagerState, as_final
from gptmanager.loop import TokenLoop
from gptmanager.progress import Progress
from gptmanager.recorder import Recorder
from gptmanager.watchdog import Watchdog

logger = logging.getLogger("gptmanager")

_T = TypeVar("_T")

_STALL_S = 0.01  # nobody was scheduled, or Get failed: how soon to ask again
_HANG_S = 0.3  # a callback that runs so long after an abort is not waited for
_STEP_GRACE_S = 5.0  # longer than a step takes


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
        self._condition = threading.Condition()
        # guarded by the condition:
        self._state = ManagerState.STARTING
        self._exception: BaseException | None = None
        self._shutdown: str | None = None  # None, "drain" or "abort"
        self._woken = False
        self._questions: deque[tuple[Callable[[TokenLoop], Any], Future[Any]]] = deque()
        self._turn = 0  # turns of the loop begun
        self._idle_turn = 0  # the last turn that found nothing to do
        # written by the loop thread only:
        self._progress = Progress()
        self._loop: TokenLoop | None = None
        self._host.wake = self.notify
        self._ended = threading.Event()  # the loop thread's last act
        self._process = os.getpid()
        self._recorder = Recorder(
            params.recording_path,
            keep=params.black_box_iterations,
            black_box_path=params.black_box_path,
        )

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
        caller, and a step gets five more seconds to end. Called from a callback it only asks.
        """
        with self._condition:
            if self._shutdown != "abort":
                self._shutdown = "drain" if drain else "abort"
            self._wake()
        if self._is_elsewhere or self.wait(timeout):
            return
        with self._condition:
            self._shutdown = "abort"
            self._wake()
        give_up = time.monotonic() + _STEP_GRACE_S
        while not self.wait(_HANG_S / 2) and time.monotonic() < give_up:
            if any(timer.running_s > _HANG_S for timer in self._host.timers):
                return

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the loop has ended; False: it has not within `timeout` seconds."""
        if self._is_elsewhere or not self._ended.wait(_bounded(timeout)):
            return False
        self._thread.join(_HANG_S)  # it is on its last line; not the way to wait: an interrupted
        return True  # join leaves a thread that runs on marked as ended

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is active and a Get made after this call has returned nothing.

        False: not within `timeout` seconds, or called from a callback. Raises ManagerDeadError
        when the loop fails.
        """
        if threading.current_thread() is self._thread:
            return False
        self._raise_if_forked()
        with self._condition:
            turn = self._turn + 1
            self._wake()
            self._condition.wait_for(
                lambda: self._idle_turn >= turn or self._ended.is_set(), _bounded(timeout)
            )
            if self._idle_turn < turn:
                self._raise_if_failed()
            return self._idle_turn >= turn or self._ended.is_set()

    def notify(self) -> None:
        """Wake an idle loop: there may be something to get. Raises ManagerDeadError when dead."""
        with self._condition:
            self._raise_if_failed()
            self._wake()

    def clear_cached(self) -> None:
        """Forget what block reuse could find: requests that Get returns from now on find nothing
        that was computed before, nor is what runs now found when it ends.

        For weights that were replaced in place; a load into the model's own `weights` is noticed
        without it. Takes effect before the next step. Raises ManagerDeadError when dead.
        """
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

    # Questions, from any thread, answered between iterations -------------------------------

    def health(self) -> Health:
        """What the manager is doing; answered at once, even while a callback hangs."""
        num_active = 0 if self._loop is None else len(self._loop.active)
        alive = not self._ended.is_set() and os.getpid() == self._process
        return Health(
            alive=alive,
            progressing=alive and self._progress.is_progressing(num_active),
            accepting=alive and self._host.is_accepting,
            num_active=num_active,
            last_step_age_s=self._progress.last_step_age_s(),
            callbacks={timer.name: timer.snapshot() for timer in self._host.timers},
        )

    def audit(self) -> AuditReport:
        """The KV cache's ledger, proven; also after the end."""
        return self._ask(audit)

    def explain(self, request_id: int) -> Explanation:
        """Why a request waits, in numbers. Raises ManagerDeadError when the loop has failed."""
        with self._condition:
            self._raise_if_failed()
        return self._ask(lambda loop: explain(loop, request_id))

    def would_fit(self, request: InferenceRequest) -> Fit:
        """What admission would say of a request, and the blocks that its whole life needs."""
        return self._ask(lambda loop: would_fit(loop, request))

    def _ask(self, question: Callable[[TokenLoop], _T]) -> _T:
        self._raise_if_forked()
        answer: Future[_T] = Future()
        with self._condition:
            ask_directly = self._ended.is_set() or threading.current_thread() is self._thread
            if not ask_directly:
                self._questions.append((question, answer))
                self._wake()
        if ask_directly and self._loop is not None:
            return question(self._loop)
        return answer.result()

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
            loop.abort(as_final(error))
            self._tell_failure(error)
        finally:
            if watchdog is not None:
                watchdog.stop()
            self._end()

    def _serve(self, loop: TokenLoop) -> None:
        while True:
            with self._condition:
                self._turn += 1
                shutdown = self._shutdown
                self._woken = False
            self._answer_questions(loop)
            if shutdown is not None:
                self._host.is_accepting = False
                if shutdown == "abort":
                    self._recorder.close("aborted")
                    loop.abort(ManagerDeadError("the manager was shut down"))
                if not loop.active:
                    self._recorder.close()
                    return
                self._move_to(ManagerState.DRAINING)
            had_active = bool(loop.active)
            is_idle = not had_active and loop.pending is None and shutdown is None
            # an idle turn asks Get and no more: it comes a hundred times a second
            worked = False if is_idle and not self._host.peek(loop.max_active) else loop.iterate()
            self._progress.note(worked=worked, is_active=bool(loop.active))
            if self._host.fatal is not None:
                raise self._host.fatal
            # a final response may have made the host submit: then Get knows more than it said
            ended_some = had_active and not loop.active
            if not (worked or ended_some or self._host.last_fetch.num_requests):
                self._progress.warn_of_stall(loop)
                self._rest(loop)

    def _rest(self, loop: TokenLoop) -> None:
        """Sleep until somebody wakes the loop or it is time to ask Get again."""
        fetched = self._host.last_fetch
        seconds = self._params.idle_poll_s
        with self._condition:
            if not loop.active and fetched.is_empty:
                self._idle_turn = self._turn
                self._condition.notify_all()
            if loop.active or fetched.failed:
                seconds = _STALL_S
            if not self._woken:  # woken for nothing, the loop only asks Get once more
                self._condition.wait(seconds)

    def _answer_questions(self, loop: TokenLoop) -> None:
        while self._questions:
            question, answer = self._questions.popleft()
            try:
                answer.set_result(question(loop))
            except BaseException as error:  # noqa: B036 - raised in the asker's line
                answer.set_exception(error)

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
        with self._condition:
            self._host.is_accepting = False
            self._ended.set()
            self._condition.notify_all()
        if self._loop is not None:
            self._answer_questions(self._loop)

    def _move_to(self, state: ManagerState) -> None:
        with self._condition:
            if state is not self._state:
                if state not in NEXT_MANAGER_STATES[self._state]:
                    raise RuntimeError(f"{self._state} cannot become {state}")
                self._state = state

    @property
    def _is_elsewhere(self) -> bool:
        """This is a callback, or a forked process: there is nothing to wait for."""
        return threading.current_thread() is self._thread or os.getpid() != self._process

    def _wake(self) -> None:
        self._woken = True
        self._condition.notify_all()

    def _raise_if_failed(self) -> None:
        if self._state is ManagerState.FAILED:
            raise ManagerDeadError(
                f"the manager has failed: {response_text(self._exception or RuntimeError())}"
            ) from self._exception

    def _raise_if_forked(self) -> None:
        if os.getpid() != self._process:
            raise ManagerDeadError(f"the manager lives in process {self._process}, not in its fork")

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            self.shutdown(drain=False, timeout=5.0)


def _bounded(timeout: float | None) -> float | None:
    return None if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)
