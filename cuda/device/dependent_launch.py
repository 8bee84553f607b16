"""Launches that let a kernel begin while the one before it ends: CuPy has none, the driver has.

The driver is asked through cuda-bindings, with programmatic stream serialization (CUDA programming
guide, "Programmatic Dependent Launch"). Why this is right: `wait_for_previous` in intrinsics.cuh.
It knows nothing of kernels.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from gptmanager.lifecycle.log import logger

_OLDEST_DRIVER = 12030  # of which recordings keep such launches as they are
_OLDEST_DEVICE = 9
_CODES = {"i": "i4x", "u": "I4x", "f": "f4x"}  # of 4 bytes in 8


def find_driver(major: int) -> Any:
    """`cuda.bindings.driver`, for a device of compute capability `major`; None if there is no way.

    The log tells why.
    """
    if major < _OLDEST_DEVICE:
        return None
    try:
        driver = import_module("cuda.bindings.driver")  # mypy would look for it in our `cuda`
        error, version = driver.cuDriverGetVersion()
    except Exception as missing:  # not installed, or of another CUDA than the driver
        logger.info("kernels do not begin early: cuda-bindings is not there (%s)", missing)
        return None
    if error != driver.CUresult.CUDA_SUCCESS or version < _OLDEST_DRIVER:
        logger.info("kernels do not begin early: the driver is of CUDA %d", version // 1000)
        return None
    return driver


class DependentLaunch:
    """One function of the driver. Like the stream it launches on, for one thread at a time."""

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
        """`values`: addresses as Python ints, and NumPy scalars of the declared types.

        RuntimeError where the driver refuses.
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
        """A place of 8 bytes for each value, and the places' addresses. The driver copies."""
        self._format = "=" + "".join(map(_code, values))
        self._values = ctypes.create_string_buffer(struct.calcsize(self._format))
        first = ctypes.addressof(self._values)
        places = [first + 8 * index for index in range(len(values))]
        self._addresses = ctypes.create_string_buffer(struct.pack(f"={len(values)}Q", *places))


def _code(value: int | np.generic) -> str:
    if isinstance(value, np.generic) and value.itemsize == 4:
        return _CODES[value.dtype.kind]
    return "Q"  # an address, or a size
