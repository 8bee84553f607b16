"""`HostMemory`: tensors of the host that a device reads and writes where they are.

Decides how memory is pinned. Does not know its content.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gptmanager.lifecycle.log import logger

Register = Callable[[int, int], object]  # address, bytes
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context


class HostMemory:
    """Memory for one owner, pinned as long as that owner lives.

    torch rounds a pinned tensor up to a power of two: of 40 GiB it takes 64. Here the pages that a
    tensor needs are mapped and registered with CUDA, and no more. Where CUDA refuses that, torch
    pins it. `register` and `unregister` raise where CUDA refuses; None: those of torch's CUDA.
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
        """A tensor of whatever values; on a CPU an ordinary one."""
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
                "%d bytes of the host cannot be registered with CUDA (%s): torch pins them, in a "
                "power of two",
                *(num_bytes, error),
            )
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        # the arguments hold the memory until it is registered no longer
        end = weakref.finalize(self, _end, self._unregister, tensor.data_ptr(), memory)
        end.atexit = False  # the end of the process does the same, in the right order
        return tensor


def _end(unregister: Callable[[int], object], address: int, memory: mmap.mmap) -> None:
    try:
        unregister(address)
    except RuntimeError as error:
        logger.warning("memory of the host stays registered with CUDA: %s", error)


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
