"""Resolves the references of a JSON schema, which are pointers, anchors, or addresses of parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

# Keywords that do not change what a schema with a reference permits.
_ANNOTATIONS = frozenset({"$ref", "$defs", "definitions", "title", "description", "default"})
# Keywords with values that are not schemas, and keywords with objects of schemas by name.
_NOT_SCHEMAS = frozenset({"enum", "const", "default", "examples"})
_MAPS = frozenset(
    "properties patternProperties $defs definitions dependentSchemas dependencies".split()
)


class SchemaReferences:
    """Finds the parts of one schema that its references point to.

    `schema`: a copy of the schema in which all references are absolute. References are relative to
    the address of the enclosing part.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._anchors: dict[str, tuple[Any, str]] = {}
        self.schema: dict[str, Any] = self._absolute(dict(schema), "", "#")

    def _absolute(self, part: Any, base: str, at: str, is_map: bool = False) -> Any:
        """Return a copy of a part with absolute references, and record its address and anchors.

        `base` is the address of the enclosing part, and `at` the JSON pointer of `part`. `is_map`:
        the keys of `part` are names of properties or definitions, not keywords.
        """
        if isinstance(part, list):
            return [self._absolute(one, base, f"{at}/{index}") for index, one in enumerate(part)]
        if not isinstance(part, dict):
            return part
        copy: dict[str, Any] = {}
        for name in () if is_map else ("$id", "id"):
            if isinstance(part.get(name), str):
                base = _joined(base, part[name])
                self._anchors[base.removesuffix("#")] = copy, at
        if isinstance(part.get("$anchor"), str):
            self._anchors[f"{urldefrag(base).url}#{part['$anchor']}"] = copy, at
        if at == "#":
            self._anchors.setdefault("", (copy, at))
        for name, value in part.items():
            if is_map or name not in _NOT_SCHEMAS:
                value = self._absolute(
                    value, base, f"{at}/{escaped(name)}", not is_map and name in _MAPS
                )
            if name == "$ref" and isinstance(value, str):
                value = _joined(base, value)
            copy[name] = value
        return copy

    def target(self, reference: Any) -> tuple[Any, str] | None:
        """Return the part of `schema` that `reference` points to, and the part's JSON pointer.

        Return None if the part does not exist.
        """
        if not isinstance(reference, str):
            return None
        if reference.removesuffix("#") in self._anchors:
            return self._anchors[reference.removesuffix("#")]
        document, pointer = urldefrag(reference)
        if document not in self._anchors or not pointer.startswith("/"):
            return None
        part, at = self._anchors[document]
        for step in pointer[1:].split("/"):
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                part = part[_index(name)] if isinstance(part, list) else part[name]
            except (KeyError, IndexError, TypeError, ValueError):
                return None
            at = f"{at}/{escaped(name)}"
        return part, at

    def resolve(self, schema: Any) -> Any:
        """Return the schema that `schema` refers to, or `schema` if it is not a reference.

        Return True, which permits any value, if the reference cannot be followed, or if keywords
        next to `$ref` may change what the schema permits.
        """
        for _ in range(10):
            if not (isinstance(schema, Mapping) and "$ref" in schema):
                return schema
            found = self.target(schema["$ref"])
            if found is None or schema.keys() - _ANNOTATIONS:
                return True  # unknown: permits anything
            schema = found[0]
        return True


def escaped(name: str) -> str:
    """Escape a name for a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _joined(base: str, reference: str) -> str:
    """Return the absolute address of a reference; `urljoin` would drop a base such as a URN."""
    if reference.startswith("#"):
        return f"{urldefrag(base).url}{reference}"
    return urljoin(base, reference)


def _index(text: str) -> int:
    """Return an index of a JSON pointer; raise ValueError for anything but digits."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)
