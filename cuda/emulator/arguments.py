"""One argument of a launch, checked against the parameter that it is for."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gptmanager.cuda.emulator.library import Argument, Parameter
from gptmanager.cuda.emulator.reports import EmulatorError

_WORDS = {"i": "signed integer", "u": "unsigned integer", "f": "float", "b": "bool", "V": "struct"}


def convert(value: Any, parameter: Parameter, what: str) -> Argument:
    """`value` as the kernel gets it; `EmulatorError`, beginning with `what`, if it is another type.

    CuPy would pass the bytes on: a Python int is 8 of them whatever the kernel declares.
    """
    if parameter.kind == "p":
        return _pointer(value, parameter, what)
    if not isinstance(value, np.generic):
        raise EmulatorError(
            f"{what} is the {type(value).__name__} {value!r}; pass a NumPy scalar, because the "
            f"kernel declares a {_name(parameter.kind, parameter.size)}"
        )
    fits = value.dtype.kind == parameter.kind or parameter.kind == "V"
    if value.dtype.itemsize != parameter.size or not fits:
        raise EmulatorError(
            f"{what} is a {value.dtype}, and the kernel declares a "
            f"{_name(parameter.kind, parameter.size)}"
        )
    return Argument(value.tobytes())


def _pointer(value: Any, parameter: Parameter, what: str) -> Argument:
    if isinstance(value, int | np.integer):  # an address, as CuPy takes it; 0: null
        return Argument(bytes(ctypes.c_void_p(int(value))), unknown=int(value) != 0)
    if hasattr(value, "data_ptr"):
        kind, size, address, nbytes = _tensor(value, what)
    elif isinstance(value, np.ndarray):
        if not value.flags.c_contiguous:
            raise EmulatorError(f"{what} is an array that is not contiguous")
        kind, size = value.dtype.kind, value.dtype.itemsize
        address, nbytes = value.ctypes.data, value.nbytes
    else:
        raise EmulatorError(
            f"{what} is a {type(value).__name__}; the kernel declares a pointer: pass an array"
        )
    _check_elements(kind, size, parameter, what)
    return Argument(bytes(ctypes.c_void_p(address)), memory=(address, nbytes))


def _tensor(tensor: Any, what: str) -> tuple[str, int, int, int]:
    if tensor.device.type != "cpu":
        raise EmulatorError(f"{what} is a tensor on {tensor.device}; the emulator runs on the CPU")
    if not tensor.is_contiguous():
        raise EmulatorError(f"{what} is a tensor that is not contiguous")
    kind = "f" if tensor.dtype.is_floating_point else "i"
    return kind, tensor.element_size(), tensor.data_ptr(), tensor.nbytes


def _check_elements(kind: str, size: int, parameter: Parameter, what: str) -> None:
    """Check the size and kind of elements; bits may be passed as integers of the same size."""
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
            f"{what} holds {size}-byte {_WORDS.get(kind, kind)}s; declared: {declared}"
        )


def _name(kind: str, size: int) -> str:
    return f"{size}-byte {_WORDS[kind]}"
