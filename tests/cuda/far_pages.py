"""Tensors of more elements than an int can count, of which only the last are in memory."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from separate_device import DeviceTensor

FAR = 2**31
_NORESERVE = 0x4000  # no memory for what is not written to; `mmap` names it from Python 3.13 on


def far_pages(machine, own, num_far):
    """Return `own [pages, ...]` behind `num_far` other pages, which only a GPU has in memory."""
    shape = (num_far + len(own), *own.shape[1:])
    size = int(np.prod(shape)) * own.itemsize
    if machine.tensor(own).device.type == "cuda":
        if 2 * size > torch.cuda.mem_get_info()[0]:
            pytest.skip(f"this GPU has not twice {size} bytes")
        pages = torch.empty(shape, dtype=own.dtype, device="cuda")
        pages[num_far:] = own.cuda()
        return pages
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, size, flags=flags)
    pages = torch.frombuffer(memory, dtype=torch.uint8).view(own.dtype).view(shape)
    pages[num_far:] = own
    return DeviceTensor(pages)
