"""Decides whether two JSON schemas exclude each other, so that `oneOf` may be read as `anyOf`.

Only types, listed values, ranges and required properties are compared, and listed strings with the
other schema's pattern. If this comparison does not show that the schemas exclude each other, they
are assumed to overlap.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_MAX_DEPTH = 8  # number of nested branches and properties that are followed
_RANGES = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "integer": ("minimum", "maximum"),
    "number": ("minimum", "maximum"),
}
Resolve = Callable[[Any], Any]  # returns the schema that a reference leads to


def excluding_property(one: Any, other: Any, resolve: Resolve) -> str | None:
    """Return the name of a property, such as a union's tag, with no value that fits both schemas.

    Return None if no such property is found, or if a schema permits values other than objects.
    """
    one, other = resolve(one), resolve(other)
    if not all(types_of(it) == {"object"} for it in (one, other)):
        return None
    theirs = other.get("properties") or {}
    for name, schema in (one.get("properties") or {}).items():
        if name in theirs and excludes(schema, theirs[name], resolve):
            return str(name)
    return None


def excludes(one: Any, other: Any, resolve: Resolve, depth: int = _MAX_DEPTH) -> bool:
    """Return True if no value can fit both schemas, and False if a value might fit both."""
    if not depth:
        return False
    one, other = resolve(one), resolve(other)
    if one is False or other is False:
        return True
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    for first, second in ((one, other), (other, one)):
        for keyword in ("anyOf", "oneOf"):
            branches = first.get(keyword)
            if branches and all(excludes(it, second, resolve, depth - 1) for it in branches):
                return True
        if any(excludes(it, second, resolve, depth - 1) for it in first.get("allOf") or ()):
            return True
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not values & others
    for known, schema in ((listed_values(one), other), (listed_values(other), one)):
        if known is not None and all(_misses(value, schema) for value in known):
            return True
    shared = types_of(one) & types_of(other)
    return all(_excludes_of(kind, one, other, resolve, depth) for kind in shared)


def _excludes_of(
    kind: str, one: Mapping[str, Any], other: Mapping[str, Any], resolve: Resolve, depth: int
) -> bool:
    """Return True if no value of the type `kind` can fit both schemas, else False."""
    if kind in _RANGES:
        low, high = _RANGES[kind]
        lows = [it.get(low, -math.inf) for it in (one, other)]
        highs = [it.get(high, math.inf) for it in (one, other)]
        if all(isinstance(it, int | float) for it in (*lows, *highs)) and max(lows) > min(highs):
            return True
    if kind != "object":
        return False
    pairs = ((one, other), (other, one))
    return any(
        _excludes_by(name, first, second, resolve, depth)
        for first, second in pairs
        for name in _required(first)
    )


def _misses(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return True if a value does not fit the types of a schema, or the pattern for strings."""
    if not set(_types_of_value(value)) & types_of(schema):
        return True
    pattern = schema.get("pattern")
    try:
        return isinstance(value, str) and isinstance(pattern, str) and not re.search(pattern, value)
    except re.error:
        return False


def _excludes_by(
    name: str, one: Mapping[str, Any], other: Mapping[str, Any], resolve: Resolve, depth: int
) -> bool:
    """Return whether the schemas exclude each other by the property `name`, which `one` requires.

    A property that `other` lists, but neither requires nor forbids, does not count as excluding.
    """
    own, theirs = (it.get("properties") or {} for it in (one, other))
    if name in theirs:
        is_needed = name in _required(other) or theirs[name] is False
        return is_needed and excludes(own.get(name, True), theirs[name], resolve, depth - 1)
    return other.get("additionalProperties") is False and not other.get("patternProperties")


def _required(schema: Mapping[str, Any]) -> Iterator[str]:
    required = schema.get("required")
    if isinstance(required, list):
        yield from (name for name in required if isinstance(name, str))


def types_of(schema: Any) -> frozenset[str]:
    """Return the types of the values that `type`, `const` and `enum` of a schema permit."""
    if not isinstance(schema, Mapping):
        return _TYPES if schema is not False else frozenset()
    given = schema.get("type", list(_TYPES))
    found = {given} if isinstance(given, str) else set(given)
    if "number" in found:
        found.add("integer")
    values = listed_values(schema)
    if values is not None:
        found &= {name for value in values for name in _types_of_value(value)}
    return frozenset(found)


def _types_of_value(value: Any) -> tuple[str, ...]:
    if value is None or isinstance(value, bool):
        return ("null",) if value is None else ("boolean",)
    if isinstance(value, int | float):
        return ("integer", "number")
    if isinstance(value, str):
        return ("string",)
    return ("array",) if isinstance(value, list) else ("object",)


def listed_values(schema: Any) -> list[Any] | None:
    """Return the values that a schema lists; None if it does not list values."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def canonical(value: Any) -> str:
    """Return a JSON value as text. Equal values have equal texts: 1.0 equals 1, but not true."""
    text = json.dumps(value)
    return json.dumps(json.loads(text, parse_float=_number), sort_keys=True)


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _values(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the listed values as canonical texts, or None if the schema does not list values."""
    values = listed_values(schema)
    return None if values is None else frozenset(map(canonical, values))
