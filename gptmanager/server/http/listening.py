"""Binds the socket at which a server listens: a port, or a Unix socket."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from gptmanager.errors import ConfigError, quoted_path

_ANSWER_S = 1.0


@contextlib.contextmanager
def listening(host: str, port: int, uds: Path | None) -> Iterator[socket.socket]:
    """Yield a bound socket that does not listen yet; at the end, remove the file of `uds`.

    Raises ConfigError if the port or the path cannot be used.
    """
    with contextlib.closing(bind(host, port) if uds is None else bind_path(uds)) as listener:
        own = None if uds is None else _inode(uds)
        try:
            yield listener
        finally:
            if uds is not None and _inode(uds) == own:  # else another server has replaced it
                uds.unlink(missing_ok=True)


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """Return a bound socket that does not listen yet. Raises ConfigError if it cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only if IPPROTO_TCP is passed here. With that algorithm, an
    # answer waits 40 ms for the client's delayed acknowledgement of its headers.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError, TypeError, ValueError) as error:  # names are encoded
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host {host} {option} {port} cannot be used: {reason}") from error
    return listener


def bind_path(path: Path) -> socket.socket:
    """Return a socket bound to `path`. The socket file of a stopped server is replaced.

    Raises ConfigError if the path cannot be used, for instance because another file is there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(os.fspath(path))
    except (OSError, ValueError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--uds {quoted_path(path)} cannot be used: {reason}") from error
    return listener


def _remove_stale(path: Path) -> None:
    """Remove the socket file that a stopped server left behind, if there is one.

    Raises OSError for the socket of a running server, and for another kind of file.
    """
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(0, "there is something else at this path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_ANSWER_S)
        try:
            client.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(0, "another server listens at it")


def address_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a bound socket, without a slash at its end."""
    if listener.family == socket.AF_UNIX:
        return f"{scheme}://localhost"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
