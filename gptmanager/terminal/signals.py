"""Signals that end a command: Ctrl-C, SIGTERM and SIGHUP.

While modules are imported, and while a server does not serve, no request depends on the process, so
a signal ends it at once. It raises no exception then, because some imports would swallow it. A
handler is needed because the first process of a container ignores SIGTERM without one. While a
command runs, the first signal raises KeyboardInterrupt, so that requests get their final responses
and files are completed. This module imports little, because a handler is set before anything else
is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP has arrived. If a rank dies, launchers send SIGTERM to the other ranks."""


def leave(number: int, _: Any) -> None:
    """Exit at once with status 130 for SIGINT, 143 for SIGTERM and 129 for SIGHUP."""
    _leave(number, 128 + number)


def leave_server(number: int, _: Any) -> None:
    """Exit at once with status 130 for SIGINT, and with 0 for other signals."""
    _leave(number, 130 if number == signal.SIGINT else 0)


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a command: without SIGHUP if it is ignored, as under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *(() if is_ignored else (signal.SIGHUP,))]


def end_message(number: int) -> str:
    """Return the message of a command that a signal has ended."""
    return "interrupted" if number == signal.SIGINT else "terminated"


@contextlib.contextmanager
def raising_signals() -> Iterator[list[int]]:
    """Let the first signal in the block raise KeyboardInterrupt, and add its number to the list.

    SIGTERM and SIGHUP raise `Terminated`. The second signal ends the process at once.
    """
    arrived: list[int] = []

    def interrupt(number: int, _: Any) -> None:
        arrived.append(number)
        for one in ending_signals():
            signal.signal(one, leave)
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    with handled(interrupt):
        yield arrived


@contextlib.contextmanager
def handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Let `handler` handle the signals of `ending_signals` in the block, if on the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in ending_signals()}
    try:
        yield
    finally:
        for number, other in before.items():
            signal.signal(number, other)


def _leave(number: int, status: int) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"gptmanager: %b\n" % end_message(number).encode())
    os._exit(status)
