"""`Generation`: the handle of a submitted request, both a future and a stream of new tokens.

A `GenerationPart` is a piece of the stream: its tokens, text and other response tensors. Threads
and event loops can wait for responses.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import os
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from gptmanager import InferenceRequest, NamedTensor
from gptmanager.arguments import bounded
from gptmanager.callbacks.queue.result import (
    GenerationResult,
    ResponseCollector,
    cancelled_response,
    error_of,
)
from gptmanager.callbacks.queue.wakeups import AsyncWaiter, AsyncWakeups
from gptmanager.callbacks.text.stopped_text import StoppedText
from gptmanager.errors import ManagerDeadError
from gptmanager.lifecycle.condition import Condition
from gptmanager.lifecycle.latched_future import LatchedFuture, raise_first

_Item = TypeVar("_Item", int, str)


class GenerationPart(NamedTuple):
    """The responses since the last part: one response, or several if the reader was slow.

    `tokens` has the new tokens of the first beam. `tensors` has the other response tensors by name;
    the tensors of several responses are joined. `result` is None except in the last part. `text` is
    the new text of the first beam, or "" if the request was submitted without `stop`.
    """

    tokens: list[int]
    tensors: dict[str, torch.Tensor]
    result: GenerationResult | None = None
    text: str = ""


@dataclass(slots=True)
class ReadPosition:
    """The numbers of tokens, pieces of text and tensors that a reader got from `next_part`.

    `num_tensors` is by tensor name. `is_at_end` is set when the reader has the result or the error.
    """

    num_tokens: int = 0
    num_pieces: int = 0
    num_tensors: dict[str, int] = field(default_factory=dict)
    is_at_end: bool = False


class Generation(LatchedFuture[GenerationResult]):
    """The handle of a request, returned by `RequestQueue.submit`.

    The handle is a `concurrent.futures.Future`: `result(timeout)` returns a `GenerationResult`, or
    raises the error of the response, a class of `gptmanager.errors`. `concurrent.futures.wait` and
    `as_completed` work. A done callback must be quick, because it runs on the thread that ends the
    request. This is usually the manager's thread, but may be a thread that calls `cancel` or closes
    the queue.

    Iterating over the handle yields the new tokens of the first beam, as ints. A request with
    `is_streaming=True` yields each token as it is generated; any other request yields all tokens at
    its end. Any number of threads and event loops may iterate, and each gets every token. An error
    is raised after the tokens that precede it.

    If the request was submitted with `stop`, the text can also be read, by `text` and in `parts`.
    The tokens end with the token that completes a stop string. The text ends before the stop
    string.

    `async for token in generation` and `await generation` work in any asyncio event loop. If a task
    is cancelled while it waits for the handle, the request is cancelled, as is usual in asyncio.
    Use `asyncio.shield` if several tasks share the request.

    At the end of a `with` block, the handle cancels the request if it has not ended. So a stream
    stops using the manager when its reader leaves early.

    A cancelled request ends without an error: its result has the tokens generated so far, and the
    finish reason CANCELLED. So `cancelled()` is always False.
    """

    def __init__(
        self,
        request: InferenceRequest,
        cancel: Callable[[Generation], bool],
        wakeups: AsyncWakeups,
        *,
        exclude_input: bool = False,
        new_text: Callable[[], StoppedText] | None = None,
    ) -> None:
        super().__init__()
        self.request = request
        self.request_id: int = request.request_id
        self.sent_request = request  # the request that the manager fetches
        if new_text is not None and not request.is_streaming and _has_one_output(request):
            # so that a stop string is found while the request runs
            self.sent_request = copy.copy(request)
            self.sent_request.is_streaming = True
        self._process = os.getpid()
        self._ask_to_cancel = cancel
        self._wakeups = wakeups
        self._has_text = new_text is not None
        self._responses = ResponseCollector(
            self.sent_request, exclude_input=exclude_input, new_text=new_text
        )
        self._tokens: list[int] = []
        self._pieces: list[str] = []  # text that `StoppedText` has released
        # guards the fields below; reentrant, because a signal handler may take it again
        self._lock = threading.RLock()
        self._news = Condition()
        self._async_waiters: list[AsyncWaiter] = []
        self._is_ending = False  # all tokens are set; the result is set next
        self._has_ended = False  # the result or the error is set

    def __reduce__(self) -> Any:
        raise TypeError(
            f"the handle of request {self.request_id} cannot be pickled or copied: a manager of "
            "this process answers it; pickle its result()"
        )

    def __repr__(self) -> str:
        state = "done" if self.done() else f"{len(self._tokens)} tokens so far"
        return f"Generation({self.request_id}, {state})"

    def cancel(self) -> bool:
        """Ask for an early end of the request, without waiting. Return False if it has ended.

        A request that the manager has not fetched yet ends at once.
        """
        return self._ask_to_cancel(self)

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Return the result of the request, or raise its error. Wait at most `timeout` seconds.

        Raise ManagerDeadError in a forked process, where no manager answers.
        """
        self._check_process()
        return super().result(bounded(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check_process()
        return super().exception(bounded(timeout))

    def _check_process(self) -> None:
        """Raise ManagerDeadError in a forked process, unless the request had ended before."""
        if os.getpid() == self._process:
            return
        if not self._has_ended:
            raise ManagerDeadError(
                f"request {self.request_id} is answered in process {self._process}, not in its fork"
            )
        self._lock = threading.RLock()  # other threads may have held the locks at the fork
        self.renew_lock()
        self._process = os.getpid()

    # Reading --------------------------------------------------------------------------------

    def tokens(self, timeout: float | None = None) -> Iterator[int]:
        """Yield the new tokens of the first beam.

        Raise concurrent.futures.TimeoutError if no new token arrives within `timeout` seconds.
        """
        return self._read(self._tokens, bounded(timeout), "token")

    def text(self, timeout: float | None = None) -> Iterator[str]:
        """Yield the text of the first beam, up to its stop string, in pieces.

        Text is held back while it may be the beginning of a stop string or of a character. Raise
        concurrent.futures.TimeoutError if no new text arrives within `timeout` seconds, and
        ValueError if the request was submitted without `stop`.
        """
        if not self._has_text:
            raise ValueError(f"request {self.request_id} was submitted without `stop`: no text")
        return self._read(self._pieces, bounded(timeout), "text")

    def __iter__(self) -> Iterator[int]:
        return self.tokens()

    async def __aiter__(self) -> AsyncIterator[int]:
        async for part in self.parts():
            for token in part.tokens:
                yield token

    async def parts(self) -> AsyncIterator[GenerationPart]:
        """Yield the responses as parts. The last part has the result.

        A request without `is_streaming` has one part. If the request fails, its error is raised
        after the parts with the tokens that precede it. If there are several readers, each of them
        gets all tokens.
        """
        self._check_process()
        waiter, position = self.waiter(), ReadPosition()
        try:
            while not position.is_at_end:
                part = self.next_part(position, waiter)
                if part is not None:
                    yield part
                if not position.is_at_end:
                    await waiter.wait()
        except asyncio.CancelledError:
            self._forget(waiter)
            self.cancel()
            raise

    def waiter(self) -> AsyncWaiter:
        """Return a waiter of the running event loop, to be passed to `next_part`.

        One waiter can wait for several generations of the same queue.
        """
        return self._wakeups.waiter()

    def next_part(
        self, position: ReadPosition, waiter: AsyncWaiter | None = None
    ) -> GenerationPart | None:
        """Return the part after `position`, and advance `position`; None if there is nothing new.

        This method never waits: `waiter` is woken when there is more, so that a caller can wait for
        several generations at once. Raise the error of the request after the last part.
        """
        self._check_process()
        with self._lock:
            if not (self._has_ended or waiter is None or waiter in self._async_waiters):
                self._async_waiters.append(waiter)  # before reading: no wake-up is missed
            done = self._has_ended
            tokens = self._tokens[position.num_tokens :]
            if not done and (not tokens or self._is_ending):
                return None
            position.num_tokens += len(tokens)
            text = "".join(self._pieces[position.num_pieces :])
            position.num_pieces = len(self._pieces)
            tensors = self._responses.new_tensors(position.num_tensors)
        if not done:
            return GenerationPart(tokens, tensors, text=text)
        if tokens and self.exception() is not None:  # the next call raises the error
            if waiter is not None:
                waiter.wake()
            return GenerationPart(tokens, tensors, text=text)
        position.is_at_end = True
        return GenerationPart(tokens, tensors, self.result(), text)

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        self._check_process()
        return asyncio.wrap_future(self).__await__()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.done():
            self.cancel()

    def _read(self, items: list[_Item], timeout: float | None, noun: str) -> Iterator[_Item]:
        seen = 0
        while new := self._wait_for(items, seen, timeout, noun):
            yield from new
            seen += len(new)
        self.result()  # raises the error, if there was one

    def _wait_for(
        self, items: list[_Item], seen: int, timeout: float | None, noun: str
    ) -> list[_Item]:
        """Wait for items after the first `seen` ones. Return them, or an empty list at the end."""
        if len(items) == seen:
            self._check_process()
        if not self._news.wait_for(lambda: len(items) > seen or self.done(), timeout):
            raise concurrent.futures.TimeoutError(
                f"request {self.request_id}: no new {noun} in {timeout} s"
            )
        return items[seen:]

    def _forget(self, waiter: AsyncWaiter) -> None:
        with self._lock:
            if waiter in self._async_waiters:
                self._async_waiters.remove(waiter)

    # Only for the queue ---------------------------------------------------------------------

    def deliver(self, tensors: Iterable[NamedTensor], is_final: bool, error: str) -> None:
        """Add one response. The final response, or one with an error, ends the request.

        Only one thread at a time may call this method.
        """
        if error:
            self.fail(error_of(error))
            return
        if not is_final:
            with self._lock:
                was_stopped = self._responses.is_stopped
                tokens: Sequence[int] = self._responses.add(tensors)
                if self.request.is_streaming:
                    self._publish(tokens)
                    self._wake_readers(may_wait=True)
                stops_now = self._responses.is_stopped and not was_stopped
            if stops_now:
                self.cancel()  # the final response follows, with the metrics
            return
        with self._lock:
            tokens = self._responses.add(tensors)
            result = self._responses.result()
            if not self.request.is_streaming:
                tokens = result.generated_ids[0] if result.generated_ids else ()
            # readers must find every token when they see that the future is done
            self._publish(tokens)
            self._is_ending = True
        self._end(lambda: self.set_result(result))

    def fail(self, error: BaseException) -> None:
        """End the request with `error`, which `result` and the iterators raise.

        If stop strings have ended all outputs, end with a result instead of the error. Only metrics
        are missing in this result.
        """
        with self._lock:
            is_complete = self._responses.is_stopped
        if is_complete:
            self.deliver(cancelled_response(self.request)[2:], True, "")
        else:
            self._end(lambda: self.set_exception(error))

    def _publish(self, tokens: Sequence[int]) -> None:
        """Make these tokens and the released text visible to readers. The caller holds the lock."""
        self._tokens.extend(tokens)
        if self._has_text:
            self._pieces.extend(self._responses.text_pieces[len(self._pieces) :])

    def _end(self, settle: Callable[[], None]) -> None:
        try:
            with suppress(concurrent.futures.InvalidStateError):  # an interrupted call has ended it
                settle()
        finally:
            with self._lock:
                self._has_ended = self.done()
                self._wake_readers()

    def _wake_readers(self, *, may_wait: bool = False) -> None:
        """Wake all readers. The caller holds the lock. `may_wait`: see `AsyncWaiter.wake`."""
        self._news.notify_all()
        if self._async_waiters:
            for waiter in self._async_waiters:
                waiter.wake(may_wait=may_wait)
            self._async_waiters.clear()
        if not may_wait:
            self._wakeups.send()  # the wakeups for earlier tokens may still wait to be sent


def fail_all(generations: Iterable[Generation | None], error: BaseException) -> None:
    """Set `error` for all handles that have not ended.

    If done callbacks raise BaseExceptions, the first of them is raised at the end.
    """
    interrupts: list[BaseException] = []
    for generation in generations:
        if generation is not None and not generation.done():
            try:
                generation.fail(error)
            except BaseException as raised:  # noqa: B036 - raised below
                interrupts.append(raised)
    raise_first(interrupts)


def _has_one_output(request: InferenceRequest) -> bool:
    """Return whether a request has one beam and returns one sequence."""
    for name in ("beam_width", "num_return_sequences"):
        value: Any = request.tensors.get(name, 1)
        if (value.tolist() if hasattr(value, "tolist") else value) not in (1, [1], [[1]]):
            return False
    return True
