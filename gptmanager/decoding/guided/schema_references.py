"""Resolves the references of a JSON schema, which are pointers, anchors, or addresses of parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

# Keywords that do not change what a schema with a reference permits.
_ANNOTATIONS = frozenset({"$ref", "$defs", "definitions", "title", "description", "default"})


class SchemaReferences:
    """Finds the parts of one schema that its references point to."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._base = ""
        self._anchors: dict[str, tuple[Any, str]] = {}
        self._find_anchors(schema, "", "#")

    def _find_anchors(self, part: Any, base: str, at: str) -> None:
        """Record each part of the schema that has an address or an anchor.

        `base` is the address of the enclosing part, and `at` the JSON pointer of `part`.
        """
        if isinstance(part, list):
            for index, one in enumerate(part):
                self._find_anchors(one, base, f"{at}/{index}")
        if not isinstance(part, dict):
            return
        for name in ("$id", "id"):
            if isinstance(part.get(name), str):
                base = urljoin(base, part[name])
                self._anchors[base.removesuffix("#")] = part, at
        if isinstance(part.get("$anchor"), str):
            self._anchors[f"{urldefrag(base).url}#{part['$anchor']}"] = part, at
        if at == "#":
            self._anchors.setdefault("", (part, at))
            self._base = base
        for name, value in part.items():
            if name not in ("enum", "const", "default", "examples"):
                self._find_anchors(value, base, f"{at}/{escaped(name)}")

    def target(self, reference: Any) -> tuple[Any, str] | None:
        """Return the part of the schema that `reference` points to, and the part's JSON pointer.

        Return None if the part does not exist.
        """
        if not isinstance(reference, str):
            return None
        address = urljoin(self._base, reference) if not reference.startswith("#") else reference
        if reference.startswith("#"):
            address = f"{urldefrag(self._base).url}{reference}"
        if address.removesuffix("#") in self._anchors:
            return self._anchors[address.removesuffix("#")]
        document, pointer = urldefrag(address)
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


def _index(text: str) -> int:
    """Return an index of a JSON pointer; raise ValueError for anything but digits."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)
