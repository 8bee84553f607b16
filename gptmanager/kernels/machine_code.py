"""A body, which runs in `Team`'s threads, as machine code that is kept on disk."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import cast

import numpy as np
from numba import cfunc, types


@functools.cache
def compiled(body: Callable[[int], None]) -> int:
    """Address of the machine code, from Numba's cache on disk where a folder can be written."""
    signature = types.void(types.int64)
    try:
        address = cfunc(signature, cache=True)(_stamped(body)).address
    except (RuntimeError, OSError):  # no folder can be written, or the disk is full
        address = cfunc(signature)(body).address
    return cast(int, address)


def _stamped(body: Callable[[int], None]) -> FunctionType:
    """The same function under a name that changes with any source in this folder and its own, and
    with the layout of records that it reads.

    Numba's cache looks at the file of the body alone, not at those of the words it is made of.
    """
    digest = hashlib.sha256()
    folders = {Path(__file__).parent, Path(body.__code__.co_filename).parent}
    for source in sorted(source for folder in folders for source in folder.glob("*.py")):
        digest.update(source.read_bytes())
    layouts = [value for value in body.__globals__.values() if isinstance(value, np.dtype)]
    digest.update(repr(layouts).encode())
    name = f"{body.__name__}_{digest.hexdigest()[:12]}"
    stamped = FunctionType(body.__code__, body.__globals__, name)
    stamped.__qualname__ = name
    return stamped
