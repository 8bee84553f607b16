"""The C library's heap: what has been freed goes back to the system.

glibc keeps freed memory in the arena of the thread that asked for it, and once a large block has
been freed it keeps what is no larger for the next one: tens of megabytes that a loop's thread
held, when the thread is long gone.
"""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Return the free pages of every arena; does nothing where the C library is not glibc."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
