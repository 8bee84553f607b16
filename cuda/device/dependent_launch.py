"""`DependentLaunch`: launches that let a kernel begin before the previous kernel has ended.

CuPy does not support such launches. Therefore the driver is called through cuda-bindings, with
programmatic stream serialization (CUDA programming guide, "Programmatic Dependent Launch").
The comment of `wait_for_previous` in intrinsics.cuh explains why this is correct.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from gptmanager.lifecycle.log import logger

_OLDEST_DRIVER = 12030  # from this version on, CUDA graphs preserve such launches
_OLDEST_DEVICE = 9  # major compute capability
_CODES = {"i": "i4x", "u": "I4x", "f": "f4x"}  # 4 bytes, padded to 8


def find_driver(major: int) -> Any:
    """Return `cuda.bindings.driver`, or None if the device does not support such launches.

    Also return None, with a log line, if cuda-bindings cannot be used or the driver is too old.
    `major` is the first number of the device's compute capability.
    """
    if major < _OLDEST_DEVICE:
        return None
    try:
        driver = import_module("cuda.bindings.driver")  # mypy would look for it in our `cuda`
        error, version = driver.cuDriverGetVersion()
    except Exception as missing:  # not installed, or for another CUDA version than the driver
        logger.info("kernels do not begin early: cuda-bindings cannot be used (%s)", missing)
        return None
    if error != driver.CUresult.CUDA_SUCCESS or version < _OLDEST_DRIVER:
        logger.info(
            "kernels do not begin early: this needs a driver for CUDA 12.3 or later, got %d.%d",
            *(version // 1000, version % 1000 // 10),
        )
        return None
    return driver


class DependentLaunch:
    """One kernel, launched through the driver. Only one thread at a time may launch it."""

    def __init__(self, driver: Any, name: str, function: int) -> None:
        attribute = driver.CUlaunchAttribute()
        ids = driver.CUlaunchAttributeID
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        self._config = driver.CUlaunchConfig()
        self._config.attrs = [attribute]
        self._config.numAttrs = 1
        self._driver = driver
        self._name = name
        self._function = driver.CUfunction(function)
        self._format = ""
        self._values = self._addresses = ctypes.create_string_buffer(0)

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        values: Sequence[int | np.generic],
        shared_mem: int,
        stream: int,
    ) -> None:
        """Launch the kernel. Raise RuntimeError if the driver refuses.

        `values` are the kernel's arguments: addresses as Python ints, all others as NumPy scalars
        of the types of the kernel's parameters.
        """
        if not self._format:
            self._lay_out(values)
        struct.pack_into(self._format, self._values, 0, *values)
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = (*block, 1, 1)[:3]
        config.sharedMemBytes = shared_mem
        config.hStream = self._driver.CUstream(stream)
        addresses = ctypes.addressof(self._addresses)
        (error,) = self._driver.cuLaunchKernelEx(config, self._function, addresses, 0)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{self._name} was not launched: {error.name}")

    def _lay_out(self, values: Sequence[int | np.generic]) -> None:
        """Allocate 8 bytes per value, and an array of the addresses of these bytes."""
        self._format = "=" + "".join(map(_code, values))
        self._values = ctypes.create_string_buffer(struct.calcsize(self._format))
        first = ctypes.addressof(self._values)
        places = [first + 8 * index for index in range(len(values))]
        self._addresses = ctypes.create_string_buffer(struct.pack(f"={len(values)}Q", *places))


def _code(value: int | np.generic) -> str:
    if isinstance(value, np.generic) and value.itemsize == 4:
        return _CODES[value.dtype.kind]
    return "Q"  # an address, or a size
