"""Numbers of a JSON schema as the parser can hold them.

It has bounds of 64 bits and constants of double precision, and takes others for the nearest ones,
so that what it permits would not fit the schema. Bounds are narrowed to what it can hold; what
cannot be held is refused by name.
"""

from __future__ import annotations

import json
import math
from typing import Any

UP = {"minimum": True, "exclusiveMinimum": True, "maximum": False, "exclusiveMaximum": False}
_MOST = 2**63 - 1024  # the largest double below 2**63
_EXACT = 2**53


def narrowed(name: str, bound: float) -> float:
    """The bound, or the nearest one inside of it that is both a double and a 64-bit integer."""
    up = UP[name]
    if abs(bound) <= _EXACT:
        return bound
    if not (bound <= _MOST if up else bound >= -_MOST):
        raise ValueError(f"{name} = {shown(bound)} is beyond integers of 64 bits")
    near = float(max(-_MOST, min(bound, _MOST)))
    if abs(bound) < _MOST and (near < bound if up else near > bound):
        near = math.nextafter(near, math.inf if up else -math.inf)
    return int(near)  # whose digits are read exactly


def check_value(name: str, value: Any) -> None:
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        for part in parts:
            check_value(name, part)
    elif isinstance(value, int | float) and abs(value) > _EXACT:
        raise ValueError(
            f"{name} holds {shown(value)}, which double precision does not hold as it is written"
        )


def shown(value: Any) -> str:
    """A value as an error quotes it."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
