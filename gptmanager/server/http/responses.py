"""Builds responses: JSON, error objects, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gptmanager.server.errors import ApiError, anthropic_error, api_error
from gptmanager.server.http.request_log import RECORD

_logger = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"  # clients ignore comments in streams of server-sent events
# Key in a request's scope: the server's own `send`. Each wrapper around it costs time per token.
DIRECT_SEND = "gptmanager.send"
# Key in a request's scope: a function that returns whether the request's whole body has arrived.
IS_WHOLE = "gptmanager.is_whole"
_OLLAMA = frozenset(
    f"/api/{name}"
    for name in (
        *("chat", "copy", "create", "delete", "embed", "embeddings", "generate", "ps", "pull"),
        *("push", "show", "tags", "version"),
    )
)
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response with `content` as JSON."""
    return Response(orjson.dumps(content), status, headers, "application/json")


def error_response(error: ApiError, path: str = "/") -> Response:
    """Return the response for `error`, in the format of the protocol at `path`."""
    if path == "/v2" or path.startswith("/v2/") or is_of_ollama(path):
        body: Any = {"error": error.message}
    elif path == "/v1/messages" or path.startswith("/v1/messages/"):
        body = anthropic_error(error)
    else:
        body = error.body()
    return _Refusal(error, orjson.dumps(body))


def event(content: Any) -> bytes:
    """Return `content` as JSON in a server-sent event."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


def named_event(content: Mapping[str, Any]) -> bytes:
    """Return `content` as JSON in a server-sent event with the name `content["type"]`."""
    name = str(content["type"]).encode()
    return b"event: " + name + b"\ndata: " + orjson.dumps(content) + b"\n\n"


def error_frame(error: ApiError) -> bytes:
    """Return the last two events of a failed stream, for OpenAI's clients: the error, and DONE."""
    return event(error.body()) + DONE


def is_of_ollama(path: str) -> bool:
    """Return whether `path` is one of Ollama's API, and not of OpenAI's behind the prefix /api."""
    return path in _OLLAMA or path.startswith("/api/blobs/")


class _Refusal(Response):
    """The response for an error. It also gives the error's code to the request log."""

    media_type = "application/json"

    def __init__(self, error: ApiError, body: bytes) -> None:
        super().__init__(body, error.status, error.headers)
        self._code = str(error.code or error.type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if RECORD in scope:
            scope[RECORD].code = self._code
        await super().__call__(scope, receive, send)


class EventStream(Response):
    """A response that sends `frames`, which are encoded server-sent events.

    Pass frames that `start_stream` has started, so that an error before the first frame becomes an
    error response. After a later error, the stream ends with `last_frame(error)`.
    When the client disconnects, `frames` is cancelled. While the client does not read, `frames` is
    not advanced, so nothing is buffered.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        headers: Mapping[str, str] | None = None,
        last_frame: Callable[[ApiError], bytes] = error_frame,
    ) -> None:
        super().__init__(None, 200, {**_STREAM_HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._frames = frames
        self._last_frame = last_frame

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send, scope.get(DIRECT_SEND, send)))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not sending.done():
                sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending

    async def _send(self, start: Send, send: Send) -> None:
        async with contextlib.aclosing(self._frames) as frames:  # type: ignore[type-var]
            head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await start(head)
            try:
                async for frame in frames:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
            except Exception as error:  # the status has already been sent
                _logger.debug("a stream failed", exc_info=error)
                last = self._last_frame(api_error(error))
                await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects. The request's body must already have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
