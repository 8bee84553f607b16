"""`RequestQueue`: three of the four callbacks as a thread-safe bounded queue with futures.

The queue decides which request is fetched next, and which handle gets a response.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from tokenizers import Tokenizer

from gptmanager import GptManager, InferenceRequest, NamedTensor
from gptmanager.arguments import bounded, flag
from gptmanager.callbacks.queue.attachment import Attachment
from gptmanager.callbacks.queue.generation import Generation, fail_all
from gptmanager.callbacks.queue.output_texts import OutputTexts
from gptmanager.callbacks.queue.pending_requests import PendingRequests, Size
from gptmanager.callbacks.queue.result import cancelled_response
from gptmanager.callbacks.queue.wakeups import AsyncWakeups
from gptmanager.callbacks.text.checkpoint import TokenDefaults, checked_defaults
from gptmanager.errors import CallbackError, DuplicateRequestIdError, ManagerDeadError
from gptmanager.lifecycle.condition import Condition
from gptmanager.manager.gpt_manager import before_steps

_CLOSED = "the queue was closed before the request was answered"
_logger = logging.getLogger(__name__)
_Queue = TypeVar("_Queue", bound="RequestQueue")


class RequestQueue:
    """Accepts requests from any thread. A manager fetches, answers and stops them by callbacks.

        with RequestQueue() as queue, GptManager(
            folder, ModelType.INFLIGHT_FUSED_BATCHING, 1, SchedulerConfig(),
            queue.get_inference_requests, queue.send_response, queue.poll_stop_signal,
        ) as manager:
            queue.attach(manager)
            for token in queue.submit([1, 2, 3], 20, is_streaming=True):
                ...

    In the `with` statement the queue is the outer context manager. So the manager finishes its
    requests first, and then `close` ends the requests that the manager never fetched. After
    `attach` the queue also closes when the manager ends or dies, so no handle waits forever. One
    queue serves one manager.

    `max_pending` limits the number of requests that wait for the manager, `max_pending_tokens` the
    tokens of their prompts, and `max_pending_bytes` the bytes of their tensors. None means no
    limit. Requests with a higher priority are fetched first; requests of equal priority are fetched
    in the order of arrival. `default_end_id` (an id or several, see `TokenDefaults`) and
    `default_pad_id` are for requests that do not set these ids. Set `exclude_input_in_output` as in
    the manager's `OptionalParams`. `tokenizer` and `special_texts` (see `TextStream`) decode the
    output of requests with `stop`; a checkpoint folder is read at the first such request.
    """

    def __init__(
        self,
        *,
        max_pending: int | None = 1024,
        max_pending_tokens: int | None = None,
        max_pending_bytes: int | None = None,
        default_end_id: int | Sequence[int] | None = None,
        default_pad_id: int | None = None,
        exclude_input_in_output: bool = False,
        tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
        special_texts: Mapping[int, str] | None = None,
    ) -> None:
        limits = {"max_pending": max_pending, "max_pending_tokens": max_pending_tokens}
        limits["max_pending_bytes"] = max_pending_bytes
        self._defaults = checked_defaults(default_end_id, default_pad_id)
        self._exclude_input = flag("exclude_input_in_output", exclude_input_in_output)
        self._texts = OutputTexts(tokenizer, special_texts)
        self._wakeups = AsyncWakeups()
        # guards all fields below; reentrant, because a signal handler may take it again
        self._lock = threading.RLock()
        self._changed = Condition()  # notified when there may be room, and by `close`
        self._pending = PendingRequests(limits)
        self._open: dict[int, Generation | None] = {}  # None: reserved, not queued yet
        self._ending: set[Generation] = set()  # those of interrupted calls of `cancel` stay here
        self._stops: set[int] = set()
        self._ids = itertools.count(1)
        self._process = os.getpid()
        self._closed_by: BaseException | None = None
        self._attachment: Attachment | None = None
        self._loop_thread: int | None = None

    @classmethod
    def for_checkpoint(cls: type[_Queue], folder: str | os.PathLike[str], **options: Any) -> _Queue:
        """Create a queue with the end tokens, the pad token and the tokenizer of a checkpoint.

        `options` are arguments of `RequestQueue`. They take precedence over the checkpoint.
        """
        defaults = TokenDefaults.of_folder(folder)
        own = {"default_end_id": defaults.end_ids, "default_pad_id": defaults.pad_id}
        return cls(**{**own, "tokenizer": folder, **options})

    @property
    def num_pending(self) -> int:
        """Number of requests that the manager has not fetched."""
        return len(self._pending)

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens in the prompts of pending requests."""
        return self._pending.size.tokens

    @property
    def num_pending_bytes(self) -> int:
        """Number of bytes in the tensors of pending requests."""
        return self._pending.size.bytes

    @property
    def num_open(self) -> int:
        """Number of requests without a final response, including pending ones."""
        return len(self._open)

    # For the application, from any thread ---------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int] | InferenceRequest,
        max_new_tokens: int | None = None,
        *,
        stop: Sequence[str] | None = None,
        request_id: int | None = None,
        timeout: float | None = None,
        **by_name: Any,
    ) -> Generation:
        """Queue a request, and return its handle.

        `prompt` is a list of token ids, with the keywords of `InferenceRequest.from_tokens`, or a
        whole `InferenceRequest`. The queue sets its defaults on the request.

        If the queue is full, wait up to `timeout` seconds (None: forever), then raise `queue.Full`.
        On the manager's own thread, on which done callbacks run, the call never waits. In asyncio
        use `timeout=0`, or `asyncio.to_thread`. Without `request_id` the ids count from 1, so a
        repeated run has the same ids and the same seeds.

        `stop` has at most 64 stop strings of 1 to 4,096 characters. The output ends when its text,
        without the prompt, contains a stop string, however the text is split into tokens. The
        output's finish reason is then STOP_WORDS, its text is cut before the stop string, and its
        last token is the one that completes the stop string. With an empty list the text is only
        decoded. A request with several outputs runs until all of them have ended. Raise ConfigError
        if the queue has no `tokenizer`, and InvalidRequestError for an invalid `stop`.

        Raise DuplicateRequestIdError for the id of an open request, CapacityError for a request
        that alone exceeds `max_pending_tokens` or `max_pending_bytes`, and ManagerDeadError if the
        queue is closed. The handle raises errors of the request itself.
        """
        generation = self._take(prompt, max_new_tokens, request_id, by_name, stop)
        self._enqueue([generation], timeout)
        return generation

    def expect(
        self,
        prompt: Sequence[int] | InferenceRequest,
        max_new_tokens: int | None = None,
        *,
        stop: Sequence[str] | None = None,
        request_id: int | None = None,
        **by_name: Any,
    ) -> Generation:
        """Return the handle of a request that the manager already has, for example from a journal.

        Nothing is queued, so the limits of the queue do not apply. The arguments and errors are
        those of `submit`, except for `timeout` and the errors about limits.
        """
        generation = self._take(prompt, max_new_tokens, request_id, by_name, stop)
        with self._lock:
            if self._closed_by is not None:
                self._open.pop(generation.request_id, None)
                raise ManagerDeadError("the queue is closed") from self._closed_by
            self._open[generation.request_id] = generation
        return generation

    def cancel(self, request_id: int) -> bool:
        """End a request early, without waiting. Return False if the request is not open.

        A pending request ends at once, and the manager never sees it. A request that the manager
        has fetched ends at the next iteration. Both end without an error, with finish reason
        CANCELLED. In a forked process no request is open.
        """
        return self._cancel(self._open.get(request_id))

    def _cancel(self, generation: Generation | None) -> bool:
        """Do the same as `cancel`, for the request of a handle. Its id may have been reused."""
        if generation is None or self._is_forked:
            return False
        with self._lock:
            if self._open.get(generation.request_id) is not generation:
                return False
            self._ending.add(generation)
            pending = self._pending.take(generation.request_id)
            if pending is None:
                self._stops.add(generation.request_id)
            else:
                self._open.pop(generation.request_id, None)
        if pending is None:
            self._notify()
        else:
            self._changed.notify_all()
            self._deliver(generation, cancelled_response(pending), True, "")
        self._ending.discard(generation)
        return True

    def attach(self, manager: GptManager) -> None:
        """Wake `manager` at each submit, and close the queue when the manager has ended.

        Raise TypeError for an object without `notify` or `wait`, ValueError for a second manager.
        """
        with self._lock:
            if self._attachment is not None:
                raise ValueError("the queue is attached to a manager already")
            self._attachment = Attachment(manager, self.close)
            if isinstance(manager, GptManager):
                before_steps(manager, self._wakeups.begin_step)
        self._notify()

    def close(self, error: BaseException | None = None) -> None:
        """End all open handles with `error`, and refuse new requests.

        If stop strings have ended all outputs of a handle, the handle gets its result instead.
        Requests that still run in the manager are stopped. To let them finish, call
        `manager.shutdown()` first. Idempotent: the `error` of a second call is ignored. In a forked
        process this method does nothing.
        """
        if self._is_forked:
            return
        with self._lock:
            reason = self._closed_by = self._closed_by or error or ManagerDeadError(_CLOSED)
            opened = list(self._open.values())
            self._stops.update(set(self._open) - self._pending.clear())
        self._changed.notify_all()
        try:
            fail_all((*opened, *self._ending), reason)
        finally:  # a second call finds the handles that an interrupt has left
            with self._lock:
                left = [it for it in self._open.values() if it is not None and not it.done()]
                self._open = {it.request_id: it for it in left}
                self._ending = {it for it in self._ending if not it.done()}
            if self._attachment is not None:  # the watcher may be calling done callbacks
                self._attachment.join()

    def __enter__(self) -> RequestQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # For the manager, on its own thread -----------------------------------------------------

    def get_inference_requests(self, max_num_requests: int) -> list[InferenceRequest]:
        """Return the next requests: the GetInferenceRequests callback."""
        self._loop_thread = threading.get_ident()
        if not len(self._pending):  # without the lock, because this runs in every iteration
            return []
        with self._lock:
            count = len(self._pending) if max_num_requests < 0 else max_num_requests
            requests = self._pending.pop(count)
        self._changed.notify_all()
        return requests

    def send_response(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        """Pass a response to its handle: the SendResponse callback.

        A response to an id that is not open is ignored.
        """
        if is_final or error:
            with self._lock:
                generation = self._open.pop(request_id, None)
                self._stops.discard(request_id)
        else:
            generation = self._open.get(request_id)
        if generation is None:
            _logger.debug("response to request %d, which is not open, is ignored", request_id)
        else:
            self._deliver(generation, tensors, is_final, error)

    def poll_stop_signal(self) -> frozenset[int]:
        """Return the ids of the requests to stop: the PollStopSignal callback.

        Each id is returned until the final response of its request.
        """
        if not self._stops:
            return frozenset()
        with self._lock:
            return frozenset(self._stops)

    # Inside ---------------------------------------------------------------------------------

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a fork, in which no manager fetches or answers."""
        return os.getpid() != self._process

    def _take(
        self,
        prompt: Sequence[int] | InferenceRequest,
        max_new_tokens: int | None,
        request_id: int | None,
        by_name: dict[str, Any],
        stop: Sequence[str] | None = None,
    ) -> Generation:
        """Reserve the id of a new request, and return its handle. The request is not queued yet."""
        if isinstance(prompt, InferenceRequest):
            if max_new_tokens is not None or request_id is not None or by_name:
                raise TypeError("submit() of an InferenceRequest accepts only `stop` and `timeout`")
            request_id = prompt.request_id
        elif max_new_tokens is None:
            raise TypeError("submit() of token ids needs max_new_tokens")
        taken_id = self._take_id(request_id)
        try:
            if isinstance(prompt, InferenceRequest):
                request = prompt
            else:
                length = cast(int, max_new_tokens)
                request = InferenceRequest.from_tokens(taken_id, prompt, length, **by_name)
            self._defaults.fill(request)
            return Generation(
                request,
                self._cancel,
                self._wakeups,
                exclude_input=self._exclude_input,
                new_text=self._texts.of_request(request, stop),
            )
        except BaseException:
            self._release([taken_id])
            raise

    def _take_id(self, request_id: int | None) -> int:
        if self._is_forked:
            raise ManagerDeadError(f"the queue works in process {self._process}, not in its fork")
        with self._lock:
            if request_id is None:
                request_id = next(i for i in self._ids if i not in self._open)
            elif request_id in self._open:
                raise DuplicateRequestIdError(f"request_id = {request_id} is in use: pass another")
            self._open[request_id] = None
            return request_id

    def _release(self, request_ids: Iterable[int]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._pending.take(request_id)  # queued before an exception interrupted `_push`
                self._open.pop(request_id, None)
        self._changed.notify_all()

    def _enqueue(self, generations: Sequence[Generation], timeout: float | None) -> None:
        """Queue all generations, or raise an error, queue none of them, and release their ids."""
        try:
            self._push(generations, bounded(timeout))
        except BaseException:
            self._release(generation.request_id for generation in generations)
            raise
        self._notify()

    def _push(self, generations: Sequence[Generation], timeout: float | None) -> None:
        if threading.get_ident() == self._loop_thread:
            timeout = 0.0  # only this thread fetches requests
        size = Size.sum(Size.of(generation.request) for generation in generations)

        def is_pushed() -> bool:
            with self._lock:
                if self._closed_by is not None:
                    raise ManagerDeadError("the queue is closed") from self._closed_by
                if self._pending.excess(size):
                    return False
                for generation in generations:
                    self._open[generation.request_id] = generation
                    self._pending.push(generation.sent_request)
                return True

        if not self._changed.wait_for(is_pushed, timeout):
            raise queue.Full(self._pending.excess(size))

    def _deliver(
        self, generation: Generation, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        try:
            generation.deliver(tensors, is_final, error)
        except Exception as malformed:
            # if this were raised, the manager would end the request, but the handle would not end
            with self._lock:
                if self._open.pop(generation.request_id, None) is not None:
                    self._stops.add(generation.request_id)
            if not generation.done():
                failure = CallbackError(f"the response cannot be read: {malformed!r}")
                failure.__cause__ = malformed
                generation.fail(failure)

    def _notify(self) -> None:
        if self._attachment is not None:
            self._attachment.notify()
