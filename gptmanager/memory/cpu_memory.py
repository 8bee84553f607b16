"""The CPU's memory: how much is free, and what has been freed given back."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")


def free_memory_bytes() -> float:
    """Memory that a new allocation could get without swapping, within a container's limit."""
    return min(_free_in_system(), _free_in_container())


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


def _free_in_container() -> float:
    """Return the bytes free below the container's limit.

    Pages of files, such as a checkpoint's, count as free: the system drops them when needed.
    """
    try:
        limit = (_GROUP / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return math.inf
        used = int((_GROUP / "memory.current").read_text(encoding="ascii"))
        lines = (_GROUP / "memory.stat").read_text(encoding="ascii").splitlines()
        counts = dict(line.split() for line in lines)
        pages = int(counts["active_file"]) + int(counts["inactive_file"])
        return max(0, int(limit) - used + pages)
    except (OSError, ValueError, KeyError):  # no control groups of the second version
        return math.inf


def _free_in_system() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the free pages are the best that POSIX offers
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
