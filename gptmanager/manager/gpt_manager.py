"""`GptManager`: runs the token loop on a thread of its own."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from gptmanager.arguments import bounded
from gptmanager.assembly.assemble import assemble
from gptmanager.assembly.options import (
    check_arguments,
    checked_optional_params,
    checked_scheduler_config,
)
from gptmanager.assembly.ranks import connect, report_failed_start
from gptmanager.config import ModelType, OptionalParams, SchedulerConfig
from gptmanager.errors import quoted
from gptmanager.host.callback_host import CallbackHost
from gptmanager.host.ranked_host import callback_properties
from gptmanager.lifecycle.clock import monotonic
from gptmanager.lifecycle.latched_future import LatchedFuture
from gptmanager.lifecycle.state import ManagerState
from gptmanager.lifecycle.threads import start_thread
from gptmanager.manager.generation_control import GenerationControl
from gptmanager.manager.inbox import Inbox
from gptmanager.manager.watching import Watchers
from gptmanager.manager.worker import Worker
from gptmanager.ranks.world import find_world
from gptmanager.recorder import Recorder
from gptmanager.request.inference_request import (
    GetInferenceRequestsCallback,
    PollStopSignalCallback,
    ReturnBatchManagerStatsCallback,
    SendResponseCallback,
)

_T = TypeVar("_T")

_EXIT_S = 5.0  # how long the interpreter, when it exits, waits for a loop to end
_HANG_S = 0.3  # after an abort, `shutdown` does not wait for a callback that runs longer than this
_STEP_GRACE_S = 5.0  # after an abort, `shutdown` waits this long for the running step to end


class GptManager(GenerationControl):
    """Serves requests through four callbacks, from a worker thread that runs the token loop.

    `model_path` is a Hugging Face checkpoint folder, a GGUF file, an object that implements
    `Model`, or a pair (config dict, state dict). The constructor returns when the model is loaded
    and the loop runs. It raises ConfigError for an invalid checkpoint or option.

    The callbacks run on the worker thread, outside any lock, possibly before the constructor has
    returned. If the worker thread hangs and `on_hang` is "fail", the watchdog's thread calls
    `send_response_cb` instead. `get_inference_requests_cb(max_num_requests)`, called Get below,
    must not block.

    Use a `with` block or call `shutdown`. At the end of the block the manager drains; if the block
    raises, it aborts. Without a block or `shutdown`, a manager that is garbage-collected aborts
    with a ResourceWarning. If callbacks refer to their manager, it is not collected while the loop
    runs.
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
        with _reporting_to_ranks(optional_params):
            params = checked_optional_params(
                OptionalParams() if optional_params is None else optional_params
            )
            config = checked_scheduler_config(
                SchedulerConfig() if scheduler_config is None else scheduler_config
            )
            check_arguments(model_type, max_beam_width, params, config)
            world = find_world(params.parallel_config)
            callbacks: Sequence[Any] = (
                *(get_inference_requests_cb, send_response_cb),
                *(poll_stop_signal_cb, return_batch_manager_stats_cb),
            )
            # the thread must not refer to this object, because dropping the manager ends the loop
            self._inbox, self._watchers = Inbox(), Watchers()
            self._host = CallbackHost(
                *callbacks, max_get_failures=params.max_get_failures, wake=self._inbox.wake
            )
            self._params, self._process = params, os.getpid()
            self._lifecycle = self._host.lifecycle
            self._recorder = Recorder(
                params.recording_path if world.layout.rank == 0 else None,
                keep=params.black_box_iterations,
                max_bytes=params.black_box_bytes,
                black_box_path=params.black_box_path,
            )
            self._worker = Worker(params, self._host, self._inbox, self._recorder)
        properties = callback_properties(get_inference_requests_cb, poll_stop_signal_cb)
        own = world, params, properties, self._inbox.wake
        assembling = functools.partial(
            assemble,
            *(model_path, params, config, model_type, max_beam_width),
            *(self._host.timers.processor, functools.partial(connect, *own)),
        )
        booted: LatchedFuture[None] = LatchedFuture()
        run, name = functools.partial(self._worker.run, assembling, booted), "gptmanager-loop"
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        own_thread, process = weakref.ref(self._thread), self._process
        self._at_exit = functools.partial(_end_at_exit, weakref.ref(self), own_thread, process)
        atexit.register(self._at_exit)
        try:
            start_thread(self._thread)
            booted.result()
        except BaseException as error:
            self._worker.fail_start(error)
            self.shutdown(drain=False)
            raise

    # Life cycle, from any thread -----------------------------------------------------------

    @property
    def state(self) -> ManagerState:
        """The state; STOPPED or FAILED in a forked process, where the loop does not run."""
        if self._is_forked and self._lifecycle.state is not ManagerState.FAILED:
            return ManagerState.STOPPED
        return self._lifecycle.state

    @property
    def exception(self) -> BaseException | None:
        """The error that ended the loop; None unless the state is FAILED."""
        return self._lifecycle.exception

    @property
    def recording_error(self) -> str:
        """The reason why the file of `recording_path` is incomplete, or "" if it is complete."""
        return self._recorder.error

    def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """Stop calling Get, and end the loop. Idempotent.

        With `drain` the accepted requests run to their end. Without `drain`, or after `timeout`
        seconds, each request gets one final error. `shutdown` returns when the loop has ended. If
        the timeout has passed, `shutdown` waits at most five more seconds for the running step, and
        does not wait for a callback that hangs. `shutdown` returns at once in a callback, and does
        nothing in a forked process.
        """
        timeout = bounded(timeout)  # a wrong value must not end the loop
        self._inbox.ask_to_end(aborts=not drain)
        if self._is_elsewhere or self.wait(timeout):
            return
        self._inbox.ask_to_end(aborts=True)
        give_up = monotonic() + _STEP_GRACE_S
        while not self.wait(_HANG_S / 2) and monotonic() < give_up:
            if any(timer.running_s > _HANG_S for timer in self._host.timers.all):
                return

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the loop has ended. Return False if it still runs after `timeout` seconds.

        Return False at once in a callback, and True at once in a forked process.
        """
        if self._is_forked:
            return True
        if self._is_elsewhere or not self._lifecycle.ended.wait(bounded(timeout)):
            return False
        if not (self._lifecycle.is_abandoned or self._thread.ident is None):
            # The thread is on its last line. `join` alone would not suffice, because an interrupted
            # `join` marks a running thread as ended.
            with suppress(RuntimeError):  # an interrupted constructor may still start it
                self._thread.join(_HANG_S)
        # else the thread hangs, or was never started
        atexit.unregister(self._at_exit)
        return True

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait for an iteration that has no active requests, and in which Get returns nothing.

        Only iterations that begin after this call count. Return False after `timeout` seconds, or
        in a callback. Return True if the manager has stopped. Raise ManagerDeadError if the manager
        has failed, or in a forked process.
        """
        self._raise_if_forked()
        if self._is_elsewhere:
            return False
        if self._inbox.wait_idle(bounded(timeout)):
            return True
        self._raise_if_failed()
        return self._lifecycle.ended.is_set

    def clear_cached(self) -> None:
        """Clear the cached blocks, before the next step.

        Requests that Get returns from now on reuse no blocks of earlier requests, not even blocks
        that running requests compute later. Call this after you have replaced weights in place. If
        the model has `weights` with a `version`, a new version clears the cached blocks, too. Raise
        ManagerDeadError as `notify` does.
        """
        self._raise_if_forked()
        self._host.cache_invalidation.clear()
        self.notify()

    def forget_adapter(self, task_id: int) -> None:
        """Forget the LoRA adapter of `lora_task_id` = `task_id`, for example to replace it.

        The next request with this id must pass the adapter's weights again, and may pass other
        weights. Running requests continue with the old weights. An id without a cached adapter is
        ignored. Raise ValueError for an invalid id, and ManagerDeadError as `notify` does.
        """
        if isinstance(task_id, bool) or not isinstance(task_id, int) or not 0 <= task_id < 2**64:
            raise ValueError(f"task_id = {quoted(task_id)} must be an integer in 0..2**64-1")
        self._raise_if_forked()
        self._host.adapter_loader.forget(task_id)
        self.notify()

    def __reduce__(self) -> Any:
        raise TypeError("a GptManager cannot be pickled or copied: it has a thread of this process")

    def __del__(self, _is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """End the loop, with an error for each request, because no code can use the manager now."""
        if _is_exiting():  # `_at_exit` has ended the loop, and modules may have lost their names
            return
        is_made = hasattr(self, "_thread")  # False if the constructor has raised
        if not is_made or self._is_forked:
            return
        if self._lifecycle.ended.is_set:
            if not self._thread.is_alive():
                atexit.unregister(self._at_exit)
            return
        self._inbox.ask_to_end(aborts=True)  # without waiting, because this may run in any thread
        warnings.warn(
            f"unclosed {self!r}: call shutdown(), or use it in a `with` block",
            ResourceWarning,
            source=self,
            stacklevel=2,
        )

    def __enter__(self) -> GptManager:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self.shutdown(drain=exc_type is None)


def before_steps(manager: GptManager, callback: Callable[[bool], None]) -> None:
    """Add a callback to the manager's `StepSignal`. Only the package `callbacks` may use this."""
    manager._worker.steps.callbacks.append(callback)


def _end_at_exit(
    manager: weakref.ref[GptManager], thread: weakref.ref[threading.Thread], process: int
) -> None:
    """End the manager. If it was garbage-collected, wait for the end of its thread.

    A thread that frees a tensor while the interpreter exits would abort the process.
    """
    if os.getpid() != process:
        return
    running, own_thread = manager(), thread()
    if running is not None:
        running.shutdown(drain=False, timeout=_EXIT_S)
    elif own_thread is not None and own_thread is not threading.current_thread():
        own_thread.join(_EXIT_S)


@contextmanager
def _reporting_to_ranks(params: OptionalParams | None) -> Iterator[None]:
    """Report an error of the block to the other ranks, which would otherwise wait for this rank."""
    try:
        yield
    except Exception as error:
        config = getattr(params, "parallel_config", None)
        if config is not None:
            report_failed_start(functools.partial(find_world, config), error)
        raise
