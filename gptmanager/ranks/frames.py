"""`Frames`: sends and receives messages over a socket. Each message has a kind and a payload.

This module defines the format on the wire, and does not interpret the messages.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from gptmanager.errors import RankError

_HEADER = struct.Struct("<QB")  # number of payload bytes, kind
_MOST_BYTES = 1 << 36  # enough for adapters' weights; memory grows only as bytes arrive
_AT_ONCE = 1 << 16
_SMALL = 1 << 12
_LARGE = 1 << 20


class Frame(NamedTuple):
    """One message. `kind` is from 0 to 255; sender and receiver agree on its meaning."""

    kind: int
    payload: bytes


class Wakener:
    """A bell that interrupts a `Frames` method while it waits. Any thread may call `ring`."""

    def __init__(self) -> None:
        self._reading, self._writing = socket.socketpair()
        for end in (self._reading, self._writing):
            end.setblocking(False)

    def fileno(self) -> int:
        return self._reading.fileno()

    def ring(self) -> None:
        with suppress(OSError):  # the socket is closed, or full of bytes from earlier calls
            self._writing.send(b"!")

    def clear(self) -> None:
        with suppress(OSError):
            while self._reading.recv(256):
                pass

    def close(self) -> None:
        self._reading.close()
        self._writing.close()


class Frames:
    """The messages of one connection.

    While `send` or `receive` waits, it calls `between()` every `pause_s` seconds and whenever
    `wakener` is rung. If `between()` raises an error, the wait ends with this error.
    """

    def __init__(
        self,
        connection: socket.socket,
        wakener: Wakener | None,
        between: Callable[[], None],
        pause_s: float,
    ) -> None:
        connection.setblocking(False)
        with suppress(OSError):  # not a TCP connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._wakener = wakener
        self._between = between
        self._pause_ms = max(1, int(pause_s * 1000))
        self._buffer = bytearray()
        self._wait_in = _poll(select.POLLIN, connection, wakener)
        self._wait_out = _poll(select.POLLOUT, connection, wakener)

    def send(self, kind: int, payload: bytes | bytearray | memoryview) -> None:
        """Send a message.

        Raise EOFError if the other end is closed, and RankError if the message is too long.
        """
        if len(payload) > _MOST_BYTES:
            raise RankError(
                f"a message has {len(payload)} bytes, but must have at most {_MOST_BYTES}"
            )
        header = _HEADER.pack(len(payload), kind)
        if len(payload) <= _AT_ONCE:
            self._send(memoryview(header + payload))
        else:
            self._send(memoryview(header))
            self._send(memoryview(payload))

    def receive(self, *, returns_when_rung: bool = False) -> Frame | None:
        """Return the next message. Raise EOFError if the other end is closed.

        With `returns_when_rung`, return None when the wakener is rung.
        """
        while (frame := self._taken()) is None:
            if self._read(min(max(_SMALL, self._missing()), _LARGE)):
                continue
            if self._rest(self._wait_in) and returns_when_rung:
                return None
        return frame

    def poll(self) -> Frame | None:
        """Return the next message if it has arrived, else None, without waiting.

        Raise EOFError if the other end is closed.
        """
        frame = self._taken()
        if frame is None and self._read(_AT_ONCE):
            frame = self._taken()
        return frame

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def address(self) -> str:
        """This end's IP address, at which the machine of the other end can reach this end."""
        # an IPv4 address may be written as an IPv6 one
        return str(self._connection.getsockname()[0]).removeprefix("::ffff:")

    def close(self) -> None:
        self._connection.close()

    def _send(self, data: memoryview) -> None:
        while data:
            try:
                data = data[self._connection.send(data) :]
            except BlockingIOError:
                self._rest(self._wait_out)
            except OSError as error:
                raise EOFError(str(error)) from error

    def _read(self, size: int) -> bool:
        """Read at most `size` bytes. Return whether any had arrived."""
        try:
            piece = self._connection.recv(size)
        except BlockingIOError:
            return False
        except OSError as error:
            raise EOFError(str(error)) from error
        if not piece:
            raise EOFError("the connection was closed")
        self._buffer += piece
        return True

    def _missing(self) -> int:
        """Return how many bytes of the current message are missing; 0 before its size is known."""
        if len(self._buffer) < _HEADER.size:
            return 0
        size: int = _HEADER.unpack_from(self._buffer)[0]
        return size + _HEADER.size - len(self._buffer)

    def _taken(self) -> Frame | None:
        if len(self._buffer) < _HEADER.size:
            return None
        size, kind = _HEADER.unpack_from(self._buffer)
        if size > _MOST_BYTES:
            raise EOFError(
                f"a message of {size} bytes is over the limit of {_MOST_BYTES}: the stream of "
                "messages is broken"
            )
        end = _HEADER.size + size
        if len(self._buffer) < end:
            return None
        payload = bytes(memoryview(self._buffer)[_HEADER.size : end])
        del self._buffer[:end]
        return Frame(kind, payload)

    def _rest(self, waits: select.poll) -> bool:
        """Wait for the socket or the wakener, for one pause at most.

        Return whether the wakener was rung.
        """
        events = waits.poll(self._pause_ms)
        bell = self._wakener
        rung = bell is not None and any(number == bell.fileno() for number, _ in events)
        if bell is not None and rung:
            bell.clear()
        if rung or not events:
            self._between()
        return rung


def _poll(event: int, connection: socket.socket, wakener: Wakener | None) -> select.poll:
    waits = select.poll()
    waits.register(connection, event)
    if wakener is not None:
        waits.register(wakener.fileno(), select.POLLIN)
    return waits
