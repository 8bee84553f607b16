"""Work that is done in pieces: who does it may rest between two, or leave the next to another."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")

PIECE = 1 << 15  # numbers of an adapter that are read, or moved, at once
Pieces = Generator[None, None, Result]


def whole(pieces: Pieces[Result]) -> Result:
    """All of it at once."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: Result = end.value
            return result
