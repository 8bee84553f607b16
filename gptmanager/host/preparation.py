"""`Preparation`: prepares logits post-processors before their requests start.

It decides when a request stops waiting for its processor. A processor's `prepare` and the future
that it returns are code of the host, so an error in them ends only that request.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any

from gptmanager.errors import CallbackError, ManagerDeadError, RequestError, response_text
from gptmanager.lifecycle.callables import check_answer
from gptmanager.lifecycle.log import logger
from gptmanager.lifecycle.watchdog import CallbackTimer
from gptmanager.request.inference_request import InferenceRequest
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.step import Failure

_MOST_KEPT = 64  # with fewer entries in `_preparing`, those of ended requests are kept


class Preparation:
    """Prepares the processors of waiting requests.

    `wake` ends the pause of an idle loop; any thread may call it. `prepared` has the results that
    `collect` has not read yet. `ready` has the ids of requests with a ready processor. `failures`
    has the requests with a processor that cannot be prepared. Both lists are for the next intake.
    """

    def __init__(self, wake: Callable[[], None], timer: CallbackTimer) -> None:
        self._wake = wake
        self._preparing: dict[int, RequestProcessor] = {}  # may include ended requests
        self._most_kept = _MOST_KEPT
        # any thread may append
        self.prepared: deque[tuple[int, RequestProcessor, Future[Any]]] = deque()
        self.ready: list[int] = []
        self.failures: list[Failure] = []
        self.device = "cpu"  # the device on which post-processors run
        self._timer = timer

    def begin(self, request_id: int, processor: RequestProcessor) -> None:
        """Begin to prepare the processor of a request; `collect` later reads the result."""
        if len(self._preparing) >= self._most_kept:
            self._forget_ended()
        self._preparing[request_id] = processor
        try:
            future = self._called(processor.post_processor.prepare)
            # a future that is already done calls back immediately
            future.add_done_callback(_OnReady(self._wake_with, request_id, processor))
        except BaseException as raised:  # noqa: B036 - the loop outlives any callback
            del self._preparing[request_id]
            self._fail_to_prepare(request_id, processor, raised)

    def _forget_ended(self) -> None:
        """Drop entries of ended requests, because some processors never become ready."""
        waiting = {i: p for i, p in self._preparing.items() if p.post_processor is not None}
        self._preparing, self._most_kept = waiting, max(_MOST_KEPT, 2 * len(waiting))

    def release(self) -> None:
        """Stop waking the loop, because it has ended."""
        self._wake = lambda: None

    def _wake_with(self, request_id: int, processor: RequestProcessor, done: Future[Any]) -> None:
        self.prepared.append((request_id, processor, done))
        with suppress(ManagerDeadError):
            self._wake()

    def collect(self, received: Iterable[InferenceRequest]) -> None:
        """Update `ready` and `failures`.

        `received` are new requests, with processors that may be ready already. No other request may
        have the id of one of them: it would be unclear which of them is ready.
        """
        self.ready += [r.request_id for r in received if self._is_ready(r.logits_post_processor)]
        while self.prepared:
            request_id, processor, done = self.prepared.popleft()
            if self._preparing.get(request_id) is not processor:
                continue  # the request has ended; a new request may have its id
            del self._preparing[request_id]
            if processor.post_processor is None:
                continue  # the same: the new request may be in `received`
            error = _error_of(done)
            if error is None:
                self.ready.append(request_id)
            else:
                self._fail_to_prepare(request_id, processor, error)

    def _fail_to_prepare(
        self, request_id: int, processor: RequestProcessor, error: BaseException
    ) -> None:
        if isinstance(error, RequestError):
            self.failures.append(Failure(request_id, error))
            return
        name = processor.name
        text = f"logits_post_processor {name} cannot be prepared: {response_text(error)}"
        self.failures.append(Failure(request_id, CallbackError(text)))
        text = "logits_post_processor %s of request %d cannot be prepared"
        logger.error(text, name, request_id, exc_info=error)

    def _is_ready(self, processor: Any) -> bool:
        """Return whether a processor is ready now.

        After an error the result is False, because `prepare` is called again later.
        """
        try:
            prepare = getattr(processor, "prepare", None)
            if not callable(prepare):
                return False
            future = self._called(prepare)
            return bool(future.done()) and _error_of(future) is None
        except BaseException:  # noqa: B036 - a host's code
            return False

    def _called(self, prepare: Callable[[str], Future[Any]]) -> Future[Any]:
        self._timer.start()
        try:
            future = prepare(self.device)
            check_answer("prepare", future)
            return future
        finally:
            self._timer.stop()


def _error_of(done: Future[Any]) -> BaseException | None:
    """Return the error of a future that is done; None if it succeeded."""
    try:
        return CancelledError() if done.cancelled() else done.exception()
    except BaseException as error:  # noqa: B036 - a host's future
        return error


class _OnReady:
    """Reports that a processor's future is done, and drops the references to the processor.

    A future keeps its callbacks alive.
    """

    def __init__(self, report: Callable[..., None], *arguments: Any) -> None:
        self._call = [functools.partial(report, *arguments)]

    def __call__(self, done: Future[Any]) -> None:
        self._call.pop()(done)
