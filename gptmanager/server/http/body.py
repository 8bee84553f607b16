"""Reads HTTP bodies within their limits, and cancels work for clients that have disconnected."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from gptmanager.errors import quoted
from gptmanager.server.errors import ApiError
from gptmanager.server.http.access import MAX_BODIES_BYTES, AccessSettings
from gptmanager.server.http.json_text import parse_json
from gptmanager.server.http.responses import COMMENT, disconnected

_T = TypeVar("_T")
LARGE_BODY = 1 << 14  # bytes; parsing such a body takes 1 ms, passing it to a thread 0.1 ms
_HUGE_BODY = 1 << 20  # bytes; parsing such a body may hold the interpreter lock for 0.1 s


class BodyBudget:
    """Limits the bytes of all bodies that are in memory at once.

    Without this limit, many clients that send large bodies could use up the memory.
    """

    def __init__(self, most: int = MAX_BODIES_BYTES) -> None:
        self._most = self._left = most

    def reserve(self, size: int) -> None:
        """Count `size` more bytes. Raises ApiError (429) if the sum would exceed the limit."""
        if size > self._left:
            raise ApiError(
                429,
                f"the bodies that clients send at once would exceed {self._most} bytes together",
                code="too_many_bodies",
            )
        self._left -= size

    def release(self, size: int) -> None:
        """Subtract `size` bytes that `reserve` has counted."""
        self._left += size

    @contextlib.contextmanager
    def reserved(self, size: int) -> Iterator[None]:
        """Count `size` bytes until the end of the block."""
        self.reserve(size)
        try:
            yield
        finally:
            self.release(size)


@contextlib.asynccontextmanager
async def body_of(request: Request, *, carries_tensors: bool = False) -> AsyncIterator[bytes]:
    """Yield a request's body, which counts in the server's `BodyBudget` until the block ends.
    Raises ApiError: 413 if the body is too large, 429 if the budget is exhausted.
    """
    budget, held = request.app.state.body_budget, [0]

    def take(size: int) -> None:
        budget.reserve(size)
        held[0] += size

    try:
        yield await _read_body(request, take, carries_tensors)
    finally:
        budget.release(held[0])


async def _read_body(request: Request, take: Callable[[int], None], carries_tensors: bool) -> bytes:
    """Return the body, and call `take` with the size of each chunk. Raises ApiError (413) as soon
    as the body exceeds the route's limit.
    """
    settings: AccessSettings = request.app.state.settings
    limit = settings.body_limit(carries_tensors=carries_tensors)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(length, limit)
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise _too_large(f"more than {limit}", limit)
        take(len(piece))
        pieces.append(piece)
    if size < _HUGE_BODY:
        return b"".join(pieces)
    return await run_in_thread(lambda: b"".join(pieces))


async def read_json(request: Request, read: Callable[[dict[str, Any]], _T]) -> _T:
    """Return `read(body)` for a body that is a JSON object.

    A large body is parsed, and passed to `read`, on a worker thread. Raises ApiError: 400 if the
    body is not a JSON object, 413 and 429 like `body_of`, 415 if the body is compressed.
    """
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        message = (
            f"Content-Encoding {quoted(encoding)} is not supported: send the body uncompressed"
        )
        raise ApiError(415, message, param="content-encoding", code="unsupported_encoding")
    async with body_of(request) as body:
        return await parsed(request, len(body), lambda: read(_parse_object(body)))


async def parsed(request: Request, size: int, parse: Callable[[], _T]) -> _T:
    """Return `parse()` for a body of `size` bytes.

    Large bodies are parsed on a worker thread, and huge bodies one at a time: the event loop
    competes with all threads for the interpreter lock, and several long parses at once would delay
    the loop.
    """
    if size < LARGE_BODY:
        return parse()
    if size < _HUGE_BODY:
        return await run_in_thread(parse)
    async with request.app.state.huge_bodies:
        return await run_in_thread(parse)


def _parse_object(body: bytes) -> dict[str, Any]:
    found = parse_json(body)
    if not isinstance(found, dict):
        text = f"the body must be a JSON object, got a value of type {type(found).__name__}"
        raise ApiError(400, text, code="invalid_json")
    return found


async def run_in_thread(work: Callable[[], _T]) -> _T:
    """Run `work` on a worker thread, to keep the event loop free, and return its result."""
    return await asyncio.to_thread(work)


def _too_large(size: str, limit: int) -> ApiError:
    return ApiError(
        413, f"the body has {size} bytes; --max-body-bytes allows {limit}", code="body_too_large"
    )


async def until_disconnected(request: Request, work: Awaitable[_T]) -> _T:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise
    ClientDisconnect. The request's body must already have been read.
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


class StartedStream:
    """An iterator over a stream's frames (encoded events). The first frame has been read already.

    It is a class, because a generator around `frames` would cost time for every frame.
    """

    def __init__(self, first: bytes | None, frames: AsyncIterator[bytes]) -> None:
        self._first = first
        self._frames = frames

    def __aiter__(self) -> StartedStream:
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


class KeptAlive:
    """An iterator over frames, which yields `comment` every `interval_s` seconds until the first.

    `starting` waits for the first frame. Proxies close a connection that is silent for too long.
    """

    def __init__(
        self,
        starting: asyncio.Task[bytes | None],
        frames: AsyncIterator[bytes],
        interval_s: float,
        comment: bytes,
    ) -> None:
        self._starting: asyncio.Task[bytes | None] | None = starting
        self._frames = frames
        self._interval_s = interval_s
        self._comment = comment

    def __aiter__(self) -> KeptAlive:
        return self

    def __anext__(self) -> Awaitable[bytes]:
        if self._starting is None:
            return self._frames.__anext__()
        return self._first_or_comment(self._starting)

    async def _first_or_comment(self, starting: asyncio.Task[bytes | None]) -> bytes:
        done, _ = await asyncio.wait({starting}, timeout=self._interval_s)
        if not done:
            return self._comment
        self._starting = None
        first = starting.result()
        if first is None:
            raise StopAsyncIteration
        return first

    async def aclose(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._starting
        await self._frames.aclose()  # type: ignore[attr-defined]


async def start_stream(
    frames: AsyncIterator[bytes], keep_alive_s: float | None = None, comment: bytes = COMMENT
) -> StartedStream | KeptAlive:
    """Wait for the first frame, and return an iterator over all frames. An error before the first
    frame is raised here, in the endpoint.

    With `keep_alive_s`, the iterator is returned at once and repeats `comment` before the first
    frame. In this case only errors of the submission are raised here, for instance if too many
    requests wait.

    Use: `EventStream(await until_disconnected(request, start_stream(frames)))`.
    """
    if keep_alive_s is None:
        return StartedStream(await anext(frames, None), frames)
    starting = asyncio.ensure_future(_first(frames))
    await asyncio.sleep(0)  # lets the task run once: this submits the requests
    if starting.done():
        return StartedStream(starting.result(), frames)
    return KeptAlive(starting, frames, keep_alive_s, comment)


async def _first(frames: AsyncIterator[bytes]) -> bytes | None:
    return await anext(frames, None)
