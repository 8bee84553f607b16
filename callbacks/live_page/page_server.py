"""`LivePage`: a page that shows a manager's schedule while it runs.

The page is one static file. It receives the schedule as server-sent events, which any web server
can send; `serve` starts a server that needs only Python.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from queue import Full
from socket import socket
from typing import Any
from urllib.parse import urlsplit

from gptmanager import GptManager
from gptmanager.arguments import able, at_least, function
from gptmanager.callbacks.live_page.feed import TICK_S, LiveFeed, Viewer
from gptmanager.environment.machine.loopback import is_loopback
from gptmanager.lifecycle.latch import Latch
from gptmanager.lifecycle.threads import start_thread

_LOOK_UP_S = 0.05  # interval at which the server checks whether it is to end
_TIMEOUT_S = 10.0  # a client that neither reads nor writes for this time is disconnected
_MAX_OTHERS = 16  # connections in addition to one for each viewer


class LivePage:
    """Shows one manager to any number of viewers.

        with LivePage() as page, GptManager(...) as manager:
            page.attach(manager)
            print(page.serve(port=8080))

    Half a minute after the last viewer has left, the loop stops its reports to the page until the
    next viewer enters. The page shows ids and numbers, and no text of requests. `num_outside`
    returns the number of requests that wait in the application and are unknown to the manager; a
    thread of the page calls `num_outside`. `max_viewers` limits the number of open pages.
    """

    def __init__(
        self, *, num_outside: Callable[[], int] | None = None, max_viewers: int = 16
    ) -> None:
        at_least(1, "max_viewers", max_viewers)
        if num_outside is not None:
            function("num_outside", num_outside)
        self.html = files("gptmanager.callbacks.live_page").joinpath("page.html").read_bytes()
        self.headers = page_headers(self.html)
        self._max_viewers = max_viewers
        self._feed = LiveFeed(num_outside, max_viewers)
        self._server: _Server | None = None

    def attach(self, manager: GptManager) -> None:
        """Show `manager` from now on. Raise ValueError for a second manager."""
        if self._feed.manager is not None:
            raise ValueError("the page is attached to a manager already")
        self._feed.manager = able("manager", manager, "watch", "GptManager")

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._feed.is_closed

    def viewer(self) -> Viewer:
        """Return a viewer, for a web server that sends the events itself.

        Call `take()` of the viewer five times a second, and send the events that it returns. The
        events begin with a snapshot. Raise `queue.Full` if `is_full`.
        """
        return self._feed.enter()

    @property
    def is_full(self) -> bool:
        """Whether there are `max_viewers` viewers, or the page is closed."""
        return self._feed.is_full

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the data to send to one viewer, for an asyncio web server."""
        with self.viewer() as viewer:
            while not self.is_closed:
                if data := viewer.take():
                    yield data
                await asyncio.sleep(TICK_S)

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Serve the page on separate threads until `close`; return its address.

        Port 0 selects any free port. The page has no password: other machines can open it unless
        `host` is a loopback address. On a loopback address the server accepts only names of this
        machine in the Host header, which prevents DNS rebinding. Raise OSError if the port is in
        use, and ValueError if the page is served already, or closed.
        """
        if self._server is not None or self.is_closed:
            raise ValueError("the page is served already, or closed")
        self._server = _Server((host, port), self, self._max_viewers + _MAX_OTHERS)
        return f"http://{host}:{self._server.server_port}/"

    def close(self) -> None:
        """End the server and all viewers. Idempotent."""
        self._feed.close()
        if self._server is not None:
            self._server.end()
            self._server = None

    def __enter__(self) -> LivePage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def page_headers(html: bytes) -> dict[str, str]:
    """Return HTTP headers that let a browser run only the page's own scripts and styles.

    The headers list the digests of these scripts and styles. Scripts can connect only to the page's
    server.
    """
    script, style = (
        " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(body).digest()).decode()}'"
            for body in re.findall(b"<%b>(.*?)</%b>" % (name, name), html, re.DOTALL)
        )
        for name in (b"script", b"style")
    )
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }


def _host(authority: str) -> str:
    """Return the host in "host:port"; "" if it is invalid."""
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return ""


class _Server(ThreadingHTTPServer):
    """A server with a thread for each connection.

    It closes a new connection at once while `max_connections` connections are open.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], page: LivePage, max_connections: int) -> None:
        self.page = page
        self.is_local = is_loopback(address[0])
        self._free_connections = threading.BoundedSemaphore(max_connections)
        super().__init__(address, _Handler)
        self.timeout = _LOOK_UP_S
        self._ended = Latch()
        self._thread = threading.Thread(target=self._serve, name="live-page-server", daemon=True)
        start_thread(self._thread)

    def _serve(self) -> None:
        while not self._ended.is_set:  # `shutdown` of the base class waits for a `threading.Event`
            self.handle_request()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free_connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_connections.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """Print nothing: viewers may disconnect at any time."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.server.is_local and not is_loopback(_host(self.headers.get("Host", ""))):
            self.send_error(HTTPStatus.FORBIDDEN, "Host must be a name of this machine")
        elif path == "/":
            self._answer("text/html; charset=utf-8", self.server.page.html)
        elif path == "/live/events":
            self._stream()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, kind: str, body: bytes | None = None) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        for name, value in self.server.page.headers.items():
            self.send_header(name, value)
        if body is not None:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body or b"")

    def _stream(self) -> None:
        page = self.server.page
        try:
            viewer = page.viewer()
        except Full as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            return
        with viewer:
            self._answer("text/event-stream")
            while not page.is_closed:
                if data := viewer.take():
                    self.wfile.write(data)
                time.sleep(TICK_S)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: requests for the page are not of interest."""
