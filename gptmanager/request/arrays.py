"""A host's values as NumPy arrays, whatever their type: tensors, arrays, numbers or nested lists.

For any other value, every `read_` function raises InvalidRequestError with the tensor's name and
what is wrong.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.ma import MaskedArray

from gptmanager.errors import InvalidRequestError

# tensors with numbers that only the executor uses
ROW_INPUTS = frozenset({"embedding_bias", "prompt_embedding_table", "draft_logits"})
_MOST_ROW_ELEMENTS, _MOST_ELEMENTS = 2**28, 2**22


def refuse_masked(tensors: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for a masked array: any conversion would drop its mask."""
    for name, value in tensors.items():
        if issubclass(type(value), MaskedArray):  # `isinstance` reads a host's `__class__`
            raise InvalidRequestError(
                f"{name} is a masked array, but masks are not supported: pass an array without "
                "one, such as array.filled(0) or array.compressed()"
            )


def is_too_large(name: str, value: Any) -> bool:
    """Return whether an array is too large to read. A view can be large without using memory."""
    if not isinstance(value, (torch.Tensor, np.ndarray)):
        return False
    return math.prod(value.shape) > _most_elements(name)


def _most_elements(name: str) -> int:
    return _MOST_ROW_ELEMENTS if name in ROW_INPUTS else _MOST_ELEMENTS


def read_array(name: str, value: Any, expected: str = "numbers") -> np.ndarray:
    """Return a value as an array of numbers or bools, or of objects if no dtype fits its integers.

    `expected`: what the error for another value asks for.
    """
    if value is None:
        raise InvalidRequestError(f"Cannot set nullptr when calling {name}")
    if is_too_large(name, value):
        raise InvalidRequestError(
            f"{name} has shape {list(value.shape)}, more than {_most_elements(name)} elements"
        )
    if isinstance(value, torch.Tensor):
        return _from_torch(name, value)
    if isinstance(value, (np.ndarray, np.generic, bool, int, float, list, tuple)):
        try:
            array = np.asarray(value)
        except (ValueError, OverflowError) as error:
            hint = ": word_list() makes it from lists of ids" if name.endswith("words_list") else ""
            raise InvalidRequestError(f"{name} cannot become a tensor{hint}: {error}") from None
        if array.dtype.kind in "biuf":
            return array
        is_object = array.dtype.kind == "O"  # integers beyond all dtypes, or any other objects
        items = array.tolist() if is_object else value
        odd = _first_odd(items, (bool, int, float, np.number))
        if odd is None and is_object:
            return array
        if odd is None or not odd[0]:
            found = "is a text" if array.dtype.kind in "SU" else f"has dtype {array.dtype}"
            raise InvalidRequestError(f"{name} {found}, expected {expected}")
        raise InvalidRequestError(f"{name}{odd[0]} = {reprlib.repr(odd[1])} is not a number")
    raise InvalidRequestError(f"{name} is of type {type(value).__name__}, expected {expected}")


def _from_torch(name: str, value: torch.Tensor) -> np.ndarray:
    try:
        tensor = value.detach().cpu()
        # NumPy has no bfloat16 and no 8-bit floats
        is_narrow = tensor.dtype.is_floating_point and tensor.dtype.itemsize <= 2
        array: np.ndarray = (tensor.float() if is_narrow else tensor).numpy(force=True)
    except Exception as error:
        raise InvalidRequestError(
            f"{name} cannot be read: a {value.dtype} tensor of layout {value.layout} on "
            f"{value.device}: {error}"
        ) from None
    return array


def read_numbers(name: str, value: Any) -> np.ndarray:
    """Return an array of floats or integers; bools are refused."""
    array = read_array(name, value)
    if array.dtype.kind == "O" or (isinstance(value, (list, tuple)) and array.dtype.kind in "iuf"):
        items = array.tolist() if array.dtype.kind == "O" else value
        _refuse_odd(name, items, (int, float, np.number), "a number")
    if array.dtype.kind == "O":
        try:
            return array.astype(np.float64)
        except OverflowError as error:
            raise InvalidRequestError(f"{name} must fit a float: {error}") from None
    if array.dtype.kind not in "fiu":
        raise InvalidRequestError(f"{name} has dtype {array.dtype}, expected a float")
    return array


def read_integers(name: str, value: Any) -> np.ndarray:
    """Return an array of integers, with dtype object if no integer dtype fits all of them."""
    if isinstance(value, (list, tuple)):
        _refuse_odd(name, value, (int, np.integer), "an integer")
    array = read_array(name, value)
    if array.dtype.kind == "O":
        _refuse_odd(name, array.tolist(), (int, np.integer), "an integer")
        return array
    if array.dtype.kind == "f" and array.size and isinstance(value, (list, tuple)):
        return np.array(value, dtype=object)  # NumPy has converted large integers to floats
    if array.dtype.kind not in "iu" and array.size:
        dtype = getattr(value, "dtype", array.dtype)
        raise InvalidRequestError(f"{name} has dtype {dtype}, expected an integer dtype")
    return array


def _refuse_odd(name: str, items: Any, kinds: tuple[type, ...], expected: str) -> None:
    odd = _first_odd(items, kinds)
    if odd is not None:
        raise InvalidRequestError(f"{name}{odd[0]} = {reprlib.repr(odd[1])} is not {expected}")


def _first_odd(items: Any, kinds: tuple[type, ...]) -> tuple[str, Any] | None:
    """Find the first element of nested lists that is not of these `kinds`.

    Return its index as a text such as "[0][2]", and its value; None if all elements are of these
    kinds. A bool does not count as an int.
    """
    if not isinstance(items, (list, tuple)):
        if isinstance(items, (np.ndarray, torch.Tensor)):
            return _first_odd(items.tolist(), kinds)
        is_good = isinstance(items, kinds) and (bool in kinds or not isinstance(items, bool))
        return None if is_good else ("", items)
    if set(map(type, items)) <= {int}:
        return None
    for index, item in enumerate(items):
        found = _first_odd(item, kinds)
        if found is not None:
            return f"[{index}]{found[0]}", found[1]
    return None


def read_scalar(name: str, array: np.ndarray) -> Any:
    """Return the only element of an array."""
    if array.size != 1:
        raise InvalidRequestError(f"{name} has shape {list(array.shape)}, expected one value")
    return array.reshape(-1).tolist()[0]
