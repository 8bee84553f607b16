"""Arguments of constructors, checked by name: numbers, flags, and objects that must do something.

Knows no class: each constructor decides which of its arguments to check against what.
"""

from __future__ import annotations

import operator
from numbers import Integral
from typing import Any, TypeVar

from gptmanager.errors import ConfigError

_T = TypeVar("_T")


def at_least(low: int, name: str, value: Any, high: int | None = None) -> int:
    """`value` as an int, within `low..high`, or a ConfigError that names it and the limit."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):
        limit = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} = {value!r} must be an integer {limit}")
    return int(value)


def as_integer(value: Any) -> int:
    """`value` as an int if it is an integer and no bool, of whatever type; else TypeError."""
    if type(value) is int:
        return value
    dtype = str(getattr(value, "dtype", ""))
    if isinstance(value, bool) or dtype.endswith("bool"):
        raise TypeError(f"{value!r} is a bool")
    return operator.index(value)


def as_token(value: Any) -> int:
    """A token id; TypeError unless it is an integer, ValueError outside 0..2**31-1."""
    token = as_integer(value)
    if not 0 <= token < 2**31:
        limit = "is negative" if token < 0 else f"exceeds {2**31 - 1}"
        raise ValueError(f"token id {token} {limit}")
    return token


def flag(name: str, value: Any) -> bool:
    """`value`, or a ConfigError that names it."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} = {value!r} is neither True nor False")
    return value


def able(name: str, value: _T, method: str, expected: str) -> _T:
    """`value` if it has such a method, or a ConfigError that names it and what was `expected`."""
    if not callable(getattr(value, method, None)):
        raise ConfigError(f"{name} = {value!r} is no {expected}: it has no {method}()")
    return value
