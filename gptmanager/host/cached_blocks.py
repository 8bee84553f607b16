"""`CachedBlocks`: the reasons to clear cached blocks, or to compute contexts with new weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class CachedBlocks:
    """Collects the reasons to clear cached blocks, or to compute contexts again.

    `clears` and `recomputes` are the reasons that the next intake (the input of a step) must
    contain. `version()` returns the version of the weights, and `last_version` is the version at
    the last intake. All four are plain attributes, because a host reads them in each step.
    """

    def __init__(self) -> None:
        self.clears: deque[None] = deque()  # any thread may append
        self.recomputes = False
        self.version: Callable[[], int] = int
        self.last_version = 0

    def clear(self) -> None:
        """Clear cached blocks with the next intake. Any thread may call this."""
        self.clears.append(None)

    def recompute(self) -> None:
        """Make running requests compute their contexts again. Called on the loop's thread."""
        self.recomputes = True

    def follow_weights(self, version: Callable[[], int]) -> None:
        """Clear cached blocks whenever `version()` has changed, because new weights were loaded."""
        self.version, self.last_version = version, int(version())

    def settle(self) -> None:
        """Record that the next intake contains all reasons."""
        self.last_version, self.recomputes = int(self.version()), False
        for _ in range(len(self.clears)):
            self.clears.popleft()
