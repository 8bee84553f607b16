"""`Deferred`: a value of a state that is worked out only if the state is written.

A state is copied often and written once, if ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Deferred:
    """`make()` gives the value, and the same one whenever it is called.

    `num_values`: how many values it keeps alive until then, about.
    """

    __slots__ = ("make", "num_values")

    def __init__(self, make: Callable[[], Any], num_values: int) -> None:
        self.make = make
        self.num_values = num_values


def beginning(items: list[Any]) -> Any:
    """The items that a list has now; nothing but appending may happen to it."""
    length = len(items)
    return Deferred(lambda: items[:length], length)
