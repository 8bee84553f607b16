"""`HostMemory`: host tensors that a device can read and write directly."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gptmanager.lifecycle.log import logger

Register = Callable[[int, int], object]  # called with an address and a number of bytes
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context


class HostMemory:
    """An allocator of host tensors, which stay pinned until the allocator is deleted.

    torch rounds a pinned tensor up to a power of two, for example 40 GiB to 64 GiB. Here only the
    pages of the tensor are mapped and registered with CUDA. If CUDA refuses to register them, torch
    pins a tensor. `register` and `unregister` raise RuntimeError if CUDA refuses; by default they
    call the CUDA runtime through torch.
    """

    def __init__(
        self,
        device: torch.device,
        register: Register | None = None,
        unregister: Callable[[int], object] | None = None,
    ) -> None:
        self._device = device
        self._register = register or _register
        self._unregister = unregister or _unregister

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor. Its memory is not pinned if the device is the CPU."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._device.type != "cuda" or num_bytes == 0:
            is_pinned = self._device.type != "cpu"
            return torch.empty(shape, dtype=dtype, pin_memory=is_pinned)
        memory = mmap.mmap(-1, num_bytes)
        tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
        try:
            self._register(tensor.data_ptr(), num_bytes)
        except RuntimeError as error:
            logger.warning(
                "cannot register %d bytes of host memory with CUDA (%s): torch pins a "
                "power of two instead",
                *(num_bytes, error),
            )
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        # the finalizer's arguments keep the memory alive until it is unregistered
        end = weakref.finalize(self, _end, self._unregister, tensor.data_ptr(), memory)
        end.atexit = False  # at exit, CUDA unregisters the memory itself
        return tensor


def _end(unregister: Callable[[int], object], address: int, memory: mmap.mmap) -> None:
    try:
        unregister(address)
    except RuntimeError as error:
        logger.warning("host memory stays registered with CUDA: %s", error)


def _register(address: int, num_bytes: int) -> None:
    _check(_cudart().cudaHostRegister(address, num_bytes, _PORTABLE))


def _unregister(address: int) -> None:
    _check(_cudart().cudaHostUnregister(address))


def _cudart() -> Any:
    find: Any = torch.cuda.cudart
    return find()


def _check(error: Any) -> None:
    check: Any = torch.cuda.check_error
    check(error)
