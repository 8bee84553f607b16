"""Reads a request's tensors: checks a host's value and converts it to a known type.

An integer field accepts any integer dtype if the values fit, but never floats. An empty array may
have any numeric dtype. `[n]` is equivalent to `[1, n]`, and a scalar to `[1]`. For an invalid
tensor, every `read_` function raises InvalidRequestError with the tensor's name and what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gptmanager.errors import InvalidRequestError, quoted
from gptmanager.request.arrays import read_array, read_integers, read_numbers, read_scalar
from gptmanager.request.input_rows import HostRows, token_bias
from gptmanager.request.pieces import PIECE, Pieces

INT32 = (-(2**31), 2**31 - 1)
MAX_END_IDS = 1024  # per request
_MOST_WORD_IDS = 2**18  # per list of words: about the size of the largest vocabularies


def read_int(name: str, value: Any, low: int, high: int) -> int:
    """Read a scalar of an integer dtype within `low..high`."""
    number = read_scalar(name, read_integers(name, value))
    if not low <= number <= high:
        raise InvalidRequestError(f"{name} = {number} is outside {low}..{high}")
    return int(number)


def read_end_ids(value: Any, highest: int) -> tuple[int, ...]:
    """Read `end_id`: a scalar, `[n]` or `[1, n]` of token ids up to `highest`; -1 means no id.

    Return each id once, in the order given.
    """
    array = read_integers("end_id", value)
    is_row = array.size == 1 or array.shape[:-1] in ((), (1,))
    if not (is_row and 1 <= array.size <= MAX_END_IDS):
        raise InvalidRequestError(
            f"end_id has shape {list(array.shape)}, expected [n] or [1, n], n from 1 to "
            f"{MAX_END_IDS}"
        )
    ids: list[int] = array.reshape(-1).tolist()
    for index, token in enumerate(ids):
        if not -1 <= token <= highest:
            where = "end_id" if len(ids) == 1 else f"end_id[{index}]"
            raise InvalidRequestError(f"{where} = {token} is outside -1..{highest}")
    return tuple(dict.fromkeys(token for token in ids if token >= 0))


def read_float(name: str, value: Any, low: float, high: float = math.inf) -> float:
    """Read a finite scalar within `low..high`; integers are accepted, too."""
    number = float(read_scalar(name, read_numbers(name, value)))
    if not math.isfinite(number):
        raise InvalidRequestError(f"{name} = {number} is not finite")
    if not low <= number <= high:
        bounds = f"at least {low:g}" if math.isinf(high) else f"within {low:g}..{high:g}"
        shown = repr(number).removesuffix(".0")  # all digits: 1.0000001 is not within 0..1
        raise InvalidRequestError(f"{name} = {shown} must be {bounds}")
    return number


def read_bool(name: str, value: Any) -> bool:
    """Read a scalar of dtype bool, or the integer 0 or 1."""
    array = read_array(name, value, "a bool, 0 or 1")
    number = read_scalar(name, array)
    if array.dtype.kind not in "biuO" or number not in (0, 1):
        raise InvalidRequestError(f"{name} = {number} must be a bool, 0 or 1")
    return bool(number)


def read_token_ids(name: str, value: Any, vocab_size: int) -> list[int]:
    """Read token ids of shape `[n]` or `[1, n]`, each within the vocabulary."""
    array = read_integers(name, value)
    if array.ndim == 2:
        if array.shape[0] != 1:
            raise InvalidRequestError(
                "Expected batch dimension to be 1 for each request, "
                f"got shape {list(array.shape)} in {name}"
            )
        array = array[0]
    if array.ndim != 1:
        raise InvalidRequestError(f"{name} has shape {list(array.shape)}, expected [n] or [1, n]")
    _check_vocabulary(name, array, vocab_size)
    ids: list[int] = array.tolist()
    return ids


def read_word_list(name: str, value: Any, vocab_size: int) -> list[list[int]]:
    """Read words from `[1, 2, L]` or `[2, L]`.

    Row 0 has the concatenated ids, row 1 the end offset of each word, padded with -1. L is at most
    2**18, because the manager's loop is blocked while the words are compiled.
    """
    array = read_integers(name, value)
    if array.size > 2 * _MOST_WORD_IDS:
        raise InvalidRequestError(
            f"{name} has shape {list(array.shape)}, expected at most {_MOST_WORD_IDS} token ids"
        )
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2 or array.shape[0] != 2:
        raise InvalidRequestError(
            f"{name} has shape {list(array.shape)}, expected [1, 2, L] or [2, L]"
        )
    ids, offsets = array
    ends = offsets[offsets != -1].tolist()
    starts = [0, *ends[:-1]]
    if any(not start < end <= len(ids) for start, end in zip(starts, ends, strict=False)):
        raise InvalidRequestError(
            f"{name} has end offsets {quoted(offsets.tolist())}, expected strictly rising offsets "
            f"within 1..{len(ids)}, padded with -1"
        )
    _check_vocabulary(name, ids[: ends[-1]] if ends else ids[:0], vocab_size)
    return [ids[start:end].tolist() for start, end in zip(starts, ends, strict=False)]


def read_rows(name: str, value: Any, width: int) -> HostRows:
    """Read rows like `read_float_rows`, or return a HostRows of the recorder as it is."""
    return value if isinstance(value, HostRows) else HostRows(read_float_rows(name, value, width))


def read_float_rows(name: str, value: Any, width: int, *, bans: bool = False) -> np.ndarray:
    """Copy finite floats (-inf, too, with `bans`) of `[n, width]` or `[1, n, width]`, n >= 1."""
    array = read_numbers(name, value)
    if array.dtype.kind != "f":
        raise InvalidRequestError(f"{name} has dtype {array.dtype}, expected a float")
    _check_rows(name, array.shape, width)
    with np.errstate(over="ignore"):  # numbers beyond float32 become infinite: checked below
        rows: np.ndarray = array.reshape(-1, width).astype(np.float32)
    is_good = np.isfinite(rows)
    if bans:
        is_good |= np.isneginf(rows)
    if not is_good.all():
        row, column = np.argwhere(~is_good)[0].tolist()
        found = float(array.reshape(-1, width)[row, column])
        raise _not_finite_error(f"{name}[{row}, {column}]", found, torch.float32)
    return rows


def read_bias(name: str, value: Any, vocab_size: int) -> HostRows | None:
    """Read the nonzero values of `[vocab]` or `[1, vocab]`, in float32, and their token ids.

    -inf is accepted. A finite value below the range of float32 becomes the lowest finite float32.
    Return None if all values are zero. A HostRows (already read by the recorder, or from a
    recording) is returned as it is, or as None if it has no values.
    """
    if isinstance(value, HostRows):
        return value if value.count else None
    array = read_numbers(name, value)
    if array.shape not in ((vocab_size,), (1, vocab_size)):
        raise InvalidRequestError(
            f"{name} has shape {list(array.shape)}, expected [{vocab_size}] or [1, {vocab_size}]"
        )
    lowest, highest = np.finfo(np.float32).min, np.finfo(np.float32).max
    flat = array.reshape(-1)
    bad = np.flatnonzero(np.isnan(flat) | (flat > highest))
    if bad.size:
        raise _not_finite_error(f"{name}[{bad[0]}]", float(flat[bad[0]]), torch.float32)
    values = np.where(np.isneginf(flat), flat, np.maximum(flat, lowest)).astype(np.float32)
    ids = np.flatnonzero(values)
    return token_bias(ids, values[ids])


def read_int_rows(name: str, value: Any, width: int) -> np.ndarray:
    """Read integers of shape `[n, width]` or `[1, n, width]`, n >= 1, as `[n, width]`."""
    array = read_integers(name, value)
    _check_rows(name, array.shape, width)
    if array.dtype.kind == "O":
        largest = max(array.reshape(-1).tolist(), key=abs)
        raise InvalidRequestError(f"{name} has the number {largest}, expected at most 64 bits")
    return array.reshape(-1, width)


def as_float_rows(name: str, value: Any) -> np.ndarray | torch.Tensor:
    """Check floats of shape `[n, width]` or `[1, n, width]`, n >= 1; return a view `[n, width]`.

    The numbers, which may be many, are not read: `read_start` reads them.
    """
    if not isinstance(value, (np.ndarray, torch.Tensor)):
        value = read_array(name, value)
    is_torch = isinstance(value, torch.Tensor)
    if not is_torch:
        value = np.asarray(value)  # a row of np.matrix would be a matrix
    dtype = value.dtype
    if is_torch and (value.layout is not torch.strided or value.is_nested or value.is_meta):
        raise InvalidRequestError(
            f"{name} cannot be read: a {dtype} tensor of layout {value.layout} on {value.device}"
        )
    if not (dtype.is_floating_point if is_torch else dtype.kind == "f"):
        raise InvalidRequestError(f"{name} has dtype {dtype}, expected a float")
    _check_rows(name, value.shape, None)
    rows: np.ndarray | torch.Tensor = value[0] if value.ndim == 3 else value
    return rows


def read_start(
    name: str, rows: np.ndarray | torch.Tensor, row: int, length: int, dtype: torch.dtype
) -> Pieces[torch.Tensor]:
    """Copy the first `length` numbers of `rows[row]` to the CPU, as `dtype`.

    `rows` is a result of `as_float_rows`.
    """
    numbers = torch.empty(length, dtype=dtype)
    for first in range(0, length, PIECE):
        piece = numbers[first : first + PIECE]
        try:
            given = _on_cpu(rows[row, first : first + len(piece)])
            piece.copy_(given)
        except Exception as error:
            raise InvalidRequestError(
                f"{name} cannot be read: {rows.dtype} of type {type(rows).__name__}: {error}"
            ) from None
        bad = _not_finite(piece)
        if len(bad):
            column = int(bad[0])
            where = f"{name}[{row}, {first + column}]"
            raise _not_finite_error(where, given[column].item(), dtype)
        yield
    return numbers


def _not_finite_error(where: str, found: float, dtype: torch.dtype) -> InvalidRequestError:
    """Return the error for a number that is not finite in `dtype`."""
    limit = f" in {dtype}: at most {torch.finfo(dtype).max}" if math.isfinite(found) else ""
    return InvalidRequestError(f"{where} = {found:g} is not finite{limit}")


def _not_finite(numbers: torch.Tensor) -> torch.Tensor:
    """Return the indices of numbers that are not finite.

    If the sum is finite, all numbers are. The sum takes a fifth of the time of testing each number.
    """
    if numbers.sum(dtype=torch.float32).isfinite():
        return numbers.new_empty(0)
    return (~torch.isfinite(numbers)).nonzero()


def _on_cpu(given: np.ndarray | torch.Tensor) -> torch.Tensor:
    if isinstance(given, torch.Tensor):
        return given.detach().to("cpu")
    with np.errstate(over="ignore"):
        # torch accepts neither every byte order nor negative strides: `astype` gets rid of both
        return torch.from_numpy(given.astype("f4" if given.dtype.itemsize <= 4 else "f8"))


def _check_rows(name: str, shape: Sequence[int], width: int | None) -> None:
    """Check that a shape is `[n, width]` or `[1, n, width]` with n >= 1.

    If `width` is None, any width is accepted.
    """
    is_known = width is None or tuple(shape[-1:]) == (width,)
    if not is_known or tuple(shape[:-2]) not in ((), (1,)) or len(shape) < 2 or 0 in shape:
        known = "width" if width is None else width
        raise InvalidRequestError(
            f"{name} has shape {list(shape)}, expected [n, {known}] or [1, n, {known}]"
        )


def _check_vocabulary(name: str, ids: np.ndarray, vocab_size: int) -> None:
    if ids.size:
        bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if bad.size:
            raise InvalidRequestError(
                f"{name}[{bad[0]}] = {ids[bad[0]]} is outside the vocabulary of {vocab_size} tokens"
            )
