"""`HttpProtocol`: uvicorn's HTTP/1.1 connection with limits and with this server's error objects.

The class limits the size of a request's head (request line and headers), the size of its trailers,
and the time in which the request must arrive. The class also decides when and how a connection is
closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gptmanager.server.errors import ApiError
from gptmanager.server.http.connections import PEER, Connections
from gptmanager.server.http.responses import IS_WHOLE, error_response

MAX_HEAD_BYTES = 1 << 16  # limit for request line and headers together, and for trailers
MAX_PIPELINED = 64  # requests of a connection that wait for an earlier answer
_THIS_MACHINE = ("127.0.0.1", 0)
_LINGER_S = 2.0  # how long a refused client may go on writing
_logger = logging.getLogger("uvicorn.error.connections")


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return False for the traceback of an answer that the end of the server has cancelled."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


_logger.addFilter(_is_worth_logging)


class HttpProtocol(HttpToolsProtocol):
    """One connection of a client.

    In these cases the server answers with an error object and closes the connection: the bytes are
    not HTTP/1.1 (400); more than MAX_PIPELINED requests wait (400); a head or trailers exceed
    MAX_HEAD_BYTES (431); a request takes longer than `read_timeout_s` to arrive (408).

    If no request arrives, or if the client does not read, the connection is closed after the
    keep-alive timeout. It is also closed after a response to a request that has not completely
    arrived.
    """

    def __init__(
        self, *arguments: Any, limits: Connections, read_timeout_s: float, **by_name: Any
    ) -> None:
        super().__init__(*arguments, **by_name)
        self.logger = _logger
        self._limits = limits
        self._read_timeout_s = read_timeout_s
        self._host = ""
        # Requests without a complete answer. The first is being answered, the others wait.
        self._unanswered: deque[Any] = deque()
        self._part_bytes = 0  # bytes of the head or the trailers that the parser has reported
        self._unreported_bytes = 0  # bytes received since the parser's last callback
        self._is_in_head = True
        self._is_whole = True  # every request that has begun has arrived completely
        self._arriving: Any = None  # the last of `_unanswered`, while its body arrives
        self._drops_input = False  # further input is dropped
        self._refusal: ApiError | None = None  # to be written after the answers to `_unanswered`
        self._deadline: asyncio.TimerHandle | None = None
        self._write_timeout: asyncio.TimerHandle | None = None

    # The connection ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client = self.client or _THIS_MACHINE  # a Unix socket has no address
        self._host = self.client[0]
        refusal = self._limits.enter(self._host)
        if refusal is None:
            self._set_deadline(self.timeout_keep_alive, transport.close)
            return
        self._drops_input = True  # close at once: lingering would hold a descriptor for this client
        self._limits.log_refusal(self._host, refusal)
        self._write(refusal)
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.leave(self._host)
        self._set_deadline(None)
        self._cancel_write_timeout()
        for cycle in self._unanswered:  # the base class does this only for the last one
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the timeout for a client that does not read; `resume_writing` ends it."""
        super().pause_writing()
        self._write_timeout = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel_write_timeout()
        super().resume_writing()

    # Input ------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._drops_input:
            return
        self._unreported_bytes += len(data)
        try:
            while data:
                data = self._parse(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, ApiError) else _not_http(error))
        else:
            if self._unreported_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(_too_large())

    def _parse(self, data: bytes) -> bytes:
        """Parse `data`, and return what must be parsed next.

        The parser stops behind a head with the header Upgrade, and would drop the request's body.
        Java's client offers HTTP/2 with this header in each request. Such a head is parsed again
        without the header, by a new parser: the old one may regard the connection as closed.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            if not self._has_upgrade:  # CONNECT: the bytes that follow belong to another protocol
                self.cycle.keep_alive = False
                self._drops_input = True
                return b""
            version = self.parser.get_http_version().encode()
            head = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)]
            head += [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            with suppress(AttributeError):  # httptools before 0.6.3
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            return b"".join([*head, b"\r\n", data[stop.args[0] :]])
        return b""

    @property
    def _has_upgrade(self) -> bool:
        """Whether the parser stops behind the current head because of its header Upgrade."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[PEER] = self._host  # type: ignore[literal-required]
        self._is_in_head, self._is_whole = True, False
        self._part_bytes = self._unreported_bytes = 0
        self._arriving = None
        if self.cycle is None or self.cycle.response_complete:
            self._set_read_deadline()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if self._is_in_head:  # trailers are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._part_bytes = self._unreported_bytes = 0
        if self._has_upgrade:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ApiError(
                400,
                f"more than {MAX_PIPELINED} requests wait on this connection: wait for answers "
                "before you send more",
            )
        is_1_0 = self.parser.get_http_version() == "1.0"
        self.expect_100_continue &= not is_1_0  # such a client would read 100 as its answer
        super().on_headers_complete()
        cycle = self._arriving = self.cycle
        self._unanswered.append(cycle)
        self.scope[IS_WHOLE] = lambda: not cycle.more_body  # type: ignore[literal-required]
        cycle.transport = _ResponseTransport(self.transport, self._end)  # type: ignore[assignment]
        if is_1_0:
            cycle.send = _without_chunks(cycle)  # type: ignore[assignment,method-assign]

    def on_body(self, body: bytes) -> None:
        self._unreported_bytes = 0
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._unreported_bytes = 0

    def on_message_complete(self) -> None:
        if self._has_upgrade:
            return
        super().on_message_complete()
        self._is_in_head = self._is_whole = True
        self._arriving = None
        self._unreported_bytes = 0
        self._set_idle_deadline()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        self._unset_keepalive_if_required()  # `_deadline` replaces the base class's timer
        if self._refusal is not None:
            if not self._unanswered and not self.transport.is_closing():
                self._write_refusal(self._refusal)
            return
        if self._is_whole:
            self._set_idle_deadline()
        else:
            self._set_read_deadline()

    def _count(self, size: int) -> None:
        self._part_bytes += size
        self._unreported_bytes = 0
        if self._part_bytes > MAX_HEAD_BYTES:
            raise _too_large()

    # Time -------------------------------------------------------------------------------------

    def _set_read_deadline(self) -> None:
        """Set the deadline for the rest of the arriving request.

        Must not be called while an answer is being sent.
        """
        limit = self._read_timeout_s
        late = ApiError(408, f"the request did not arrive within {limit:g} s", code="too_slow")
        self._set_deadline(limit, lambda: self._refuse(late))

    def _set_idle_deadline(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        self._set_deadline(self.timeout_keep_alive if is_idle else None, self.transport.close)

    def _set_deadline(self, seconds: float | None, end: Callable[[], None] | None = None) -> None:
        if self._drops_input and seconds is not None and self._deadline is not None:
            return  # the connection is already being closed
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None and end is not None:
            self._deadline = self.loop.call_later(seconds, end)

    def _cancel_write_timeout(self) -> None:
        if self._write_timeout is not None:
            self._write_timeout.cancel()
            self._write_timeout = None

    # Close ------------------------------------------------------------------------------------

    def _refuse(self, error: ApiError) -> None:
        """Answer the bytes that arrive now with an error, and close the connection.

        Complete requests that came before are answered first.
        """
        self._limits.log_refusal(self._host, error)
        refused = self._arriving
        if refused is not None and refused.response_started:
            self.transport.close()  # the answer has begun: the error would be inside it
            return
        if refused is not None:
            self._unanswered.pop()
            refused.disconnected = True
            refused.message_event.set()
            if self._unanswered:
                self.pipeline.popleft()  # the refused request, which is the last in the pipeline
        if self._unanswered:
            self._drops_input = True
            self._refusal = error
        else:
            self._write_refusal(error)

    def _write_refusal(self, error: ApiError) -> None:
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
        """Close the connection, or drop the client's input for _LINGER_S seconds first.

        If the client is still writing, an immediate close would reset the connection before the
        client has read the answer.
        """
        if self._is_whole or self.pipeline or not self.transport.can_write_eof():
            self.transport.close()
        elif not self.transport.is_closing():
            self._set_deadline(_LINGER_S, self.transport.abort)
            self._drops_input = True
            self.flow.resume_reading()
            self.transport.write_eof()


class _ResponseTransport:
    """The transport that a response writes to. Its `close` calls `end`.

    Once the connection is being closed, writes are dropped: an endpoint may still write until it is
    notified of the end of the connection.
    """

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        self._write = transport.write
        self.is_closing = transport.is_closing
        self.close = end

    def write(self, data: bytes) -> None:
        if not self.is_closing():
            self._write(data)


def _without_chunks(cycle: RequestResponseCycle) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Return the `send` for a request of HTTP/1.0: its client does not know chunks.

    The end of the connection, which is closed after each such request, ends a body without length.
    """
    send, has_length = cycle.send, True

    async def send_unframed(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length += len(message.get("body", b""))
        await send(message)

    return send_unframed


def _not_http(error: httptools.HttpParserError) -> ApiError:
    """Return the refusal, with the parser's reason unless the error is from a callback of ours."""
    is_ours = isinstance(error, httptools.HttpParserCallbackError)
    reason = "" if is_ours else f": {error}"
    return ApiError(400, f"the request must be HTTP/1.1{reason}", code="invalid_http")


def _too_large() -> ApiError:
    what = "the request line with the headers, and the trailers,"
    return ApiError(431, f"{what} must have at most {MAX_HEAD_BYTES} bytes each")
