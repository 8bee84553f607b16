"""`GptManager`: a thread and a life around the token loop."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from enum import Enum
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
from gptmanager.config import (
    ModelType,
    OptionalParams,
    SchedulerConfig,
    checked_optional_params,
    checked_scheduler_config,
)
from gptmanager.errors import GptManagerError, ManagerDeadError, response_text
from gptmanager.host import CallbackHost
from gptmanager.inspection import AuditReport, Explanation, Fit, audit, explain, would_fit
from gptmanager.loop import TokenLoop
from gptmanager.watchdog import CallbackLatency, Watchdog

logger = logging.getLogger("gptmanager")

_T = TypeVar("_T")

_STALL_S = 0.01  # active requests, none of which was scheduled: how soon to ask again


class ManagerState(Enum):
    """Life of a manager."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


NEXT_MANAGER_STATES: dict[ManagerState, frozenset[ManagerState]] = {
    ManagerState.STARTING: frozenset(
        {ManagerState.RUNNING, ManagerState.STOPPED, ManagerState.FAILED}
    ),
    ManagerState.RUNNING: frozenset(
        {ManagerState.DRAINING, ManagerState.STOPPED, ManagerState.FAILED}
    ),
    ManagerState.DRAINING: frozenset({ManagerState.STOPPED, ManagerState.FAILED}),
    ManagerState.STOPPED: frozenset(),
    ManagerState.FAILED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Health:
    """`alive`: the loop thread runs. `progressing`: nothing is active, or the last step is less
    than ten seconds old. `last_step_age_s`: seconds since the last step ended, None: none yet.
    `accepting`: Get is being called. `callbacks`: latency by callback name.
    """

    alive: bool
    progressing: bool
    accepting: bool
    num_active: int
    last_step_age_s: float | None
    callbacks: dict[str, CallbackLatency]


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
        params = checked_optional_params(optional_params or OptionalParams())
        config = checked_scheduler_config(scheduler_config or SchedulerConfig())
        check_arguments(model_type, max_beam_width, params)
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
        self._num_active = 0
        self._last_step: float | None = None
        self._loop: TokenLoop

        booted: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run,
            args=(model_path, config, booted),
            name="gptmanager-loop",
            daemon=True,
        )
        atexit.register(self._at_exit)
        self._thread.start()
        try:
            _wait_for(booted)
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
        """End the loop; Get is not called any more. Idempotent; returns when the loop has ended.

        `drain` runs the accepted requests to their end; otherwise, or when `timeout` seconds have
        passed, each one gets one final error. A callback that never returns keeps its thread:
        with a timeout this returns all the same. Called from a callback it only asks.
        """
        with self._condition:
            if self._shutdown != "abort":
                self._shutdown = "drain" if drain else "abort"
            self._wake()
        if threading.current_thread() is self._thread:
            return
        if not self.wait(timeout):
            with self._condition:
                self._shutdown = "abort"
                self._wake()
            self.wait(0.4 if timeout is not None else None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the loop has ended; False: it has not within `timeout` seconds."""
        if threading.current_thread() is self._thread:
            return False
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is active and a Get made after this call has returned nothing.

        False: not within `timeout` seconds, or called from a callback. Raises ManagerDeadError
        when the loop fails.
        """
        if threading.current_thread() is self._thread:
            return False
        with self._condition:
            turn = self._turn + 1
            self._wake()
            self._condition.wait_for(lambda: self._idle_turn >= turn or self._has_ended, timeout)
            if self._idle_turn < turn:
                self._raise_if_failed()
            return self._idle_turn >= turn or self._has_ended

    def notify(self) -> None:
        """Wake an idle loop: there may be something to get. Raises ManagerDeadError when dead."""
        with self._condition:
            self._raise_if_failed()
            self._wake()

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
        last_step, num_active = self._last_step, self._num_active
        age = None if last_step is None else time.monotonic() - last_step
        alive = self._thread.is_alive()
        return Health(
            alive=alive,
            progressing=alive and (num_active == 0 or age is None or age < 10.0),
            accepting=alive and self._host.is_accepting,
            num_active=num_active,
            last_step_age_s=age,
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
        answer: Future[_T] = Future()
        with self._condition:
            ask_directly = self._has_ended or threading.current_thread() is self._thread
            if not ask_directly:
                self._questions.append((question, answer))
                self._wake()
        return question(self._loop) if ask_directly else _wait_for(answer)

    # The worker thread ---------------------------------------------------------------------

    def _run(self, source: Any, config: SchedulerConfig, booted: Future[None]) -> None:
        watchdog = None
        try:
            self._loop = assemble(source, self._params, config, self._host)
            budget_s = self._params.callback_budget_s
            if budget_s is not None:
                watchdog = Watchdog(self._host.timers, budget_s, threading.get_ident())
                watchdog.start()
        except BaseException as error:  # noqa: B036 - raised in the constructor's line
            atexit.unregister(self._at_exit)
            self._end(ManagerState.FAILED, error)
            booted.set_exception(error)
            return
        self._move_to(ManagerState.RUNNING)
        booted.set_result(None)
        try:
            self._serve(self._loop)
        except BaseException as error:  # noqa: B036 - kept as `exception`
            logger.exception("the token loop has failed")
            self._loop.abort(_as_final(error))
            self._end(ManagerState.FAILED, error)
        else:
            self._end(ManagerState.STOPPED, None)
        finally:
            if watchdog is not None:
                watchdog.stop()
            atexit.unregister(self._at_exit)

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
                    loop.abort(ManagerDeadError("the manager was shut down"))
                if not loop.active:
                    return
                self._move_to(ManagerState.DRAINING)
            worked = loop.iterate()
            self._num_active = len(loop.active)
            if worked:
                self._last_step = time.monotonic()
            if self._host.fatal is not None:
                raise self._host.fatal
            if not worked and not self._host.num_fetched:
                self._rest(is_idle=not loop.active and self._host.has_no_more)

    def _rest(self, is_idle: bool) -> None:
        """Sleep until somebody wakes the loop or it is time to ask Get again."""
        idle_poll_s = self._params.idle_poll_s
        with self._condition:
            if is_idle:
                self._idle_turn = self._turn
                self._condition.notify_all()
            if self._num_active:
                self._condition.wait_for(lambda: self._woken, _STALL_S)
            else:
                self._condition.wait_for(lambda: self._woken, idle_poll_s)

    def _answer_questions(self, loop: TokenLoop) -> None:
        while self._questions:
            question, answer = self._questions.popleft()
            try:
                answer.set_result(question(loop))
            except BaseException as error:  # noqa: B036 - raised in the asker's line
                answer.set_exception(error)

    def _end(self, state: ManagerState, error: BaseException | None) -> None:
        with self._condition:
            self._exception = error
            self._host.is_accepting = False
            self._num_active = 0
            self._move_to(state)
            self._condition.notify_all()
        if hasattr(self, "_loop"):
            self._answer_questions(self._loop)

    def _move_to(self, state: ManagerState) -> None:
        with self._condition:
            if state is not self._state:
                if state not in NEXT_MANAGER_STATES[self._state]:
                    raise RuntimeError(f"{self._state} cannot become {state}")
                self._state = state

    @property
    def _has_ended(self) -> bool:
        return self._state in (ManagerState.STOPPED, ManagerState.FAILED)

    def _wake(self) -> None:
        self._woken = True
        self._condition.notify_all()

    def _raise_if_failed(self) -> None:
        if self._state is ManagerState.FAILED:
            raise ManagerDeadError(
                f"the manager has failed: {response_text(self._exception or RuntimeError())}"
            ) from self._exception

    def _at_exit(self) -> None:
        self.shutdown(drain=False, timeout=5.0)


def _as_final(error: BaseException) -> GptManagerError:
    """The error that every active request gets when the loop has failed."""
    if isinstance(error, GptManagerError):
        return error
    return ManagerDeadError(
        f"Encountered an error in forwardAsync function: {response_text(error)}"
    )


def _wait_for(future: Future[_T]) -> _T:
    """The result of a future that the loop thread fulfils; a Ctrl-C gets through meanwhile."""
    while True:
        try:
            return future.result(timeout=0.25)
        except FutureTimeoutError:
            if future.done():
                raise
