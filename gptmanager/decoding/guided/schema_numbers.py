"""Numbers of a JSON schema, adapted to the parser's number types.

The parser supports bounds of 64 bits and constants of double precision. The parser silently rounds
other numbers, and would then permit values that do not fit the schema. So each bound is replaced by
the nearest stricter number that the parser supports. Constants that may be rounded raise an error.
"""

from __future__ import annotations

import json
import math
from typing import Any

UP = {"minimum": True, "exclusiveMinimum": True, "maximum": False, "exclusiveMaximum": False}
_MOST = 2**63 - 1024  # the largest double below 2**63
_EXACT = 2**53


def narrowed(name: str, bound: float) -> float:
    """Return the bound or, beyond 2**53, the nearest stricter double that is a 64-bit integer.

    `name` is the keyword. Raise ValueError for a minimum above `_MOST` or a maximum below `-_MOST`.
    """
    up = UP[name]
    if abs(bound) <= _EXACT:
        return bound
    if not (bound <= _MOST if up else bound >= -_MOST):
        raise ValueError(f"{name} = {shown(bound)} is beyond integers of 64 bits")
    near = float(max(-_MOST, min(bound, _MOST)))
    if abs(bound) < _MOST and (near < bound if up else near > bound):
        near = math.nextafter(near, math.inf if up else -math.inf)
    return int(near)  # printed without an exponent, so that it is read exactly


def simplest(text: str) -> float:
    """Return the number of a JSON text with a fraction or an exponent, as an int if it is one.

    To JSON Schema 2.0 is an integer. The parser would refuse it as a length.
    """
    number = float(text)
    return int(number) if number.is_integer() and abs(number) <= _EXACT else number


def check_value(name: str, value: Any) -> None:
    """Raise ValueError if a constant has a number beyond 2**53, which may be rounded."""
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        for part in parts:
            check_value(name, part)
    elif isinstance(value, int | float) and abs(value) > _EXACT:
        raise ValueError(
            f"{name} holds {shown(value)}, which double precision may round: the limit is 2**53"
        )


def shown(value: Any) -> str:
    """Return a value as text for an error, shortened to 40 characters."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
