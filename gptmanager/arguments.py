"""Checks of arguments: numbers, times, flags, and objects that need a certain method.

Errors name the argument, its value and what is allowed.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

from gptmanager.errors import ConfigError, quoted

_MAX_LENGTH = 2**31 - 1

_T = TypeVar("_T")


def at_least(low: int, name: str, value: Any, high: int | None = None) -> int:
    """Return `value` as an int. Raise ConfigError unless it is an integer in `low..high`."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):
        limit = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} = {quoted(value)} must be an integer {limit}")
    return int(value)


def number(low: float, name: str, value: Any, high: float = math.inf) -> float:
    """Return `value` as a float. Raise ConfigError unless it is a number in `low..high`."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        limit = f"of at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
        raise ConfigError(f"{name} = {quoted(value)} must be a number {limit}")
    return float(value)


def bounded(timeout: Any) -> float | None:
    """Return `timeout`, limited to what a wait of `threading` accepts. None means unlimited.

    Raise TypeError unless it is a number or None.
    """
    if timeout is None:
        return None
    is_number = isinstance(timeout, Real) and timeout == timeout
    if not is_number:
        raise TypeError(f"timeout = {quoted(timeout)} must be a number of seconds, or None")
    return float(min(max(timeout, 0.0), threading.TIMEOUT_MAX))


def length_range(name: str, value: Any) -> tuple[int, int]:
    """Return a range of lengths. Raise ConfigError unless it has two integers, 1 <= low <= high."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ConfigError(f"{name} = {quoted(value)} must be a pair (shortest, longest)")
    low = at_least(1, f"{name}[0]", value[0], _MAX_LENGTH)
    return low, at_least(low, f"{name}[1]", value[1], _MAX_LENGTH)


def as_integer(value: Any) -> int:
    """Return an integer of any type as an int. Raise TypeError for other values and for a bool."""
    if type(value) is int:
        return value
    dtype = str(getattr(value, "dtype", ""))
    if isinstance(value, bool) or dtype.endswith("bool"):
        raise TypeError(f"{value!r} is a bool")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{quoted(value)} must be an integer") from None


def as_token(value: Any) -> int:
    """Return a token id as an int.

    Raise TypeError for non-integers, ValueError outside 0..2**31-1.
    """
    token = as_integer(value)
    if not 0 <= token < 2**31:
        limit = "is negative" if token < 0 else f"exceeds {2**31 - 1}"
        raise ValueError(f"token id {token} {limit}")
    return token


def flag(name: str, value: Any) -> bool:
    """Return `value`. Raise ConfigError unless it is a bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} = {quoted(value)} must be True or False")
    return value


def function(name: str, value: _T) -> _T:
    """Return `value`. Raise ConfigError unless it can be called."""
    if not callable(value):
        raise ConfigError(f"{name} = {quoted(value)} must be a function")
    return value


def able(name: str, value: _T, method: str, expected: str) -> _T:
    """Return `value`. Raise ConfigError unless it has the method `method`.

    `expected`: the kind of object that the message asks for.
    """
    if not callable(getattr(value, method, None)):
        raise ConfigError(f"{name} = {value!r} must be a {expected}: it has no method {method}()")
    return value
