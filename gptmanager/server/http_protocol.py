"""`HttpProtocol`: uvicorn's reader of HTTP/1.1, within bounds, and with errors as everywhere.

Decides how much of a request's head is read, and how long the server waits for the rest of one.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gptmanager.server.errors import ApiError
from gptmanager.server.responses import error_response

MAX_HEAD_BYTES = 1 << 16  # of the request line and the headers
# Java's client asks for HTTP/2 by it with each request; the parser would lose the body
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


class HttpProtocol(HttpToolsProtocol):
    """One connection. What is no HTTP gets a 400, a head above MAX_HEAD_BYTES a 431, as an error
    object; then the connection ends. It also ends where nothing comes for as long as idle ones are
    kept, whether a request has begun or not, and where its client takes nothing of what is written
    for as long.
    """

    def __init__(self, *arguments: Any, **by_name: Any) -> None:
        super().__init__(*arguments, **by_name)
        self._head_bytes = 0
        self._is_in_head = True
        self._is_whole = True  # no request has begun whose end is missing
        self._silence: asyncio.TimerHandle | None = None
        self._standstill: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._end_standstill()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not take what is written; `resume_writing` follows when it has."""
        super().pause_writing()
        self._standstill = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def resume_writing(self) -> None:
        self._end_standstill()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        self._stop_waiting()
        if self._is_in_head:
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"", head) + end + rest
            self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._is_in_head and self._head_bytes > MAX_HEAD_BYTES:
            told = f"the head of the request is larger than {MAX_HEAD_BYTES} bytes"
            self._refuse(ApiError(431, told))
        elif not self._is_whole:
            self._await_more()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is no HTTP/1.1 request", code="invalid_http"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._is_whole = True, False

    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head = self._is_whole = True

    def _await_more(self) -> None:
        self._silence = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _end_standstill(self) -> None:
        if self._standstill is not None:
            self._standstill.cancel()
            self._standstill = None

    def _refuse(self, error: ApiError) -> None:
        if self.cycle is None or self.cycle.response_complete:  # else it would stand in its answer
            response = error_response(error)
            response.headers["connection"] = "close"
            headers = [b"%b: %b\r\n" % pair for pair in response.raw_headers]
            line = b"HTTP/1.1 %d \r\n" % error.status
            self.transport.write(b"".join([line, *headers, b"\r\n", bytes(response.body)]))
        self.transport.close()
