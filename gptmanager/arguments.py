"""Arguments of constructors, checked by name: numbers, flags, and objects that must do something.

Knows no class: who checks which argument against what is each constructor's own.
"""

from __future__ import annotations

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
