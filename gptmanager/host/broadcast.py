"""`Broadcast`: marks a callback of rank 0, so that the other ranks receive its answers.

The class only marks the callback: `ranked_host` decides what is sent, and when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Broadcast:
    """Wraps a callback of rank 0.

    On the other ranks, which receive the answers of rank 0's callback, `callback` is None.
    """

    def __init__(self, callback: Callable[..., Any] | None = None) -> None:
        self.callback = callback

    def __call__(self, *arguments: Any) -> Any:
        """Call the callback. Only rank 0, or a manager without ranks, calls this method."""
        return () if self.callback is None else self.callback(*arguments)
