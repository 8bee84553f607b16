"""`Deferred`: a value of a state that is computed only if the state is serialized.

A state is often copied, but rarely serialized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Deferred:
    """A value that `make()` returns. All calls of `make` return the same value.

    `num_values` is the approximate number of values that stay in memory until `make` is called.
    """

    __slots__ = ("make", "num_values")

    def __init__(self, make: Callable[[], Any], num_values: int) -> None:
        self.make = make
        self.num_values = num_values


def beginning(items: list[Any]) -> Any:
    """Return the current items of a list as a `Deferred`. Only append to the list afterwards."""
    length = len(items)
    return Deferred(lambda: items[:length], length)
