"""Huge pages for memory on the CPU that is read all the time."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # only Linux has it


def prefer_huge_pages(tensor: Tensor) -> None:
    """Ask the system to back the memory of a new, contiguous tensor on the CPU with huge pages.

    With pages of 4 KiB, attention waits for the translation of addresses: it reads blocks that are
    spread over the whole KV cache. Many systems use huge pages only where a program asks for them.
    Nothing happens where they do not exist or are turned off.
    """
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if _ADVICE is not None and first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _ADVICE)
