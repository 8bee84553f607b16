"""`HttpProtocol`: uvicorn's reader of HTTP/1.1, within bounds, and with errors as everywhere.

Decides how much of a request's head and trailers is read, how long a request may take to arrive,
and how a connection ends.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gptmanager.server.errors import ApiError
from gptmanager.server.http.connections import PEER, Connections
from gptmanager.server.http.responses import IS_WHOLE, error_response

MAX_HEAD_BYTES = 1 << 16  # of the request line and the headers, and again of the trailers
MAX_PIPELINED = 64  # requests of a connection that wait for the answer before theirs
_LINGER_S = 2.0  # how long a client may go on writing after its refusal
# Java's client asks for HTTP/2 by it with each request; the parser would lose the body
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


class HttpProtocol(HttpToolsProtocol):
    """One connection. What is no HTTP gets a 400, a head or trailers above MAX_HEAD_BYTES a 431, a
    request that takes longer than `read_timeout_s` to arrive a 408, as an error object; then the
    connection ends. It also ends if it is idle for as long as idle ones are kept, if its client
    takes nothing of what is written for as long, and after an answer to a request of which a part
    is still to come.
    """

    def __init__(
        self, *arguments: Any, limits: Connections, read_timeout_s: float, **by_name: Any
    ) -> None:
        super().__init__(*arguments, **by_name)
        self._limits = limits
        self._read_timeout_s = read_timeout_s
        self._host = ""
        # requests whose answers are not complete: the first one's is on its way, the others wait
        self._unanswered: deque[Any] = deque()
        self._part_bytes = 0  # of the head or the trailers, so far as the parser has told of them
        self._untold_bytes = 0  # that have come since the parser told of anything
        self._is_in_head = True
        self._is_whole = True  # no request has begun whose end is missing
        self._is_deaf = False  # what comes is passed over
        self._deadline: asyncio.TimerHandle | None = None
        self._standstill: asyncio.TimerHandle | None = None

    # The connection ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._host = self.client[0] if self.client else ""
        refusal = self._limits.enter(self._host)
        if refusal is None:
            self._set_deadline(self.timeout_keep_alive, transport.close)
            return
        self._is_deaf = True  # no descriptor is held for what this client would still write
        self._limits.log_refusal(self._host, refusal.message)
        self._write(refusal)
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.leave(self._host)
        self._set_deadline(None)
        self._end_standstill()
        for cycle in self._unanswered:  # the base class knows of the last one only
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not take what is written; `resume_writing` follows when it has."""
        super().pause_writing()
        self._standstill = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def resume_writing(self) -> None:
        self._end_standstill()
        super().resume_writing()

    # What comes -------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if self._is_in_head:
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"", head) + end + rest
        self._untold_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.cycle.keep_alive = False  # what follows is another protocol's
            self._is_deaf = True
        except httptools.HttpParserError as error:
            cause = error.__context__
            not_http = ApiError(400, "this is no HTTP/1.1 request", code="invalid_http")
            self._refuse(cause if isinstance(cause, ApiError) else not_http)
        else:
            if self._untold_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[PEER] = self._host  # type: ignore[literal-required]
        self._is_in_head, self._is_whole = True, False
        self._part_bytes = self._untold_bytes = 0
        if self.cycle is None or self.cycle.response_complete:
            self._await_rest()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if self._is_in_head:  # trailers name nothing that the server reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._part_bytes = self._untold_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ApiError(400, f"more than {MAX_PIPELINED} requests wait on this connection")
        super().on_headers_complete()
        cycle = self.cycle
        self._unanswered.append(cycle)
        self.scope[IS_WHOLE] = lambda: not cycle.more_body  # type: ignore[literal-required]
        cycle.transport = _Answering(self.transport, self._end)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._untold_bytes = 0
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._untold_bytes = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head = self._is_whole = True
        self._untold_bytes = 0
        self._await_next()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        self._unset_keepalive_if_required()  # one timer serves all
        if self._is_whole:
            self._await_next()
        else:
            self._await_rest()

    def _count(self, size: int) -> None:
        self._part_bytes += size
        self._untold_bytes = 0
        if self._part_bytes > MAX_HEAD_BYTES:
            raise _too_large()

    # Time -------------------------------------------------------------------------------------

    def _await_rest(self) -> None:
        """Set the deadline of the request that is arriving; not while an answer is being sent."""
        limit = self._read_timeout_s
        late = ApiError(408, f"the request did not arrive within {limit:g} s", code="too_slow")
        self._set_deadline(limit, lambda: self._refuse(late))

    def _await_next(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        self._set_deadline(self.timeout_keep_alive if is_idle else None, self.transport.close)

    def _set_deadline(self, seconds: float | None, end: Callable[[], None] | None = None) -> None:
        if self._is_deaf and seconds is not None and self._deadline is not None:
            return  # the connection ends already
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None and end is not None:
            self._deadline = self.loop.call_later(seconds, end)

    def _end_standstill(self) -> None:
        if self._standstill is not None:
            self._standstill.cancel()
            self._standstill = None

    # The end ----------------------------------------------------------------------------------

    def _refuse(self, error: ApiError) -> None:
        self._limits.log_refusal(self._host, error.message)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            is_read_now = not self._is_in_head and not self._is_whole and not self.pipeline
            if cycle.response_started or not is_read_now:  # it would stand in another answer
                self.transport.close()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        self._write(error)
        self._is_whole = False
        self._end()

    def _write(self, error: ApiError) -> None:
        response = error_response(error)
        response.headers["connection"] = "close"
        headers = [b"%b: %b\r\n" % pair for pair in response.raw_headers]
        line = b"HTTP/1.1 %d \r\n" % error.status
        self.transport.write(b"".join([line, *headers, b"\r\n", bytes(response.body)]))

    def _end(self) -> None:
        """Close the connection. A client that still writes would see it reset, and not the answer
        before that: so what it writes is passed over for a little while.
        """
        if self._is_whole or self.pipeline or not self.transport.can_write_eof():
            self.transport.close()
        elif not self.transport.is_closing():
            self._set_deadline(_LINGER_S, self.transport.abort)
            self._is_deaf = True
            self.flow.resume_reading()
            self.transport.write_eof()


class _Answering:
    """A connection's transport, as the answer to a request uses it: `end` closes it. Of several
    requests on a connection only the last hears that the client has gone; the others write on.
    """

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        self._write = transport.write
        self.is_closing = transport.is_closing
        self.close = end

    def write(self, data: bytes) -> None:
        if not self.is_closing():
            self._write(data)


def _too_large() -> ApiError:
    what = "the head of the request, or its trailers,"
    return ApiError(431, f"{what} must have at most {MAX_HEAD_BYTES} bytes")
