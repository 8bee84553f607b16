"""Bodies of HTTP requests, read within their limits, and work that ends with its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request

from gptmanager.memory.checkpoint_files import shown
from gptmanager.server.errors import ApiError
from gptmanager.server.responses import disconnected

_T = TypeVar("_T")


async def read_body(request: Request) -> bytes:
    """At most `--max-body-bytes` of it; a 413 for more, which is not kept."""
    limit: int = request.app.state.settings.max_body_bytes
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(f"{length} bytes", limit)
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise _too_large("more", limit)
        pieces.append(piece)
    return b"".join(pieces)


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object; a 413, 415 or 400 where it is none."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        told = f"Content-Encoding is {shown(encoding)}: the body must come as it is"
        raise ApiError(415, told, param="content-encoding", code="unsupported_encoding")
    body = await read_body(request)
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ApiError(400, f"the body must be a JSON object, not {kind}", code="invalid_json")
    return found


def _too_large(found: str, limit: int) -> ApiError:
    return ApiError(
        413, f"the body has {found}, --max-body-bytes allows {limit}", code="body_too_large"
    )


async def until_disconnected(request: Request, work: Awaitable[_T]) -> _T:
    """What `work` returns; it is cancelled when the client goes away, which raises
    ClientDisconnect. The body must have been read.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not working.done():
            working.cancel()
    try:
        return await working
    except asyncio.CancelledError:
        if gone.done() and not gone.cancelled():
            raise ClientDisconnect from None
        raise


class Begun:
    """Frames whose first one is there already. It adds no generator to what each frame passes."""

    def __init__(self, first: bytes | None, frames: AsyncIterator[bytes]) -> None:
        self._first = first
        self._frames = frames

    def __aiter__(self) -> Begun:
        return self

    def __anext__(self) -> Awaitable[bytes]:
        if self._first is None:
            return self._frames.__anext__()
        return self._take_first(self._first)

    async def _take_first(self, first: bytes) -> bytes:
        self._first = None
        return first

    async def aclose(self) -> None:
        await self._frames.aclose()  # type: ignore[attr-defined]


async def begun(frames: AsyncIterator[bytes]) -> Begun:
    """`frames` after its first one has come: what goes wrong before raises here, in the handler.

    Use: `EventStream(await until_disconnected(request, begun(frames)))`.
    """
    return Begun(await anext(frames, None), frames)
