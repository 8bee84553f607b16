"""`Deferred`: a part of a state that is computed only when the state is serialized.

States are often copied, but rarely serialized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Deferred:
    """A value that `make()` computes. All calls of `make` return equal values.

    `num_values` is the approximate number of values that `make` keeps in memory.
    """

    __slots__ = ("make", "num_values")

    def __init__(self, make: Callable[[], Any], num_values: int) -> None:
        self.make = make
        self.num_values = num_values


def beginning(items: list[Any]) -> Any:
    """Return a `Deferred` of the current items of a list.

    After this call, the list may grow, but its current items must not change.
    """
    length = len(items)
    return Deferred(lambda: items[:length], length)
