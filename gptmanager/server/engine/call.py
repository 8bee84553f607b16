"""`Call`: the requests that serve one client's call, and how they end with it.

Knows when a request has waited too long, and that an adapter which has left the cache must be sent
again. Knows nothing of protocols.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from gptmanager import FinishReason
from gptmanager.callbacks import Generation, GenerationPart, GenerationResult
from gptmanager.callbacks.queue.generation import PartReader
from gptmanager.errors import AdapterError
from gptmanager.server.errors import ApiError, api_error


class EngineRequest:
    """One prompt and what to get for it. `by_name`: names and keywords of
    `InferenceRequest.from_tokens`, without the request id; `adapter`: the name of a loaded one.
    `is_scoring`: only the prompt is asked about; what is generated beyond it does not count.
    `is_ended_by_caller`: who asks may find an end that the engine does not know, and calls
    `Call.stop` for each end.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        max_new_tokens: int,
        *,
        adapter: str | None = None,
        is_scoring: bool = False,
        is_ended_by_caller: bool = False,
        **by_name: Any,
    ) -> None:
        self.tokens = tokens
        self.max_new_tokens = max_new_tokens
        self.adapter = adapter
        self.is_scoring = is_scoring
        self.is_ended_by_caller = is_ended_by_caller
        self.by_name = by_name


@dataclass(slots=True)
class _Running:
    """A request of a call. `send_again`: with the weights of its adapter; None: it has none."""

    generation: Generation
    reader: PartReader
    send_again: Callable[[], Generation] | None
    timer: asyncio.TimerHandle | None = None
    has_timed_out: bool = False


class Call:
    """Made by `Engine.submit`; its requests are queued already.

        async with engine.submit(requests) as call:
            async for index, part in call.parts():
                ...

    The end of the block cancels what still runs.
    """

    def __init__(
        self,
        generations: Sequence[Generation],
        send_again: Sequence[Callable[[], Generation] | None],
        timeouts_s: Sequence[float | None],
        cancel: Callable[..., None],
        on_end: Callable[[Call], None],
    ) -> None:
        self._running = [
            _Running(generation, PartReader(generation), again)
            for generation, again in zip(generations, send_again, strict=True)
        ]
        self._cancel = cancel  # for a finish reason, after some tokens: `ServerMetrics.cancel`
        self._on_end = on_end
        self._waiter = self._running[0].reader.waiter()
        loop = asyncio.get_running_loop()
        for it, timeout_s in zip(self._running, timeouts_s, strict=True):
            if timeout_s is not None:
                it.timer = loop.call_later(timeout_s, self._time_out, it)

    async def __aenter__(self) -> Call:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for it in self._running:
            if it.timer is not None:
                it.timer.cancel()
        self.cancel()
        for it in self._running:
            self._cancel(it.generation, None)  # nobody decides any more how it ended
        self._on_end(self)

    def parts(self) -> AsyncGenerator[tuple[int, GenerationPart], None]:
        """(index of the request, part), as they come. The last part of each has its result.

        A request that was stopped by `--request-timeout`, or its own deadline, has finish reason
        TIMED_OUT. Raises ApiError for a request that fails.
        """
        return self._outcomes(raises=True)  # type: ignore[return-value]

    def outcomes(self) -> AsyncGenerator[tuple[int, GenerationPart | ApiError], None]:
        """Yield parts like `parts`; a request that fails yields its error, and the others go on."""
        return self._outcomes(raises=False)

    async def _outcomes(
        self, *, raises: bool
    ) -> AsyncGenerator[tuple[int, GenerationPart | ApiError], None]:
        running = dict(enumerate(self._running))
        while running:
            for index, it in list(running.items()):
                part = self._take(it)
                if part is None:
                    continue
                if isinstance(part, ApiError):
                    if raises:
                        raise part
                    del running[index]
                elif part.result is not None:
                    del running[index]
                    if it.has_timed_out:
                        part = part._replace(result=_timed_out(part.result))
                yield index, part
            if running:
                await self._waiter.wait()

    async def results(self) -> list[GenerationResult]:
        """All results, in the order of the requests. Raises ApiError: 504 past a deadline."""
        found: dict[int, GenerationResult] = {}
        async for index, part in self.parts():
            if part.result is not None:
                found[index] = part.result
                check_in_time(part.result)
        return [found[index] for index in range(len(self._running))]

    def stop(self, index: int, finish_reason: str = "stop", num_tokens: int | None = None) -> None:
        """The client has all of one request; it is ended, if it still runs: its text reaches a stop
        string. Its last part still comes. It counts as one that ended so, after `num_tokens`, and
        not as cancelled.
        """
        self._cancel(self._running[index].generation, finish_reason, num_tokens)

    def cancel(self) -> None:
        """End all that still runs; it counts as cancelled. The last parts still come."""
        for it in self._running:
            if not it.generation.done():
                self._cancel(it.generation, "cancelled")

    def time_out(self) -> None:
        """End all that still runs, as past a deadline."""
        for it in self._running:
            self._time_out(it)

    def _time_out(self, it: _Running) -> None:
        if not it.generation.done():
            it.has_timed_out = True
            self._cancel(it.generation, "timeout")

    def _take(self, it: _Running) -> GenerationPart | ApiError | None:
        try:
            return it.reader.take(self._waiter)
        except AdapterError as error:
            if it.send_again is None or it.has_timed_out:
                return api_error(error)
            return self._again(it, it.send_again)
        except Exception as error:
            return api_error(error)

    def _again(
        self, it: _Running, send_again: Callable[[], Generation]
    ) -> GenerationPart | ApiError | None:
        try:
            it.generation, it.send_again = send_again(), None
        except Exception as error:
            return api_error(error)
        it.reader = PartReader(it.generation)
        return it.reader.take(self._waiter)


def check_in_time(result: GenerationResult) -> None:
    """Raises ApiError 504 for one that a deadline has ended."""
    if FinishReason.TIMED_OUT in result.finish_reasons:
        raise ApiError(504, "the request was stopped: its time was over", code="timeout")


def _timed_out(result: GenerationResult) -> GenerationResult:
    """Its cancellation was ours."""
    reasons = tuple(
        FinishReason.TIMED_OUT if reason is FinishReason.CANCELLED else reason
        for reason in result.finish_reasons
    )
    return replace(result, finish_reasons=reasons)
