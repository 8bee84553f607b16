"""The CPU's memory: how much is free, huge pages, and returning freed memory to the system."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import resource
import sys
from contextlib import suppress

from gptmanager.environment.machine.control_groups import memory_left

_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)  # only Linux has it


def free_memory_bytes() -> float:
    """Return how many bytes can be allocated without swapping.

    The limits of this process and of its control groups are respected.
    """
    return min(_free_in_system(), memory_left(), _free_in_process())


def give_back() -> None:
    """Return freed memory to the system. Do nothing if the C library is not glibc.

    glibc keeps freed memory in the arena of the thread that allocated the memory. After a large
    block was freed, glibc also keeps later blocks of up to that size when they are freed. In this
    way the thread of a manager's loop leaves tens of megabytes behind after it has ended.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


def zeroed_memory(num_bytes: int) -> mmap.mmap:
    """Return zeroed memory that has its own pages, huge ones if the system has them.

    Nothing is written here: the system chooses between huge and small pages at the first write.
    Raises MemoryError if the system refuses the memory.
    """
    try:
        found = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes of memory: {error}") from error
    if _HUGE_PAGES is not None:
        with suppress(OSError):  # the system has no huge pages
            found.madvise(_HUGE_PAGES)
    return found


def prefer_huge_pages(address: int, num_bytes: int) -> None:
    """Ask the system for huge pages for memory that has not been used yet.

    Attention reads blocks that are spread over the whole KV cache. With pages of 4 KiB, it waits
    for the translation of addresses. Many systems use huge pages only where a program asks for
    them. Nothing happens if huge pages do not exist or are turned off.
    """
    size, end = mmap.PAGESIZE, address + num_bytes
    first, last = -(-address // size) * size, end // size * size
    if _HUGE_PAGES is not None and first < last:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(last - first), _HUGE_PAGES
        )


def _free_in_process() -> float:
    """Return how many bytes `ulimit -v` and `ulimit -d` still permit; inf without a limit."""
    limits = {"VmSize": resource.RLIMIT_AS, "VmData": resource.RLIMIT_DATA}
    left = [math.inf]
    with suppress(OSError), open("/proc/self/status", encoding="utf-8") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            most = resource.getrlimit(limits[name])[0] if name in limits else -1
            if most != resource.RLIM_INFINITY:
                left.append(max(0, most - int(value.split()[0]) * 1024))
    return min(left)


def _free_in_system() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    # SC_AVPHYS_PAGES has free pages, but not reclaimable ones. macOS has only the number of all.
    name = next(it for it in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if it in os.sysconf_names)
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
