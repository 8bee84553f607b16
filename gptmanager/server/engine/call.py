"""`Call`: the engine requests of one client's call, which end together with the call.

A call ends its requests at their timeouts, and resends the weights of an adapter that the cache has
evicted. This module does not know protocols.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from gptmanager import FinishReason
from gptmanager.callbacks import Generation, GenerationPart, GenerationResult
from gptmanager.callbacks.queue.generation import ReadPosition
from gptmanager.errors import AdapterError
from gptmanager.server.errors import ApiError, api_error

_REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "timeout",
    FinishReason.CANCELLED: "cancelled",
}


class EngineRequest:
    """One prompt, and the options of its generation.

    `by_name` has the keyword arguments of `InferenceRequest.from_tokens`, without the request id.
    `adapter` is the name of a loaded adapter. With `is_scoring`, only the prompt's log
    probabilities are needed, and generated tokens do not count. With `is_ended_by_caller`, the
    caller also looks for ends that the engine does not know, and calls `Call.stop` at each.
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
    """A request of a call. `send_again` resubmits it, once, with the weights of its adapter."""

    generation: Generation
    position: ReadPosition
    send_again: Callable[[], Generation] | None
    timer: asyncio.TimerHandle | None = None
    has_timed_out: bool = False


class Call:
    """The requests of one `Engine.submit`, which are already queued.

        async with engine.submit(requests) as call:
            async for index, part in call.parts():
                ...

    The end of the block cancels requests that still run.
    """

    def __init__(
        self,
        generations: Sequence[Generation],
        send_again: Sequence[Callable[[], Generation] | None],
        timeouts_s: Sequence[float | None],
        cancel: Callable[..., None],
        on_end: Callable[[Call], None],
        num_prompt_tokens: int,
    ) -> None:
        self._running = [
            _Running(generation, ReadPosition(), again)
            for generation, again in zip(generations, send_again, strict=True)
        ]
        self._cancel = cancel  # for a finish reason, after some tokens: `ServerMetrics.cancel`
        self._on_end = on_end
        self._num_prompt_tokens = num_prompt_tokens
        self._num_generated = [0] * len(generations)
        self._results: list[GenerationResult] = []
        self._waiter = self._running[0].generation.waiter()
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
            self._cancel(it.generation, None)  # the metrics no longer wait for a finish reason
        self._on_end(self)

    def parts(self) -> AsyncGenerator[tuple[int, GenerationPart], None]:
        """Yield (index of the request, part) as parts arrive; the last part has the result.

        A request ended by `--request-timeout` or by its own deadline has finish reason TIMED_OUT.
        Raises ApiError for a request that fails.
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
                self._note(index, part)
                yield index, part
            if running:
                await self._waiter.wait()

    async def results(self) -> list[GenerationResult]:
        """Return all results, in the order of the requests. Raises ApiError (504) at a timeout."""
        found: dict[int, GenerationResult] = {}
        async for index, part in self.parts():
            if part.result is not None:
                found[index] = part.result
                check_in_time(part.result)
        return [found[index] for index in range(len(self._running))]

    def _note(self, index: int, part: GenerationPart | ApiError) -> None:
        if isinstance(part, ApiError):
            return
        self._num_generated[index] += len(part.tokens)
        if part.result is not None:
            self._num_generated[index] = sum(map(len, part.result.generated_ids))
            self._results.append(part.result)

    def log_fields(self) -> dict[str, Any]:
        """Return the fields of the requests for the log: tokens, times, and how they ended."""
        metrics = [result.metrics for result in self._results]
        reasons = [_REASONS[reason] for it in self._results for reason in it.finish_reasons]
        is_cut = len(self._results) < len(self._running)
        fields: dict[str, Any] = {
            "prompt_tokens": self._num_prompt_tokens,
            "cached_tokens": int(sum(it.get("cached_tokens", 0) for it in metrics)),
            "generated_tokens": sum(self._num_generated),
        }
        for name in ("queue_s", "first_token_s"):
            found = [it[name] for it in metrics if not math.isnan(it.get(name, math.nan))]
            fields |= {name: round(min(found), 4)} if found else {}
        finish = dict.fromkeys([*reasons, *(["cancelled"] if is_cut else [])])
        return {**fields, "finish": ",".join(finish)}

    def stop(self, index: int, finish_reason: str = "stop", num_tokens: int | None = None) -> None:
        """End one request early, because the caller has found its end, such as a stop string.

        Its last part still arrives. The metrics count it with `finish_reason`, after `num_tokens`
        tokens, and not as cancelled.
        """
        self._cancel(self._running[index].generation, finish_reason, num_tokens)

    def cancel(self) -> None:
        """Cancel all requests that still run. Their last parts still arrive."""
        for it in self._running:
            if not it.generation.done():
                self._cancel(it.generation, "cancelled")

    def time_out(self) -> None:
        """End all requests that still run with the finish reason of a timeout."""
        for it in self._running:
            self._time_out(it)

    def _time_out(self, it: _Running) -> None:
        if not it.generation.done():
            it.has_timed_out = True
            self._cancel(it.generation, "timeout")

    def _take(self, it: _Running) -> GenerationPart | ApiError | None:
        try:
            return it.generation.next_part(it.position, self._waiter)
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
        it.position = ReadPosition()
        return it.generation.next_part(it.position, self._waiter)


def check_in_time(result: GenerationResult) -> None:
    """Raise ApiError (504) for a result that timed out."""
    if FinishReason.TIMED_OUT in result.finish_reasons:
        raise ApiError(504, "the request timed out", code="timeout")


def _timed_out(result: GenerationResult) -> GenerationResult:
    """Return the result with TIMED_OUT in place of CANCELLED, because the timeout cancelled it."""
    reasons = tuple(
        FinishReason.TIMED_OUT if reason is FinishReason.CANCELLED else reason
        for reason in result.finish_reasons
    )
    return replace(result, finish_reasons=reasons)
