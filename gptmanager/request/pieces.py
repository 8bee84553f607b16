"""Long work, written as a generator.

After each piece the caller may pause the work, or continue it on another thread.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")

PIECE = 1 << 15  # elements of an adapter that are read or copied in one piece
Pieces = Generator[None, None, Result]


def whole(pieces: Pieces[Result]) -> Result:
    """Run all pieces and return the result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: Result = end.value
            return result
