"""A server that answers all, but for one planted fault.

python planted_server.py FAULT

Prints its port. The fault begins with request 10: "none", "hangs", "grows", "dies", "fails" (500),
"closes" (without an answer), "late" (/health), "forgets" (the canary), "traceback", "unwell".
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_BEGIN = 10


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fault = ""
    count = 0
    kept: list[bytes] = []  # noqa: RUF012 - that is the leak

    def do_GET(self) -> None:  # noqa: N802
        if self._has("late"):
            time.sleep(0.3)
        self._answer(500 if self._has("unwell") else 200, {"status": "ok"})

    def do_POST(self) -> None:  # noqa: N802
        Handler.count += 1
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self._has("hangs"):
            time.sleep(1)
        if self._has("grows"):
            self.kept.append(b"a" * (1 << 20))
        if self._has("dies"):
            os._exit(1)
        if self._has("traceback"):
            print("Traceback (most recent call last):\n  here\nValueError: 1", file=sys.stderr)
        if self._has("closes"):
            self.close_connection = True
            return
        is_canary = b"seed" in body
        text = "b" if is_canary and self._has("forgets") else "a"
        self._answer(500 if self._has("fails") else 200, {"choices": [{"text": text}]})

    def _has(self, fault: str) -> bool:
        return Handler.count >= _BEGIN and self.fault == fault

    def _answer(self, status: int, body: dict[str, object]) -> None:
        raw = json.dumps(body if status == 200 else {"error": "it failed"}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


if __name__ == "__main__":
    Handler.fault = sys.argv[1]
    with Server(("127.0.0.1", 0), Handler) as server:
        print(server.server_port, flush=True)
        server.serve_forever()
