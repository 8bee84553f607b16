"""NumPy arrays for kernels, between guard pages. New elements are NaN, not 0.

The functions have the names of CuPy's functions, so that a test can use either module.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gptmanager.cuda.emulator.reports import EmulatorError

_PAGE = mmap.PAGESIZE
_ALIGNMENT = 16
_POISON = 0xFF  # NaN in every floating-point type, -1 as an integer
_NO_ACCESS = 0

Array = npt.NDArray[Any]


def empty(shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> Array:
    """Return a C-contiguous array of NaN (-1 for signed integers).

    After padding to a multiple of 16 bytes, the array ends at a page that cannot be accessed.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    aligned = -(-size // _ALIGNMENT) * _ALIGNMENT
    pages = -(-aligned // _PAGE) * _PAGE
    memory = mmap.mmap(-1, pages + 2 * _PAGE)
    flat = np.frombuffer(memory, dtype=np.uint8)
    begin = flat.ctypes.data
    for guard in (begin, begin + _PAGE + pages):
        _protect(guard)
    start = _PAGE + pages - aligned
    array = flat[start : start + size]
    array.fill(_POISON)
    return array.view(dtype).reshape(shape)


def asarray(values: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> Array:
    """Return a copy of `values` with guard pages."""
    given = np.asarray(values, dtype=dtype)
    array = empty(given.shape, given.dtype)
    array[...] = given
    return array


def asnumpy(array: Array) -> Array:
    """Return a copy without guard pages."""
    return np.array(array)


def _protect(page: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(_PAGE), _NO_ACCESS):
        raise EmulatorError(f"mprotect failed: errno {ctypes.get_errno()}")
