"""`CachedBlocks`: which keys and values of a loop are stale, because the weights have changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class CachedBlocks:
    """Collects the reasons to clear the cached blocks with the next intake."""

    def __init__(self) -> None:
        self._clears: deque[None] = deque()  # any thread may append
        self._recomputes = False
        self._version: Callable[[], int] = int
        self._last_version = 0

    def clear(self) -> None:
        """Clear cached blocks with the next intake. Any thread may call this."""
        self._clears.append(None)

    def follow_weights(self, version: Callable[[], int]) -> None:
        """Clear cached blocks whenever `version()` has changed, because new weights were loaded."""
        self._version, self._last_version = version, int(version())

    def recompute(self) -> None:
        """Let the running requests compute their contexts again. Called on the loop's thread."""
        self._recomputes = True

    def take_recompute(self) -> bool:
        """Return whether running requests compute their contexts again."""
        recomputes, self._recomputes = self._recomputes, False
        return recomputes

    def take_clears(self) -> bool:
        """Return whether the next intake clears the cached blocks."""
        version, count = int(self._version()), len(self._clears)
        clears = count > 0 or version != self._last_version
        self._last_version = version
        for _ in range(count):
            self._clears.popleft()
        return clears
