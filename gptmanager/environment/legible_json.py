"""Values that JSON can hold: also paths and texts that are not UTF-8."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum
from typing import Any


def legible(value: Any, plain: Callable[[Any], Any] = str) -> Any:
    """Return `value` in JSON's types, with enums by name, and lone surrogates escaped (`\\ud800`).

    `plain` converts values of other types, except dataclasses.
    """
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {legible(key, plain): legible(item, plain) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [legible(item, plain) for item in value]
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        return {name: legible(getattr(value, name), plain) for name in names}
    return legible(plain(value), plain)
