"""`Call`: the engine requests of one client's call, which end together with the call.

A call ends its requests at their timeouts. If the cache has evicted a request's adapter, the call
sends the request again, with the adapter's weights. This module is independent of the clients'
protocols.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
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

FINISH_REASONS = {
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
    probabilities are needed, and the metrics do not count generated tokens. With
    `is_ended_by_caller`, the caller looks for ends that the engine does not know, such as stop
    strings. The caller calls `Call.stop` at every end, so that the metrics count the right reason.
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
class _Submitted:
    """A request of a call.

    `send_again` submits the request once more, with the weights of its adapter. It is None if the
    request has no adapter, or was sent again already; `refusal` is the error of that second
    attempt. `on_end` is the done callback of each generation. `is_over` means that the call has
    ended, and that another request may have the same id.
    """

    generation: Generation
    send_again: Callable[[], Generation] | None
    timer: asyncio.TimerHandle | None = None
    has_timed_out: bool = False
    is_over: bool = False
    refusal: ApiError | None = None
    on_end: Callable[[object], None] | None = None

    @property
    def lacks_adapter(self) -> bool:
        """Whether the request has failed for lack of its adapter, and may be sent again."""
        if self.send_again is None or self.has_timed_out or not self.generation.done():
            return False
        return isinstance(self.generation.exception(), AdapterError)

    @property
    def has_ended(self) -> bool:
        return self.generation.done() and not self.lacks_adapter

    @property
    def failure(self) -> ApiError | None:
        """The error of a request that has failed, otherwise None."""
        if not self.has_ended or self.refusal is not None:
            return self.refusal
        error = self.generation.exception()
        return None if error is None else api_error(error)

    @property
    def is_late(self) -> bool:
        """Whether a request that has ended without an error timed out."""
        result = self.with_timeout(self.generation.result())
        return FinishReason.TIMED_OUT in result.finish_reasons

    def with_timeout(self, result: GenerationResult) -> GenerationResult:
        """Return `result`, with TIMED_OUT in place of CANCELLED if the request has timed out."""
        if not self.has_timed_out:
            return result
        reasons = tuple(
            FinishReason.TIMED_OUT if reason is FinishReason.CANCELLED else reason
            for reason in result.finish_reasons
        )
        return replace(result, finish_reasons=reasons)

    def resend(self) -> None:
        """Send the request again, with the weights of its adapter."""
        assert self.send_again is not None
        send, self.send_again = self.send_again, None
        try:
            self.generation = send()
        except Exception as error:
            self.refusal = api_error(error)
            return
        if self.on_end is not None:
            self.generation.add_done_callback(self.on_end)


@dataclass(slots=True)
class _Reading:
    """The part of a request that a call has read: `generation` up to `position`."""

    request: _Submitted
    generation: Generation
    position: ReadPosition


class Call:
    """The requests of one `Engine.submit`, which are already queued.

        async with engine.submit(requests) as call:
            async for index, part in call.parts():
                ...

    The end of the block cancels the requests that still run. If the call `is_kept`, they go on for
    other readers instead, and `KeptCalls` calls `end`.
    """

    def __init__(
        self,
        generations: Sequence[Generation],
        send_again: Sequence[Callable[[], Generation] | None],
        timeouts_s: Sequence[float | None],
        cancel: Callable[..., None],
        on_end: Callable[[Call], None],
        num_prompt_tokens: int,
        *,
        is_kept: bool = False,
    ) -> None:
        self._submitted = [
            _Submitted(generation, again)
            for generation, again in zip(generations, send_again, strict=True)
        ]
        self._is_kept = is_kept
        self._cancel = cancel  # `ServerMetrics.cancel`
        self._on_end = on_end
        self._num_prompt_tokens = num_prompt_tokens
        self._begin_reading()
        loop = asyncio.get_running_loop()
        for it, timeout_s in zip(self._submitted, timeouts_s, strict=True):
            if timeout_s is not None:
                it.timer = loop.call_later(timeout_s, self._time_out, it)

    def _begin_reading(self) -> None:
        self._running = [_Reading(it, it.generation, ReadPosition()) for it in self._submitted]
        self._num_generated = [0] * len(self._submitted)
        self._results: list[GenerationResult] = []
        self._waiter = self._submitted[0].generation.waiter()

    def joined(self) -> Call:
        """Return another reader of the same requests, which begins at their first tokens."""
        call = copy.copy(self)
        call._begin_reading()
        return call

    @property
    def has_ended(self) -> bool:
        """Whether all requests have ended."""
        return all(it.has_ended for it in self._submitted)

    @property
    def failure(self) -> ApiError | None:
        """The error of the first request that has failed, or None."""
        return next((it.failure for it in self._submitted if it.failure is not None), None)

    @property
    def is_late(self) -> bool:
        """Whether a request of this call, which has ended without an error, timed out."""
        return any(it.is_late for it in self._submitted)

    def on_last_end(self, end: Callable[[], None]) -> None:
        """Let the event loop call `end` once, when all requests have ended.

        A request that lacks its adapter is sent again, even if no client reads it. If a request
        fails, the others are cancelled, because every reader gets the error.
        """
        loop, is_over = asyncio.get_running_loop(), False

        def check() -> None:
            nonlocal is_over
            for it in self._submitted:
                if it.lacks_adapter:
                    it.resend()
            if self.failure is not None:
                self.cancel()
            if self.has_ended and not is_over:
                is_over = True
                end()

        def tell(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(check)

        for it in self._submitted:
            it.on_end = tell
            it.generation.add_done_callback(tell)

    def end(self) -> None:
        """Cancel the requests that still run, stop the timers, and report the end of the call."""
        for it in self._submitted:
            if it.timer is not None:
                it.timer.cancel()
            if not it.generation.done():
                self._cancel(it.generation, "cancelled")
        for it in self._submitted:
            self._cancel(it.generation, None)  # the metrics stop waiting for a reason
            it.is_over = True
        self._on_end(self)

    async def __aenter__(self) -> Call:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._is_kept:
            self.end()

    def parts(self) -> AsyncGenerator[tuple[int, GenerationPart], None]:
        """Yield (index of the request, part) as parts arrive.

        The last part of a request has its result. A request that timed out has the finish reason
        TIMED_OUT. Raises ApiError for a request that fails.
        """
        return self._outcomes(raises=True)  # type: ignore[return-value]

    def outcomes(self) -> AsyncGenerator[tuple[int, GenerationPart | ApiError], None]:
        """Yield like `parts`, but an ApiError for a request that fails. Other requests go on."""
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
                    result = it.request.with_timeout(part.result)
                    is_cancelled = FinishReason.CANCELLED in result.finish_reasons
                    # the error that has cancelled the request is raised next
                    hides = raises and is_cancelled and self.failure is not None
                    part = part._replace(result=None if hides else result)
                self._note(index, part)
                yield index, part
            if running:
                await self._waiter.wait()

    def _note(self, index: int, part: GenerationPart | ApiError) -> None:
        if isinstance(part, ApiError):
            return
        self._num_generated[index] += len(part.tokens)
        if part.result is not None:
            self._num_generated[index] = sum(map(len, part.result.generated_ids))
            self._results.append(part.result)

    def log_fields(self) -> dict[str, Any]:
        """Return fields for the log: token counts, shortest times in seconds, and finish reasons.

        A request without a result adds only its prompt and output tokens, and "cancelled".
        """
        metrics = [result.metrics for result in self._results]
        reasons = [FINISH_REASONS[reason] for it in self._results for reason in it.finish_reasons]
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
        """End one request early, because the caller has found a stop string or another end.

        The request's last part still arrives. The metrics count the request with `finish_reason`
        and `num_tokens` tokens (None: all), and not as cancelled.
        """
        if not self._running[index].request.is_over:
            self._cancel(self._running[index].generation, finish_reason, num_tokens)

    def cancel(self) -> None:
        """Cancel all requests that still run. Their last parts still arrive."""
        for it in self._submitted:
            if not it.generation.done():
                self._cancel(it.generation, "cancelled")

    def time_out(self) -> None:
        """End all requests that still run, with the finish reason TIMED_OUT."""
        for it in self._submitted:
            self._time_out(it)

    def _time_out(self, it: _Submitted) -> None:
        if not it.generation.done():
            it.has_timed_out = True
            self._cancel(it.generation, "timeout")

    def _take(self, it: _Reading) -> GenerationPart | ApiError | None:
        request = it.request
        if it.generation is not request.generation:  # it was sent again
            it.generation, it.position = request.generation, ReadPosition()
        try:
            return it.generation.next_part(it.position, self._waiter)
        except Exception as error:
            if not request.lacks_adapter:
                return request.refusal or api_error(error)
        request.resend()
        return self._take(it)


def check_in_time(result: GenerationResult) -> None:
    """Raise ApiError (504) for a result that timed out."""
    if FinishReason.TIMED_OUT in result.finish_reasons:
        raise ApiError(504, "the request timed out", code="timeout")
