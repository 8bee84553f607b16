"""`LoopQuestions`: the questions about a manager's loop, which any thread may ask."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from gptmanager.arguments import at_least, bounded
from gptmanager.errors import ManagerDeadError, quoted, response_text
from gptmanager.host.callback_host import CallbackHost
from gptmanager.lifecycle.state import Health, Lifecycle, ManagerState
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.manager.inbox import Inbox
from gptmanager.manager.inspection import (
    AuditReport,
    Explanation,
    Fit,
    audit,
    explain,
    explain_waiting,
    would_fit,
)
from gptmanager.manager.watching import WatchCallback, Watchers
from gptmanager.manager.worker import Worker
from gptmanager.request.inference_request import InferenceRequest

_T = TypeVar("_T")

ANSWER_S = 30.0  # default limit of the wait for an answer


class LoopQuestions:
    """Asks the loop of a manager, which answers between two iterations."""

    _inbox: Inbox
    _watchers: Watchers
    _host: CallbackHost
    _process: int
    _lifecycle: Lifecycle
    _worker: Worker

    # Questions, from any thread ------------------------------------------------------------

    def health(self) -> Health:
        """Return the health of the manager at once, even while a callback hangs."""
        loop, stall_watch = self._worker.loop, self._worker.stall_watch
        num_active = 0 if loop is None else len(loop.active)
        alive = not (self._lifecycle.ended.is_set or self._is_forked)
        return Health(
            alive=alive,
            progressing=alive and stall_watch.is_progressing(num_active),
            accepting=alive and self._host.is_accepting,
            num_active=num_active,
            last_step_age_s=stall_watch.last_step_age_s(),
            callbacks={timer.name: timer.snapshot() for timer in self._host.timers.all},
            total_blocks=0 if loop is None else loop.allocator.kv_cache.get_max_resource_count(),
            free_blocks=0 if loop is None else loop.allocator.kv_cache.get_num_free_blocks(),
        )

    def audit(self, timeout: float | None = ANSWER_S) -> AuditReport:
        """Check the counts of the KV cache and of the LoRA cache, and return them.

        The loop answers between two iterations; a callback gets the answer at once, in the middle
        of an iteration. The call also works after the loop has ended. With `timeout` None, wait
        without a limit. Raise TimeoutError, which says what the loop is doing, if there is no
        answer within `timeout` seconds, and ManagerDeadError if the loop cannot answer.
        """
        return self._ask("audit", audit, timeout)

    def explain(self, request_id: int, timeout: float | None = ANSWER_S) -> Explanation:
        """Return why a request runs or waits, in numbers. The loop answers as for `audit`.

        Raise ManagerDeadError if the loop has failed.
        """
        self._raise_if_failed()
        return self._ask("explain", lambda loop: explain(loop, request_id), timeout)

    def explain_waiting(
        self, most: int = 256, timeout: float | None = ANSWER_S
    ) -> tuple[Explanation, ...]:
        """Explain the first `most` waiting requests, by priority, then arrival.

        The scheduler is asked once for all these requests.
        """
        at_least(0, "most", most)
        self._raise_if_failed()
        return self._ask("explain_waiting", lambda loop: explain_waiting(loop, most), timeout)

    def watch(self, see: WatchCallback, timeout: float | None = ANSWER_S) -> None:
        """Call `see` with each event from now on: requests that arrive, run and end.

        `see` is called on the loop's thread, first with a `Beginning` and an `Arrival` for each
        active request, then with each `Event` of `gptmanager.manager.watching`. The `append` of a
        bounded deque is a good choice. A second call with the same `see` begins the watch again,
        and events are still passed once. If `see` raises an error, it is not called again. If the
        error occurs in the first events, `watch` raises it; otherwise it is logged. Raise
        ConfigError if `see` is not an ordinary function, and raise the errors of `explain`.
        """
        self._raise_if_failed()
        self._ask("watch", lambda loop: self._watchers.add(loop, see), timeout)

    def unwatch(self, see: WatchCallback, timeout: float | None = ANSWER_S) -> None:
        """Stop calling `see`. Do nothing if `see` is not a watcher, or if the loop cannot answer.

        Raise TimeoutError as `audit` does. The loop then stops calling `see` when it answers again.
        """
        with contextlib.suppress(ManagerDeadError):
            remove = functools.partial(self._watchers.remove, see=see)
            self._ask("unwatch", remove, timeout, stays=True)

    def would_fit(self, request: InferenceRequest, timeout: float | None = ANSWER_S) -> Fit:
        """Return whether a request would be accepted and start now, and how many blocks it needs.

        A manager that was shut down accepts none. The loop answers as for `audit`. Raise
        ManagerDeadError if it has failed.
        """
        self._raise_if_failed()
        if not isinstance(request, InferenceRequest):
            raise TypeError(f"would_fit() needs an InferenceRequest, got {quoted(request)}")
        fit = self._ask("would_fit", lambda loop: would_fit(loop, request), timeout)
        if fit.accepted and not self._host.is_accepting:
            text = response_text(ManagerDeadError("the manager was shut down"))
            return replace(fit, accepted=False, text=text, starts_now=False, wait="")
        return fit

    def notify(self) -> None:
        """Wake an idle loop, so that it calls GetInferenceRequests.

        Raise ManagerDeadError if the manager has failed, or in a forked process.
        """
        self._raise_if_forked()
        self._raise_if_failed()
        self._inbox.wake()

    def _ask(
        self,
        name: str,
        function: Callable[[TokenLoop], _T],
        timeout: float | None,
        *,
        is_call: bool = False,
        stays: bool = False,
    ) -> _T:
        """Return the loop's answer. With `is_call`, all ranks make the call `name` together.

        A question that is not answered in time is dropped, unless it `stays`.
        """
        self._raise_if_forked()
        seconds = bounded(timeout)
        if self._is_elsewhere and self._worker.loop is not None:
            return function(self._asked(name))
        question = self._inbox.ask(function, name if is_call else "")
        if self._lifecycle.ended.is_set and self._inbox.take_back(question):
            question.settle(self._asked(name))
        elif not question.wait(seconds):
            if not stays:
                self._inbox.take_back(question)
            raise TimeoutError(
                f"{name}: no answer within timeout = {timeout:g} s; {self._worker.whereabouts()}"
            )
        return question.answer()

    # Inside -------------------------------------------------------------------------------

    def _asked(self, name: str) -> TokenLoop:
        """Return the loop, so that the calling thread can answer the question `name` itself."""
        loop = self._worker.loop
        if loop is None or self._lifecycle.is_abandoned:
            raise ManagerDeadError(
                f"{name}: the loop cannot answer, because it was never built or hangs"
            ) from self._lifecycle.exception
        return loop

    @property
    def _is_forked(self) -> bool:
        """Whether this is a forked process, which has a copy of the manager but no loop."""
        return os.getpid() != self._process

    @property
    def _is_elsewhere(self) -> bool:
        """Whether this is a callback or a forked process, which must not wait for the loop."""
        return self._worker.is_here or self._is_forked

    def _raise_if_failed(self) -> None:
        if self._lifecycle.state is ManagerState.FAILED:
            error = self._lifecycle.exception
            text = response_text(error or RuntimeError())
            raise ManagerDeadError(f"the manager has failed: {text}") from error

    def _raise_if_forked(self) -> None:
        if self._is_forked:
            raise ManagerDeadError(f"the manager runs in process {self._process}, not in this fork")
