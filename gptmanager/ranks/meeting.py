"""How ranks connect: rank 0 listens, and each other rank opens two connections to it.

Rank 0 publishes its port and a secret token in a store that all ranks share. Each connection begins
with this token, which proves that it comes from a rank.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
from contextlib import suppress
from enum import IntEnum
from typing import Any, Protocol

from gptmanager.environment.machine.loopback import is_loopback
from gptmanager.errors import RankError
from gptmanager.lifecycle.clock import monotonic

_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}sIB")  # token, rank, channel
_HELLO_S = 10.0  # how long a new connection may take to identify itself
_BACKLOG = 512


class Store(Protocol):
    """A key-value store, such as a store of torch.distributed."""

    def set(self, key: str, value: Any) -> None: ...

    def get(self, key: str) -> bytes: ...


class Channel(IntEnum):
    """The purpose of a connection: messages between ranks, or the watch for failures."""

    LOOP = 0
    WATCH = 1


Found = dict[tuple[int, Channel], socket.socket]  # by the rank at the other end
Blame = tuple[int, str]  # the rank that has failed, and a description of the failure


def meet(store: Store, host: str, size: int, boot_s: float) -> tuple[Found, Blame | None]:
    """On rank 0, accept the connections of the `size` - 1 other ranks. Return them, and None.

    If a connection is missing after `boot_s` seconds, or a rank connects twice, return the
    connections so far and the rank to blame, which the caller reports to the connected ranks. Raise
    RankError if `store` cannot be written.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    with _listener(host) as listener, _Reception(listener, token, size) as reception:
        port = listener.getsockname()[1]
        try:
            store.set("links", f"{port}:{token.hex()}:{socket.gethostname()}".encode())
        except (OSError, RuntimeError) as error:
            raise RankError(f"rank 0 cannot publish its address: {error}") from error
        deadline = monotonic() + boot_s
        while reception.blame is None and len(reception.found) < 2 * (size - 1):
            left = deadline - monotonic()
            if left > 0:
                reception.serve(left)
                continue
            wanted = {(rank, channel) for rank in range(1, size) for channel in Channel}
            late, _ = min(wanted - reception.found.keys())
            reception.blame = late, f"has not connected within {boot_s:g} s"
        return reception.found, reception.blame


def call(store: Store, host: str, rank: int, boot_s: float) -> Found:
    """On any other rank, connect to rank 0 and return the connections.

    `host` is the address of rank 0. If it is empty, use the host name that rank 0 has published.
    Raise RankError if rank 0 cannot be reached within about `boot_s` seconds.
    """
    found: Found = {}
    try:
        port, token, name = store.get("links").decode().split(":", 2)
        host = host or ("localhost" if name == socket.gethostname() else name)
        for channel in Channel:
            connection = socket.create_connection((host, int(port)), timeout=boot_s)
            found[0, channel] = connection
            connection.sendall(_HELLO.pack(bytes.fromhex(token), rank, channel))
        return found
    except (OSError, RuntimeError, ValueError) as error:
        for connection in found.values():
            connection.close()
        raise RankError(f"rank 0 cannot be reached at {host}: {error}") from error


class _Reception:
    """Accepts connections, and finds out which of them come from ranks.

    All connections are read at the same time, so that a client that sends nothing delays no rank.
    """

    def __init__(self, listener: socket.socket, token: bytes, size: int) -> None:
        self.found: Found = {}
        self.blame: Blame | None = None
        self._listener, self._token, self._size = listener, token, size
        self._waiting: dict[int, tuple[socket.socket, bytearray, float]] = {}
        listener.setblocking(False)

    def __enter__(self) -> _Reception:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, _hello, _until in self._waiting.values():
            connection.close()

    def serve(self, seconds: float) -> None:
        """Handle new connections and arrived bytes; wait at most `seconds`, and at most 1 s."""
        waits = select.poll()
        for number in (self._listener.fileno(), *self._waiting):
            waits.register(number, select.POLLIN)
        for number, _ in waits.poll(max(1, int(min(seconds, 1.0) * 1000))):
            if number in self._waiting:
                self._read(number)
            else:
                self._accept()
        now = monotonic()
        for number, (connection, _hello, until) in list(self._waiting.items()):
            if now > until:
                self._waiting.pop(number)
                connection.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the client has disconnected already
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            until = monotonic() + _HELLO_S
            self._waiting[connection.fileno()] = connection, bytearray(), until

    def _read(self, number: int) -> None:
        connection, hello, _ = self._waiting[number]
        piece = b""
        try:
            piece = connection.recv(_HELLO.size - len(hello))
        except BlockingIOError:  # the system has announced bytes that it then dropped
            return
        except OSError:
            pass
        hello += piece
        if piece and len(hello) < _HELLO.size:
            return
        del self._waiting[number]
        if len(hello) < _HELLO.size or not self._is_known(connection, *_HELLO.unpack(hello)):
            connection.close()

    def _is_known(self, connection: socket.socket, token: bytes, rank: int, channel: int) -> bool:
        known = secrets.compare_digest(token, self._token)
        if not known or not 0 < rank < self._size or channel not in list(Channel):
            return False
        if (rank, channel) in self.found:
            self.blame = rank, "has connected twice: two processes have its number"
            return False
        self.found[rank, Channel(channel)] = connection
        return True


def _listener(host: str) -> socket.socket:
    """Return a socket that listens on `host` if `host` is loopback, else on all addresses."""
    if is_loopback(host):
        for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError):
                return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
            )
    return socket.create_server(("", 0), backlog=_BACKLOG)
