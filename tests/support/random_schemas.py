"""Random JSON schemas of what llguidance supports, whose texts end sooner or later."""

from __future__ import annotations

from typing import Any

import numpy as np

_NAMES = ["name", "age", "tags", "a b", "größe", 'quo"te', "x", "id", "value", "items"]
_PATTERNS = ["^[a-z]{1,4}$", "^[A-Z][0-9]{2}$", "^(ab|cd)+e$", "^\\d{1,3}-\\d$"]
_FORMATS = ["date", "time", "ipv4", "uuid"]


def random_schema(chance: np.random.Generator, depth: int = 2) -> dict[str, Any]:
    """At most `depth` objects and arrays in each other."""
    kinds = [_string, _integer, _number, _enum, _const, _pattern, _format, _simple, _any_of]
    nested = [_object, _object, _object, _array, _array]
    make = chance.choice([*nested, *kinds] if depth else kinds)
    return make(chance, depth)


def random_root(seed: int) -> dict[str, Any]:
    """An object mostly, sometimes with definitions that it refers to."""
    chance = np.random.default_rng(seed)
    if chance.random() < 0.1:
        return random_schema(chance)
    schema = _object(chance, 2)
    if chance.random() < 0.2:
        schema["$defs"] = {"thing": random_schema(chance, 1)}
        schema["properties"]["ref"] = {"$ref": "#/$defs/thing"}
        schema["required"].append("ref")
    return schema


def _object(chance: np.random.Generator, depth: int) -> dict[str, Any]:
    names = chance.choice(_NAMES, chance.integers(0, 5), replace=False).tolist()
    schema = {
        "type": "object",
        "properties": {name: random_schema(chance, depth - 1) for name in names},
        "required": [name for name in names if chance.random() < 0.6],
        "additionalProperties": False,
    }
    return schema


def _array(chance: np.random.Generator, depth: int) -> dict[str, Any]:
    low = int(chance.integers(0, 3))
    high = low + int(chance.integers(0, 3))
    schema = {"type": "array", "minItems": low, "maxItems": high}
    if chance.random() < 0.2:
        count = int(chance.integers(1, 3))
        prefix = [random_schema(chance, 0) for _ in range(count)]
        return {
            "type": "array",
            "prefixItems": prefix,
            "items": False,
            "minItems": int(chance.integers(0, count + 1)),
        }
    return {**schema, "items": random_schema(chance, depth - 1)}


def _string(chance: np.random.Generator, depth: int) -> dict[str, Any]:
    low = int(chance.integers(0, 4))
    return {"type": "string", "minLength": low, "maxLength": low + int(chance.integers(0, 8))}


def _integer(chance: np.random.Generator, depth: int) -> dict[str, Any]:
    low = int(chance.integers(-500, 500))
    bounds = {"minimum": low, "maximum": low + int(chance.integers(0, 2000))}
    if chance.random() < 0.2:
        return {"type": "integer", "exclusiveMinimum": low, "maximum": low + 30}
    return {"type": "integer", **bounds}


def _number(chance: np.random.Generator, depth: int) -> dict[str, Any]:
    low = float(chance.integers(-50, 50)) / 4
    return {"type": "number", "minimum": low, "maximum": low + float(chance.integers(1, 99)) / 8}


def _enum(chance: np.random.Generator, depth: int) -> dict[str, Any]:
    values = ["red", "blue kite", 7, -2.5, None, True, "é\n", [1, 2], {"k": "v"}]
    return {"enum": [values[i] for i in chance.permutation(len(values))[:3]]}


def _const(chance: np.random.Generator, depth: int) -> dict[str, Any]:
    return {"const": ["fixed", 12, False][chance.integers(3)]}


def _pattern(chance: np.random.Generator, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": str(chance.choice(_PATTERNS))}


def _format(chance: np.random.Generator, depth: int) -> dict[str, Any]:
    return {"type": "string", "format": str(chance.choice(_FORMATS))}


def _simple(chance: np.random.Generator, depth: int) -> dict[str, Any]:
    return {"type": [["null", "boolean"], "boolean", "null"][chance.integers(3)]}


def _any_of(chance: np.random.Generator, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(chance, 0), {"type": "null"}]}
