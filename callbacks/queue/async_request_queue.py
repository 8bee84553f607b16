"""`AsyncRequestQueue`: a `RequestQueue` for asyncio, in which tasks await room in the queue.

This class decides which task submits next when there is room, and cancels the request of a task
that is cancelled. `RequestQueue` does everything else.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from typing import Any

from gptmanager import InferenceRequest
from gptmanager.callbacks.queue.generation import Generation
from gptmanager.callbacks.queue.request_queue import RequestQueue
from gptmanager.callbacks.queue.result import GenerationResult
from gptmanager.callbacks.queue.wakeups import AsyncWaiter


class AsyncRequestQueue(RequestQueue):
    """Accepts requests from tasks of any event loop; a manager runs them through the callbacks.

        queue = AsyncRequestQueue.for_checkpoint(folder)
        ...
        async for tokens in queue.stream([1, 2, 3], 20):
            ...

    Tasks that find the queue full wait in the order of their arrival. A task that is cancelled, or
    that leaves a stream early, cancels its request. Threads may use the queue as a `RequestQueue`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._turns: deque[AsyncWaiter] = deque()  # one per task in `submit_async`, oldest first
        self._stopped: set[AsyncWaiter] = set()  # to be woken when their event loops start

    async def stream(
        self,
        prompt: Sequence[int] | InferenceRequest,
        max_new_tokens: int | None = None,
        **by_name: Any,
    ) -> AsyncIterator[list[int]]:
        """Yield lists of new tokens, usually of one token each.

        A list has several tokens if a step produced several, or if the reader was slow. The
        arguments are those of `submit`, without `timeout`. Raise the errors of `submit`, except
        `queue.Full`. If the request fails, raise its error after its last token.
        """
        if isinstance(prompt, InferenceRequest):
            prompt.is_streaming = True
        else:
            by_name["is_streaming"] = True
        with await self.submit_async(prompt, max_new_tokens, **by_name) as generation:
            async for part in generation.parts():
                if part.tokens:
                    yield part.tokens

    async def generate(
        self,
        prompt: Sequence[int] | InferenceRequest,
        max_new_tokens: int | None = None,
        **by_name: Any,
    ) -> GenerationResult:
        """Return the result after the request has ended. Arguments and errors: as for `stream`."""
        with await self.submit_async(prompt, max_new_tokens, **by_name) as generation:
            return await generation

    async def submit_async(
        self,
        prompt: Sequence[int] | InferenceRequest,
        max_new_tokens: int | None = None,
        **by_name: Any,
    ) -> Generation:
        """Submit a request as `submit` does. If the queue is full, wait; tasks keep their order."""
        stop, request_id = by_name.pop("stop", None), by_name.pop("request_id", None)
        if stop is not None:  # reading the tokenizer's file takes long
            await asyncio.to_thread(self._texts.load)
        turn = self._wakeups.waiter()  # raises outside asyncio, before an id is reserved
        generation = self._take(prompt, max_new_tokens, request_id, by_name, stop)
        with self._lock:
            self._turns.append(turn)  # before the first attempt: no wake-up is missed
        try:
            while not self._is_taken(generation, turn):
                await turn.wait()
        except BaseException:
            self._release([generation.request_id])
            raise
        finally:
            with self._lock, suppress(ValueError):  # the event loop may have been closed before
                self._turns.remove(turn)
            self._wake_first()
        self._notify()
        return generation

    def submit_all(self, requests: Sequence[InferenceRequest]) -> list[Generation]:
        """Queue all of `requests`, or none, without waiting.

        Raise `queue.Full` if the queue has no room for all of them. The other errors are those of
        `submit`.
        """
        generations: list[Generation] = []
        try:
            for request in requests:
                generations.append(self._take(request, None, None, {}))
        except BaseException:
            self._release(generation.request_id for generation in generations)
            raise
        if generations:
            self._enqueue(generations, 0.0)
        return generations

    def _cancel(self, generation: Generation | None) -> bool:
        found = super()._cancel(generation)
        self._wake_first()
        return found

    def _release(self, request_ids: Iterable[int]) -> None:
        super()._release(request_ids)
        self._wake_first()

    def close(self, error: BaseException | None = None) -> None:
        super().close(error)
        self._wake_first()  # the first task's `submit_async` raises, and wakes the next task

    def get_inference_requests(self, max_num_requests: int) -> list[InferenceRequest]:
        """Return the next requests: the GetInferenceRequests callback."""
        requests = super().get_inference_requests(max_num_requests)
        if requests:
            self._wake_first()
        return requests

    def _is_taken(self, generation: Generation, turn: AsyncWaiter) -> bool:
        with self._lock:
            self._stopped.discard(turn)
            first = next(other for other in self._turns if other.is_running)
        if first is not turn:
            return False
        try:
            self._push([generation], 0.0)
        except queue.Full:
            return False
        return True

    def _wake_first(self) -> None:
        """Wake the first task that waits for room, and those before it in stopped event loops.

        Tasks of closed event loops wait no longer.
        """
        with self._lock:
            for turn in tuple(self._turns):
                if turn.is_running:
                    turn.wake()
                    break
                if turn.is_abandoned:
                    self._turns.remove(turn)  # its task can be garbage-collected, and frees its id
                    self._stopped.discard(turn)
                elif turn not in self._stopped:
                    turn.wake()
                    self._stopped.add(turn)
