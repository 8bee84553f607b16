"""`Generation`: the handle of a submitted request. A future, and a stream of new tokens.

Knows how to wait for responses, in threads and in event loops. Knows nothing of queues and of the
manager, except how to ask for a cancellation.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any

from gptmanager import InferenceRequest, NamedTensor
from gptmanager.callbacks.result import GenerationResult, ResponseCollector, error_of
from gptmanager.callbacks.wakeups import AsyncWaiter, AsyncWakeups


class Generation(concurrent.futures.Future[GenerationResult]):
    """A request that runs; returned by `RequestQueue.submit`.

    As a `concurrent.futures.Future`: `result(timeout)` returns a `GenerationResult`, or raises the
    error of the response, a class of `gptmanager.errors`. `concurrent.futures.wait` and
    `as_completed` work. A done callback runs on the manager's thread: it must be quick.

    As an iterable: the new tokens of the first beam, as ints. A request with `is_streaming=True`
    yields them one by one, any other request all at its end. Any number of threads and event loops
    may iterate; each sees every token. An error is raised after the tokens that came before it.

    In asyncio: `async for token in generation` and `await generation`, in any event loop. If a task
    that waits here is cancelled, the request is cancelled, as everywhere in asyncio. Use
    `asyncio.shield` if several tasks share the request.

    As a context manager: the end of the block cancels the request if it has not ended. So a stream
    costs nothing more when its reader leaves early.

    A cancelled request ends without an error: with the tokens it had, finish reason CANCELLED. So
    `cancelled()` is always False.
    """

    def __init__(
        self,
        request: InferenceRequest,
        cancel: Callable[[int], bool],
        wakeups: AsyncWakeups,
        *,
        exclude_input: bool = False,
    ) -> None:
        super().__init__()
        self.request = request
        self.request_id: int = request.request_id
        self._ask_to_cancel = cancel
        self._wakeups = wakeups
        self._responses = ResponseCollector(request, exclude_input=exclude_input)
        self._tokens: list[int] = []
        self._news = threading.Condition(threading.Lock())
        self._async_waiters: list[AsyncWaiter] = []

    def __repr__(self) -> str:
        state = "done" if self.done() else f"{len(self._tokens)} tokens so far"
        return f"Generation({self.request_id}, {state})"

    def cancel(self) -> bool:
        """Ask for an early end; False if the request has ended. Never waits.

        A request that the manager has not fetched ends at once.
        """
        return self._ask_to_cancel(self.request_id)

    # Reading --------------------------------------------------------------------------------

    def tokens(self, timeout: float | None = None) -> Iterator[int]:
        """The new tokens; concurrent.futures.TimeoutError if one takes over `timeout` seconds."""
        seen = 0
        while new := self._wait_for_tokens(seen, timeout):
            yield from new
            seen += len(new)
        self.result()  # raises the error, if there was one

    def __iter__(self) -> Iterator[int]:
        return self.tokens()

    async def __aiter__(self) -> AsyncIterator[int]:
        waiter = self._wakeups.waiter()
        seen = 0
        while new := await self._await_tokens(seen, waiter):
            for token in new:
                yield token
            seen += len(new)
        self.result()

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return asyncio.wrap_future(self).__await__()

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.done():
            self.cancel()

    def _wait_for_tokens(self, seen: int, timeout: float | None) -> list[int]:
        """The tokens after the first `seen`; an empty list at the end."""
        with self._news:
            while len(self._tokens) == seen and not self.done():
                if not self._news.wait(timeout):
                    raise concurrent.futures.TimeoutError(
                        f"request {self.request_id}: no new token in {timeout} s"
                    )
            return self._tokens[seen:]

    async def _await_tokens(self, seen: int, waiter: AsyncWaiter) -> list[int]:
        while True:
            with self._news:
                if len(self._tokens) > seen or self.done():
                    return self._tokens[seen:]
                self._async_waiters.append(waiter)
            try:
                await waiter.wait()
            except asyncio.CancelledError:
                with self._news:
                    if waiter in self._async_waiters:
                        self._async_waiters.remove(waiter)
                self.cancel()
                raise

    # For the queue alone --------------------------------------------------------------------

    def deliver(self, tensors: Iterable[NamedTensor], is_final: bool, error: str) -> None:
        """Take one response. Called by one thread at a time, with at most one final response."""
        if error:
            self.fail(error_of(error))
            return
        tokens: Iterable[int] = self._responses.add(tensors)
        if not is_final:
            self._publish(tokens)
            return
        result = self._responses.result()
        if not self.request.is_streaming:
            tokens = result.generated_ids[0] if result.generated_ids else ()
        # readers must find every token when they see that the future is done
        with self._news:
            self._tokens.extend(tokens)
        try:
            self.set_result(result)
        finally:
            self._publish(())

    def fail(self, error: BaseException) -> None:
        """End with `error`, which `result` and the iterators raise."""
        try:
            self.set_exception(error)
        finally:
            self._publish(())

    def _publish(self, tokens: Iterable[int]) -> None:
        with self._news:
            self._tokens.extend(tokens)
            waiters, self._async_waiters = self._async_waiters, []
            self._news.notify_all()
        for waiter in waiters:
            waiter.wake()
