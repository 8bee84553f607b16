"""`CacheClears`: whether the KV cache must forget what it holds.

Either the host asks for it, or the weights have been replaced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class CacheClears:
    """What is asked for here, the next intake says once."""

    def __init__(self) -> None:
        self._asked: deque[None] = deque()  # any thread's
        self._weights_version: Callable[[], int] = int
        self._last_version = 0

    def ask(self) -> None:
        """From any thread."""
        self._asked.append(None)

    def follow_weights(self, version: Callable[[], int]) -> None:
        """`version()` changes when weights have been replaced."""
        self._weights_version, self._last_version = version, int(version())

    def take(self) -> bool:
        version, count = int(self._weights_version()), len(self._asked)
        clears = count > 0 or version != self._last_version
        self._last_version = version
        for _ in range(count):
            self._asked.popleft()
        return clears

    def release(self) -> None:
        """Let go of the weights."""
        self._weights_version = int
