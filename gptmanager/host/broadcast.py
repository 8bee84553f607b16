"""`Broadcast`: a callback whose answers rank 0's manager sends to the other ranks.

It is only a mark: what is sent, and when, the host of a rank decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Broadcast:
    """`callback`: of rank 0; None: of the others, which take what rank 0 was answered."""

    def __init__(self, callback: Callable[..., Any] | None = None) -> None:
        self.callback = callback

    def __call__(self, *arguments: Any) -> Any:
        """Call the callback, as a manager without ranks or rank 0 does."""
        return () if self.callback is None else self.callback(*arguments)
