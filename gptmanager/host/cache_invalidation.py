"""`CacheInvalidation`: whether the next intake clears cached blocks, or recomputes contexts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class CacheInvalidation:
    """Collects the reasons why the next intake (the input of an iteration) invalidates the cache.

    New weights make cached blocks stale, and may make running requests recompute their contexts.
    """

    def __init__(self) -> None:
        self._clears: deque[None] = deque()  # any thread may append
        self._recomputes = False
        self.follow_weights(int)  # always 0

    def clear(self) -> None:
        """Clear cached blocks with the next intake. Any thread may call this."""
        self._clears.append(None)

    def recompute(self) -> None:
        """Make running requests compute their contexts again. Called on the loop's thread."""
        self._recomputes = True

    def follow_weights(self, version: Callable[[], int]) -> None:
        """Clear cached blocks whenever `version()` has changed, because new weights were loaded."""
        self._version = version
        self._last_version = int(version())  # at the last intake

    def take(self) -> tuple[bool, bool]:
        """Return whether to clear cached blocks, and whether to recompute. Forget the reasons."""
        num_clears, version, recomputes = len(self._clears), self._version(), self._recomputes
        is_stale = num_clears > 0 or version != self._last_version
        for _ in range(num_clears):
            self._clears.popleft()
        self._last_version, self._recomputes = int(version), False
        return is_stale, recomputes
