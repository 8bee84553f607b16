"""The CPU's memory: how much is free, and what has been freed given back."""

from __future__ import annotations

import ctypes
import os
import sys

from gptmanager.environment.control_groups import memory_left


def free_memory_bytes() -> float:
    """Return the bytes that a new allocation could get without swapping, within the limits of this
    process's control groups.
    """
    return min(_free_in_system(), memory_left())


def give_back() -> None:
    """Return the free pages of every arena; does nothing where the C library is not glibc.

    That keeps freed memory in the arena of the thread that asked for it, and once a large block has
    been freed it keeps what is no larger for the next one: tens of megabytes that a loop's thread
    held, when the thread is long gone.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


def _free_in_system() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the free pages are the best that POSIX offers
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
