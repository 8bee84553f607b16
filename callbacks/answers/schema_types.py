"""Finds the types that a JSON schema allows, for tool formats with arguments that are not JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_MAX_DEPTH = 8  # limit of nested references and alternatives
_KINDS = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
    type(None): "null",
}  # fmt: skip


def resolved(schema: Any, root: Any) -> Any:
    """Return the schema in `root` that `schema` refers to with `$ref`, or else `schema`."""
    for _ in range(_MAX_DEPTH):
        place = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(place, str) or not place.startswith("#"):
            return schema
        schema = root
        for key in place[2:].split("/") if len(place) > 1 else ():
            key = key.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def properties_of(schema: Any) -> dict[str, Any]:
    """Return the schemas of an object's properties, by name.

    `$defs` and `definitions` of `schema` are added to the schema of each property, so that
    references in the property's schema can be resolved.
    """
    found = resolved(schema, schema)
    own = found.get("properties") if isinstance(found, Mapping) else None
    if not isinstance(own, Mapping):
        return {}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {
        name: {**one, **shared} if isinstance(one, Mapping) else one for name, one in own.items()
    }


def required_of(schema: Any) -> frozenset[str]:
    """Return the names of the properties that an object must have."""
    own = resolved(schema, schema)
    found = own.get("required") if isinstance(own, Mapping) else None
    return (
        frozenset(one for one in found if isinstance(one, str))
        if isinstance(found, list)
        else frozenset()
    )


def is_closed(schema: Any) -> bool:
    """Return whether an object must not have properties that the schema does not name."""
    own = resolved(schema, schema)
    return isinstance(own, Mapping) and own.get("additionalProperties") is False


def types_of(schema: Any) -> frozenset[str]:
    """Return the names of the JSON types that a schema allows; empty if it names none."""
    return _types(schema, schema, 0)


def types_of_json(text: str) -> frozenset[str]:
    """Return the names of the JSON types that a value in JSON has."""
    kind = _KINDS[type(json.loads(text))]
    return frozenset((kind, "number")) if kind == "integer" else frozenset((kind,))


def choices_of(schema: Any) -> list[Any] | None:
    """Return the values of a schema with `const` or `enum`; None for other schemas."""
    found = resolved(schema, schema)
    if not isinstance(found, Mapping):
        return None
    if "const" in found:
        return [found["const"]]
    return found["enum"] if isinstance(found.get("enum"), list) else None


def _types(schema: Any, root: Any, depth: int) -> frozenset[str]:
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(one for one in kind if isinstance(one, str))
    choices = choices_of(schema)
    if choices is not None:
        return frozenset(_KINDS[type(one)] for one in choices if type(one) in _KINDS)
    found: frozenset[str] = frozenset()
    for key in ("anyOf", "oneOf", "allOf"):
        several = schema.get(key)
        if isinstance(several, Sequence) and not isinstance(several, str):
            found = found.union(*(_types(one, root, depth + 1) for one in several))
    return found
