"""Effects of Ctrl-C in a chat: while a message is typed, and while an answer is generated."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def each_interrupt_raises() -> Iterator[None]:
    """Let each Ctrl-C in the block raise KeyboardInterrupt, however many there are in a chat."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first Ctrl-C in the block. The second Ctrl-C raises KeyboardInterrupt.

    The first Ctrl-C raises no exception, so the block runs to its end.
    """
    before = signal.getsignal(signal.SIGINT)

    def first(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
