"""`JsonAnswer`: the JSON of one request's answer, in one piece or as a stream of chunks.

Completions and chats share this class. An `AnswerFormat` writes the fields in which they differ.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from gptmanager.environment.distribution import VERSION
from gptmanager.server.errors import ApiError
from gptmanager.server.http.body import start_stream, until_disconnected
from gptmanager.server.http.request_log import RECORD
from gptmanager.server.http.responses import (
    COMMENT,
    DONE,
    EventStream,
    error_frame,
    event,
    json_response,
)
from gptmanager.server.http.warning_header import Warnings
from gptmanager.server.text.answer import Answer
from gptmanager.server.text.outputs import Delta


class AnswerFormat(Protocol):
    """A writer of an answer's choices and of its usage."""

    def add(self, index: int, delta: Delta) -> None:
        """Add the next delta of an output to the whole answer."""

    async def whole(self) -> dict[str, Any]:
        """Return the fields of the whole answer, made from the added deltas."""

    async def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return the fields of the chunks for the next delta of an output."""

    def usage(self) -> dict[str, Any]:
        """Return the object `usage`, with the numbers of tokens so far."""


class JsonAnswer:
    """The answer of a completion or a chat: common fields, and the fields that `form` writes.

    `head`: the first fields of the answer and of each chunk.
    """

    keep_alive = COMMENT

    def __init__(
        self, given: Mapping[str, Any], answer: Answer, form: AnswerFormat, head: Mapping[str, Any]
    ) -> None:
        self._given = given
        self._answer = answer
        self._form = form
        self._head = head

    def log_fields(self) -> dict[str, Any]:
        """Return the fields of the log line that describe the answer so far."""
        return {
            "answer": self._head["id"],
            "model": self._head["model"],
            **self._answer.log_fields(),
        }

    def last_frame(self, error: ApiError) -> bytes:
        return error_frame(error)

    async def whole(self) -> dict[str, Any]:
        async for index, delta in self._answer.deltas():
            self._form.add(index, delta)
        return {**self._head, **await self._form.whole(), "usage": self._form.usage()}

    async def frames(self) -> AsyncIterator[bytes]:
        options = self._given.get("stream_options") or {}
        has_usage = options.get("include_usage", False)
        is_continuous = options.get("continuous_usage_stats", False)
        async for index, delta in self._answer.deltas():
            for fields in await self._form.chunks(index, delta):
                chunk = {**self._head, **fields}
                if is_continuous:
                    chunk["usage"] = self._form.usage()
                yield event(chunk)
        if has_usage:
            yield event({**self._head, "choices": [], "usage": self._form.usage()})
        yield DONE


def answer_head(
    given: Mapping[str, Any], prefix: str, kind: str, model: str, request_id: str
) -> dict[str, Any]:
    """Return the first fields of an answer. `kind` becomes the field `object`.

    The id is `given["request_id"]` if the client sets it, otherwise `prefix` and `request_id`.
    """
    return {
        "id": given.get("request_id") or f"{prefix}-{request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": given.get("model") or model,
        "system_fingerprint": f"gptmanager-{VERSION}",
    }


def end_fields(reason: str | None, stop_reason: str | int | None) -> dict[str, Any]:
    """Return `finish_reason` and `stop_reason` of a choice; both are None before its end.

    Strict clients accept only OpenAI's finish reasons, and none of these is a timeout. So the
    finish reason of an output that timed out is "length", and its `stop_reason` is "timeout".
    """
    if reason == "timeout":
        reason, stop_reason = "length", "timeout"
    return {"finish_reason": reason, "stop_reason": reason and stop_reason}


class HttpAnswer(Protocol):
    """An answer that is sent in one piece or as a stream.

    `whole` returns the answer as JSON values. `frames` yields encoded events. `keep_alive`:
    the frame that a stream repeats while it waits for its first event.
    """

    @property
    def keep_alive(self) -> bytes: ...

    def log_fields(self) -> dict[str, Any]: ...

    async def whole(self) -> dict[str, Any]: ...

    def frames(self) -> AsyncIterator[bytes]: ...

    def last_frame(self, error: ApiError) -> bytes:
        """Return the last events of a stream that has failed."""


async def respond(
    request: Request,
    preparing: Awaitable[HttpAnswer],
    warnings: Warnings,
    *,
    streams: bool,
) -> Response:
    """Wait for the answer that `preparing` returns, and return the HTTP response.

    If the client disconnects, the generation is cancelled.
    """
    answer = await until_disconnected(request, preparing)
    request.scope[RECORD].details = answer.log_fields
    headers = warnings.headers()
    if streams:
        interval_s = request.app.state.settings.sse_keep_alive
        starting = start_stream(answer.frames(), interval_s, answer.keep_alive)
        frames = await until_disconnected(request, starting)
        return EventStream(frames, headers, answer.last_frame)
    return json_response(await until_disconnected(request, answer.whole()), headers=headers)
