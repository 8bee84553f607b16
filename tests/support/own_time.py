"""A clock for ranks in one process, whose limits are a part of a second in some tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

_MODULES = ("lifecycle.clock", "ranks.meeting", "ranks.watch")
_LOOK_S = 0.002
_MOST_S = 0.01  # that pass between two looks


@contextmanager
def own_time() -> Iterator[None]:
    """Let the clock of ranks stand still while a busy machine does not run this process.

    After such a pause a rank would find that no other one had been heard of in time.
    """
    now_s, ended = [time.monotonic()], threading.Event()

    def count() -> None:
        last = time.monotonic()
        while not ended.wait(_LOOK_S):
            now = time.monotonic()
            now_s[0] += min(now - last, _MOST_S)
            last = now

    counting = threading.Thread(target=count, daemon=True)
    counting.start()
    try:
        with ExitStack() as patches:
            for module in _MODULES:
                patches.enter_context(
                    mock.patch(f"gptmanager.{module}.monotonic", lambda: now_s[0])
                )
            yield
    finally:
        ended.set()
        counting.join()
