"""The numbers of a JSON schema, as the parser of grammars can hold them.

It has bounds of 64 bits and constants of double precision, and takes others for the nearest ones,
so that what it permits would not fit the schema. Bounds are narrowed to what it can hold; what
cannot be held is refused by name.
"""

from __future__ import annotations

import json
import math
from typing import Any

_MOST = 2**63 - 1024  # the largest double below 2**63
_EXACT = 2**53
_UP = {"minimum": True, "exclusiveMinimum": True, "maximum": False, "exclusiveMaximum": False}
_VALUES = ("const", "enum")
_NAMES = ("properties", "patternProperties", "$defs", "definitions")  # of schemas, not keywords
_IGNORED = ("default", "examples", "$comment", "title", "description")


def readable_schema(text: str) -> str:
    """The schema that stands for `text`; what is no JSON is left as it is, for the parser to tell.

    `true` is any JSON value. ValueError for what is no schema, or cannot be held.
    """
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    except ValueError:
        return text
    if schema is True:
        return "{}"
    if schema is False:
        raise ValueError("the schema is false: no text fits it")
    if not isinstance(schema, dict):
        raise ValueError(f"the schema is {_shown(schema)}, expected an object, true or false")
    try:
        return json.dumps(_read(schema))
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def _read(part: Any) -> Any:
    """A schema, or what holds some."""
    if isinstance(part, list):
        return [_read(one) for one in part]
    if not isinstance(part, dict):
        return part
    return {name: _read_keyword(name, value) for name, value in part.items()}


def _read_keyword(name: str, value: Any) -> Any:
    if name in _UP and isinstance(value, int | float) and not isinstance(value, bool):
        return _narrowed(name, value, _UP[name])
    if name in _VALUES:
        _check_value(name, value)
        return value
    if name in _NAMES and isinstance(value, dict):
        return {own: _read(schema) for own, schema in value.items()}
    return value if name in _IGNORED else _read(value)


def _narrowed(name: str, bound: float, up: bool) -> float:
    """The bound, or the nearest one inside of it that is both a double and a 64-bit integer."""
    if abs(bound) <= _EXACT:
        return bound
    if not (bound <= _MOST if up else bound >= -_MOST):
        raise ValueError(f"{name} = {_shown(bound)} is beyond integers of 64 bits")
    near = float(max(-_MOST, min(bound, _MOST)))
    if abs(bound) < _MOST and (near < bound if up else near > bound):
        near = math.nextafter(near, math.inf if up else -math.inf)
    return int(near)  # whose digits are read exactly


def _check_value(name: str, value: Any) -> None:
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        for part in parts:
            _check_value(name, part)
    elif isinstance(value, int | float) and abs(value) > _EXACT:
        raise ValueError(
            f"{name} holds {_shown(value)}, which double precision does not hold as it is written"
        )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
