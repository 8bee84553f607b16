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
from typing import Any, NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP has arrived. If a rank dies, launchers send SIGTERM to the other ranks."""


def leave(number: int, _: Any) -> None:
    """End the process at once by the signal that has arrived."""
    _print_end(number)
    end_by(number)


def leave_server(number: int, _: Any) -> None:
    """End the process at once: by SIGINT, or with status 0 for other signals."""
    _print_end(number)
    if number == signal.SIGINT:
        end_by(number)
    os._exit(0)


def end_by(number: int) -> NoReturn:
    """End the process by a signal, as if it had no handler. Shells report status 128 + `number`.

    If a command exits with a status after Ctrl-C, a shell assumes that it has handled the signal,
    and continues the script or the loop that runs the command. The first process of a container
    does not end by its own signals: it exits with the status.
    """
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)


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


def _print_end(number: int) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"gptmanager: %b\n" % end_message(number).encode())
