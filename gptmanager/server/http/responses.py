"""Responses as JSON, errors as one object, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gptmanager.server.errors import ApiError, api_error

_logger = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
# In a request's scope: the server's own `send`. Each wrapper around it costs each token some time.
DIRECT_SEND = "gptmanager.send"
# In a request's scope: returns whether all of the request's body has come.
IS_WHOLE = "gptmanager.is_whole"
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")


def error_response(error: ApiError, path: str = "/") -> Response:
    """`path`: what was asked for; below /v2 clients read an error as Triton writes it."""
    is_triton = path == "/v2" or path.startswith("/v2/")
    body = {"error": error.message} if is_triton else error.body()
    return json_response(body, error.status, error.headers)


def event(content: Any) -> bytes:
    """A server-sent event with `content` as JSON."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


class EventStream(Response):
    """A response that writes each frame of `frames` as a server-sent event.

    Pass frames that `start_stream` has started: an error before the first frame can then still be
    answered with an error object. A disconnect cancels `frames`. A client that does not read
    blocks `frames`, so nothing is buffered for it. A later error becomes the last event before
    DONE.
    """

    media_type = "text/event-stream"

    def __init__(
        self, frames: AsyncIterator[bytes], headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(None, 200, {**_STREAM_HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._frames = frames

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
        await start({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._frames) as frames:  # type: ignore[type-var]
            try:
                async for frame in frames:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
            except Exception as error:  # the status is out already
                _logger.debug("a stream failed", exc_info=error)
                last = event(api_error(error).body()) + DONE
                await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone away. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
