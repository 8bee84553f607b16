"""Check an argument of a launch against the parameter that the kernel declares, and convert it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gptmanager.cuda.emulator.library import Argument, Parameter
from gptmanager.cuda.emulator.reports import EmulatorError

_WORDS = {"i": "signed integer", "u": "unsigned integer", "f": "float", "b": "bool", "V": "struct"}


def convert(value: Any, parameter: Parameter, what: str) -> Argument:
    """Return `value` as an argument of the kernel. Raises `EmulatorError` if its type does not fit.

    The error message begins with `what`. CuPy does not check types: it passes a Python int as 8
    bytes, whatever type the kernel declares.
    """
    if parameter.kind == "p":
        return _pointer(value, parameter, what)
    if not isinstance(value, np.generic):
        raise EmulatorError(
            f"{what} must be a NumPy scalar, because the kernel declares "
            f"{_name(parameter.kind, parameter.size)}, got the {type(value).__name__} {value!r}"
        )
    fits = value.dtype.kind == parameter.kind or parameter.kind == "V"
    if value.dtype.itemsize != parameter.size or not fits:
        raise EmulatorError(
            f"{what} must be {_name(parameter.kind, parameter.size)} as the kernel declares, "
            f"got {value.dtype}"
        )
    return Argument(value.tobytes())


def _pointer(value: Any, parameter: Parameter, what: str) -> Argument:
    if isinstance(value, int | np.integer):  # an address, as in CuPy; 0: null
        return Argument(bytes(ctypes.c_void_p(int(value))), unknown=int(value) != 0)
    if hasattr(value, "data_ptr"):
        kind, size, address, nbytes = _tensor(value, what)
    elif isinstance(value, np.ndarray):
        if not value.flags.c_contiguous:
            raise EmulatorError(f"{what} must be a C-contiguous array")
        kind, size = value.dtype.kind, value.dtype.itemsize
        address, nbytes = value.ctypes.data, value.nbytes
    else:
        raise EmulatorError(
            f"{what} must be an array, because the kernel declares a pointer, "
            f"got a {type(value).__name__}"
        )
    _check_elements(kind, size, parameter, what)
    return Argument(bytes(ctypes.c_void_p(address)), memory=(address, nbytes))


def _tensor(tensor: Any, what: str) -> tuple[str, int, int, int]:
    if tensor.device.type != "cpu":
        raise EmulatorError(f"{what} must be a tensor on the CPU, got one on {tensor.device}")
    if not tensor.is_contiguous():
        raise EmulatorError(f"{what} must be a contiguous tensor")
    kind = "f" if tensor.dtype.is_floating_point else "i"
    return kind, tensor.element_size(), tensor.data_ptr(), tensor.nbytes


def _check_elements(kind: str, size: int, parameter: Parameter, what: str) -> None:
    """Check the size and the kind of elements; bfloat16 may also be passed as integers."""
    if (
        parameter.pointee_size == 0
        or parameter.pointee_kind == "V"
        and size <= parameter.pointee_size
    ):
        return  # void, or a struct made of elements
    same_kind = (kind == "f") == (parameter.pointee_kind == "f")
    if size != parameter.pointee_size or not same_kind:
        declared = _name(parameter.pointee_kind, parameter.pointee_size)
        raise EmulatorError(
            f"{what} must be an array, each element {declared} as the kernel declares, "
            f"got {size}-byte {_WORDS.get(kind, kind)}s"
        )


def _name(kind: str, size: int) -> str:
    """Return the name of a type with an article, such as "an 8-byte float"."""
    return f"{'an' if str(size)[0] == '8' else 'a'} {size}-byte {_WORDS[kind]}"
