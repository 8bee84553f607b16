"""Rewrites a JSON schema into one that the parser can enforce.

The parser rejects some keywords, and follows references only within a document. In the new schema,
all keywords have an effect, and each reference points to a definition. A keyword that cannot be
enforced raises an error or, if the reader is `lenient`, is left out and reported.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from gptmanager.decoding.guided.schema_complement import complement
from gptmanager.decoding.guided.schema_keywords import (
    DROPPED,
    ENFORCED,
    FORMATS,
    PATTERNS,
    SOMETIMES,
    limits_names,
)
from gptmanager.decoding.guided.schema_numbers import UP, check_value, narrowed, shown, simplest
from gptmanager.decoding.guided.schema_overlap import (
    canonical,
    excludes,
    excluding_property,
    listed_values,
)
from gptmanager.decoding.guided.schema_references import SchemaReferences, escaped

# Keywords that the parts of `allOf` get as `around`. The complement of a part depends on them.
_KNOWN = ("type", "enum", "const", "properties", "required")
_NOTHING: Mapping[str, Any] = {}
_NAMED = ("properties", "patternProperties")
_SHAPES: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(("required", "enum", "anyOf", "allOf", "oneOf"), (list, "a list")),
    **dict.fromkeys((*_NAMED, "dependencies", "dependentRequired"), (dict, "an object")),
    "dependentSchemas": (dict, "an object"),
    **dict.fromkeys(("minProperties", "maxProperties"), (int, "an integer")),
    **dict.fromkeys(("minItems", "maxItems"), (int | float, "an integer")),
    **dict.fromkeys(("format", "$ref"), (str, "a string")),
}
_MAX_BRANCHES = 30  # branches of `oneOf` that are made to exclude each other
_MAX_SET = 6  # values of unique items for which all combinations are listed
_MAX_LISTED = 20  # properties that are listed as alternatives
TOO_DEEP = "the schema is nested too deeply"
HOW = (
    "pass lenient=True, or in the server strict: false or --lenient, to leave it out and report it"
)


class SchemaReader:
    """Reads one schema. `unenforced` has the pointers to the keywords that were left out, in order.

    `regex_fault` returns the error of a regular expression, or "" if it is valid. If `expands`,
    keywords that the parser rejects are replaced by other schemas where possible. The new schemas
    may be large.
    """

    def __init__(
        self,
        lenient: bool,
        regex_fault: Callable[[str], str] = lambda _: "",
        *,
        expands: bool = True,
    ) -> None:
        self._lenient = lenient
        self._expands = expands
        self._regex_fault = regex_fault
        self._names: dict[str, str] = {}  # pointer -> name of its definition
        self._definitions: dict[str, Any] = {}
        self._references = SchemaReferences({})
        self.unenforced: list[str] = []

    def read(self, text: str) -> str:
        """Return the rewritten schema `text`. Text that is not JSON is returned unchanged.

        Raise ValueError for an invalid schema, or one that cannot be enforced.
        """
        try:
            schema = json.loads(text, parse_float=simplest)
        except RecursionError:
            raise ValueError(TOO_DEEP) from None
        except ValueError:
            return text
        if schema is True:
            return "{}"
        if schema is False:
            raise ValueError("the schema is false: it permits no text")
        if not isinstance(schema, dict):
            raise ValueError(f"the schema is {shown(schema)}, expected an object, true or false")
        try:
            self._references = SchemaReferences(schema)
            root = self._read(self._references.schema, "#")
            if self._definitions:
                root = {**root, "$defs": self._definitions}
            return json.dumps(root)
        except RecursionError:
            raise ValueError(TOO_DEEP) from None
        except (TypeError, AttributeError) as error:  # a keyword was read before its check
            raise ValueError(f"a keyword has a value of a wrong type: {error}") from None

    # What is left out ---------------------------------------------------------------------------

    def _drop(self, at: str, keyword: str, why: str = "cannot be enforced") -> None:
        pointer = f"{at}/{keyword}"
        if not self._lenient:
            raise ValueError(f"{keyword} {why} (at {pointer}): {HOW}")
        if pointer not in self.unenforced:
            self.unenforced.append(pointer)

    # References ---------------------------------------------------------------------------------

    def _reference(self, reference: Any, at: str) -> dict[str, Any]:
        found = self._references.target(reference)
        if found is None:
            if not self._lenient:
                raise ValueError(
                    f"$ref = {shown(reference)} (at {at}) does not exist in the schema"
                )
            self._drop(at, "$ref")
            return {}
        schema, pointer = found
        name = self._names.get(pointer)
        if name is None:
            name = self._names[pointer] = f"d{len(self._names)}"
            self._definitions[name] = self._read(schema, pointer)
        return {"$ref": f"#/$defs/{name}"}

    # Keywords -----------------------------------------------------------------------------------

    def _read(self, schema: Any, at: str, around: Mapping[str, Any] = _NOTHING) -> Any:
        """Rewrite `schema`. `around`: keywords next to an `allOf` of which `schema` is a part."""
        if not isinstance(schema, dict):
            return schema
        schema, own = self._joined(around, schema), schema
        found: dict[str, Any] = {}
        for name, value in own.items():
            kind, need = _SHAPES.get(name, (object, ""))
            if not isinstance(value, kind):
                raise ValueError(f"{name} must be {need}, got {shown(value)} (at {at}/{name})")
            if name in DROPPED:
                self._drop(at, name)
            elif name == "$ref":
                found.update(self._reference(value, at))
            elif name in ENFORCED:
                self._read_enforced(name, value, at, found, schema)
        for name in (it for it in own if it in SOMETIMES):  # may replace keywords read above
            seen = own if name == "unevaluatedProperties" else schema  # it does not look around
            getattr(self, f"_read_{_snake(name)}")(seen, own[name], at, found)
        return found

    def _demand(self, found: dict[str, Any], at: str, keyword: str, made: list[Any] | None) -> None:
        """Require one of the schemas `made` in place of a keyword, or drop the keyword."""
        if not made or not self._enforces(found, at, made):
            self._drop(at, keyword)

    def _enforces(self, found: dict[str, Any], at: str, made: list[Any]) -> bool:
        """Require one of the schemas `made`; return False if they cannot be enforced."""
        if not self._expands:
            return False
        before = dict(self._names), dict(self._definitions), self._lenient
        self._lenient = False  # a keyword in `made` has no pointer by which it could be reported
        try:
            read = [self._read(it, at) for it in made]
        except ValueError:
            self._names, self._definitions = before[:2]
            return False
        finally:
            self._lenient = before[2]
        _add(found, {"anyOf": read})
        return True

    def _joined(self, around: Mapping[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
        """Return `schema` with the keywords and properties of `around` that it lacks."""
        properties = {**(around.get("properties") or {}), **(schema.get("properties") or {})}
        return {**around, **schema, **({"properties": properties} if properties else {})}

    def _read_enforced(
        self, name: str, value: Any, at: str, found: dict[str, Any], schema: Mapping[str, Any]
    ) -> None:
        inner = f"{at}/{name}"
        if name in UP and isinstance(value, int | float) and not isinstance(value, bool):
            value = narrowed(name, value)
        elif name in ("const", "enum"):
            check_value(name, value)
        elif name in ("properties", "patternProperties") and isinstance(value, dict):
            value = {own: self._read(it, f"{inner}/{escaped(own)}") for own, it in value.items()}
        elif name == "pattern" and self._lenient and isinstance(value, str):
            if self._regex_fault(value):
                return self._drop(at, name)
        elif name in ("anyOf", "allOf", "items", "prefixItems") and isinstance(value, list):
            known = {k: v for k, v in schema.items() if k in _KNOWN} if name == "allOf" else {}
            value = [self._read(it, f"{inner}/{index}", known) for index, it in enumerate(value)]
        elif name in ("items", "additionalItems", "additionalProperties"):
            value = self._read(value, inner)
        found[name] = value

    def _read_format(self, schema: Any, value: Any, at: str, found: dict[str, Any]) -> None:
        """Leave out an unknown format, which is an annotation according to the specification."""
        if value in FORMATS:
            found["format"] = value
        if value in PATTERNS:
            found["allOf"] = [*found.get("allOf", ()), {"pattern": PATTERNS[value]}]

    def _read_unique_items(self, schema: Any, value: Any, at: str, found: dict[str, Any]) -> None:
        """Replace `uniqueItems` by all combinations of the possible values, if these are few.

        The values of a combination are in the order in which the schema lists them.
        """
        low, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        if not value or most <= 1:
            return
        values = listed_values(self._references.resolve(schema.get("items")))
        if values is not None:
            values = [*{canonical(it): it for it in values}.values()]
        made: list[Any] = []
        if values is not None and len(values) <= _MAX_SET and "prefixItems" not in schema:
            for size in range(math.ceil(low), int(min(most, len(values))) + 1):
                for chosen in itertools.combinations(values, size):
                    prefix = [{"const": it} for it in chosen]
                    made.append({"prefixItems": prefix, "minItems": size, "maxItems": size})
        self._demand(found, at, "uniqueItems", made)

    def _read_unevaluated_properties(
        self, schema: Any, value: Any, at: str, found: dict[str, Any]
    ) -> None:
        """Permit only properties that the schema, its `$ref` or a part of its `allOf` names."""
        made = None
        if value is False:
            closed = {name: dict.fromkeys(self._named(schema, name), True) for name in _NAMED}
            made = [{**closed, "additionalProperties": False}]
        if value is not True:
            self._demand(found, at, "unevaluatedProperties", made)

    def _named(self, schema: Any, keyword: str, depth: int = 6) -> dict[str, None]:
        """Return names, or patterns, of the properties that a schema and its parts define.

        Their order, on which outputs depend, is the same in each process.
        """
        if not isinstance(schema, Mapping) or not depth:
            return {}
        found = dict.fromkeys(schema.get(keyword) or ())
        target = self._references.target(schema.get("$ref"))
        parts = [*(schema.get("allOf") or ()), *([] if target is None else [target[0]])]
        for part in parts:
            found |= self._named(part, keyword, depth - 1)
        return found

    def _read_contains(self, schema: Any, value: Any, at: str, found: dict[str, Any]) -> None:
        """Require the first item to be one that fits `contains`."""
        if schema.get("minContains") == 0 and "maxContains" not in schema:
            return
        is_one = schema.get("minContains", 1) == 1 and "maxContains" not in schema
        made = [{"prefixItems": [value], "minItems": 1}] if is_one else None
        is_free = not any(it in schema for it in ("prefixItems", "additionalItems"))
        self._demand(found, at, "contains", made if is_free else None)

    def _read_min_properties(self, schema: Any, value: Any, at: str, found: dict[str, Any]) -> None:
        """Enforce a minimum of 1 by requiring one of the named properties."""
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        if value <= len(set(required)):
            return
        if set(properties) <= set(required):
            found["minProperties"] = value
        else:
            is_short = value == 1 and len(properties) <= _MAX_LISTED
            made = [{"required": [name]} for name in properties] if is_short else None
            self._demand(found, at, "minProperties", made)

    def _read_max_properties(self, schema: Any, value: Any, at: str, found: dict[str, Any]) -> None:
        """Enforce a maximum of 1 by a closed object for each of the named properties."""
        properties, patterns = schema.get("properties") or {}, schema.get("patternProperties")
        if schema.get("additionalProperties") is False and not patterns:
            if len(properties) <= value:
                return
        if set(properties) <= set(schema.get("required") or ()):
            found["maxProperties"] = value
        else:
            is_short = value == 1 and len(properties) <= _MAX_LISTED
            made: list[Any] = [
                {"properties": {name: True}, "additionalProperties": False} for name in properties
            ]
            self._demand(found, at, "maxProperties", made if is_short else None)

    def _read_not(self, schema: Any, value: Any, at: str, found: dict[str, Any]) -> None:
        if value is True or value == {}:  # zod writes a schema that nothing matches like this
            _add(found, {"anyOf": [False]})
            return
        self._demand(found, at, "not", complement(value, schema, self._references.resolve))

    def _read_if(self, schema: Any, value: Any, at: str, found: dict[str, Any]) -> None:
        """Require the condition and `then`, or the condition's complement and `else`."""
        others = complement(value, schema, self._references.resolve)
        made = None
        if others is not None:
            made = [{"allOf": [value, schema.get("then", True)]}]
            made += [{"allOf": [it, schema.get("else", True)]} for it in others]
        if "then" in schema or "else" in schema:
            self._demand(found, at, "if", made)

    def _read_dependencies(self, schema: Any, value: Any, at: str, found: dict[str, Any]) -> None:
        for name, needed in value.items():
            then = {"required": needed} if isinstance(needed, list) else needed
            self._demand(found, at, "dependencies", [{"properties": {name: False}}, then])

    def _read_dependent_required(
        self, schema: Any, value: Any, at: str, found: dict[str, Any]
    ) -> None:
        for name, needed in value.items():
            made = [{"properties": {name: False}}, {"required": needed}]
            self._demand(found, at, "dependentRequired", made)

    def _read_dependent_schemas(
        self, schema: Any, value: Any, at: str, found: dict[str, Any]
    ) -> None:
        for name, needed in value.items():
            made = [{"properties": {name: False}}, needed]
            self._demand(found, at, "dependentSchemas", made)

    def _read_property_names(self, schema: Any, value: Any, at: str, found: dict[str, Any]) -> None:
        """Rewrite `propertyNames` if it is a list of names or a pattern, or has no effect."""
        value = self._references.resolve(value)
        is_dict = isinstance(value, dict)
        says = {k: v for k, v in value.items() if limits_names(k, v)} if is_dict else {}
        if value is True or (is_dict and not says):
            return
        is_open = not schema.get("properties") and not schema.get("patternProperties")
        others = schema.get("additionalProperties", True)
        if is_open and set(says) == {"enum"} and all(isinstance(it, str) for it in says["enum"]):
            read = self._read(others, f"{at}/additionalProperties")
            found["properties"] = {name: read for name in says["enum"]}
            found["additionalProperties"] = False
        elif is_open and set(says) == {"pattern"} and not self._regex_fault(says["pattern"]):
            read = self._read(others, f"{at}/additionalProperties")
            found["patternProperties"] = {says["pattern"]: read}
            found["additionalProperties"] = False
        else:
            self._drop(at, "propertyNames")

    def _read_one_of(self, schema: Any, value: Any, at: str, found: dict[str, Any]) -> None:
        """Read `oneOf` as `anyOf` of branches that exclude each other."""
        if not isinstance(value, list):
            found["oneOf"] = value
            return
        made = self._exclusive(value)
        if made is not None and made != value and self._enforces(found, at, made):
            return None
        branches = [self._read(it, f"{at}/oneOf/{index}") for index, it in enumerate(value)]
        if made != value:
            self._drop(at, "oneOf", "has branches that may fit the same value")
        return _add(found, {"anyOf": branches})

    def _exclusive(self, given: list[Any]) -> list[Any] | None:
        """Return the branches, changed so that they exclude each other, or None if this fails.

        If a property such as a tag distinguishes two branches, both require it. Otherwise each
        of the two is limited to values that are known not to fit the other branch.
        """
        more: list[list[Any]] = [[] for _ in given]
        for index, one in enumerate(given):
            for before, other in enumerate(given[:index]):
                if excludes(one, other, self._references.resolve):
                    continue
                if len(given) > _MAX_BRANCHES:
                    return None
                tag = excluding_property(one, other, self._references.resolve)
                for own, branch, rest in ((index, one, other), (before, other, one)):
                    if tag is not None:
                        more[own].append({"required": [tag]})
                        continue
                    left = complement(rest, branch, self._references.resolve, partial=True)
                    if not left:
                        return None
                    more[own].append({"anyOf": left})
        return [{"allOf": [it, *own]} if own else it for it, own in zip(given, more, strict=True)]


def _add(found: dict[str, Any], schema: dict[str, Any]) -> None:
    """Add a schema to `found`, so that values must fit both."""
    if "anyOf" in found:
        found["allOf"] = [*found.get("allOf", ()), schema]
    else:
        found.update(schema)


def _snake(name: str) -> str:
    return re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name)
