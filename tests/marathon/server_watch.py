"""Watches a server from a process of its own: how late `/health` is, and how memory grows.

python server_watch.py HOST PORT PID POLL_S

Polls until its input ends, then prints a `Watched` as JSON. How late this process itself
was scheduled is measured with each poll, since machines are shared.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

_REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
_STEP_S = 0.01  # a wait of this length that takes longer tells how late the watcher is
_PATIENCE_S = 30.0
_NEW_CONNECTION = 20  # polls
_MEMORY = 10  # polls


class Poll(NamedTuple):
    """`at`: its begin, by the monotonic clock. `own_late_s`: the longest time that the watcher was
    not on a core although it wanted to. `starved_s`: how long the server's first thread, the one
    of the event loop, waited for a core meanwhile. `status`: 0 for no answer.
    """

    at: float
    latency_s: float
    own_late_s: float
    starved_s: float
    status: int


class Memory(NamedTuple):
    """MB of the server, and of the processes that it has started."""

    at: float
    server: float
    children: float


class Watched(NamedTuple):
    polls: list[Poll]
    memory: list[Memory]

    @classmethod
    def from_json(cls, text: str) -> Watched:
        polls, memory = json.loads(text)
        return cls([Poll(*one) for one in polls], [Memory(*one) for one in memory])


class Health:
    """Polls over a connection that it keeps, and over a new one from time to time."""

    def __init__(self, host: str, port: int, pid: int) -> None:
        self._address = (host, port)
        self._pid = pid
        self._connection: socket.socket | None = None
        self._number = 0

    def poll(self, own_late_s: float) -> Poll:
        began, starved = time.monotonic(), _starved_s(self._pid)
        self._number += 1
        self._late_s = own_late_s
        try:
            status = self._ask(began)
        except OSError:
            status = 0
        if status == 0 or self._number % _NEW_CONNECTION == 0:
            self._close()
        latency = time.monotonic() - began
        return Poll(began, latency, self._late_s, _starved_s(self._pid) - starved, status)

    def _ask(self, began: float) -> int:
        if self._connection is None:
            self._connection = socket.create_connection(self._address, _PATIENCE_S)
            self._connection.settimeout(_PATIENCE_S)
        self._connection.sendall(_REQUEST)
        answer = b""
        while not _is_whole(answer):
            before = time.monotonic()
            if before - began > _PATIENCE_S:
                return 0
            readable = select.select([self._connection], [], [], _STEP_S)[0]
            self._late_s = max(self._late_s, time.monotonic() - before - _STEP_S)
            if readable:
                data = self._connection.recv(65536)
                if not data:
                    return 0
                answer += data
        return int(answer.split(b" ", 2)[1])

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    _, named, length = head.lower().partition(b"content-length:")
    return bool(end) and (not named or len(body) >= int(length.split(b"\r\n")[0]))


def _starved_s(pid: int) -> float:
    """How long the process's first thread has waited for a core so far."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, LookupError):  # it has ended, or the kernel does not count
        return 0.0


def _resident_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6
    except (OSError, LookupError):
        return 0.0


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:
            continue
    return found


def watch(host: str, port: int, pid: int, poll_s: float) -> Watched:
    """Until the standard input ends."""
    health = Health(host, port, pid)
    polls: list[Poll] = []
    memory: list[Memory] = []
    planned = next_memory = time.monotonic()
    while True:
        if select.select([sys.stdin], [], [], max(0.0, planned - time.monotonic()))[0]:
            return Watched(polls, memory)
        now = time.monotonic()
        polls.append(health.poll(now - planned))
        planned = max(planned + poll_s, time.monotonic())
        if now >= next_memory:
            next_memory = now + _MEMORY * poll_s
            children = sum(_resident_mb(child) for child in _children(pid))
            memory.append(Memory(now, _resident_mb(pid), children))


if __name__ == "__main__":
    given_host, given_port, given_pid, given_poll_s = sys.argv[1:]
    print(json.dumps(watch(given_host, int(given_port), int(given_pid), float(given_poll_s))))
