"""A JSON schema as the parser can enforce it, and what of it is not enforced.

The parser refuses some keywords and has no references but within a document. A schema is written
anew: what says nothing is left out, and each reference becomes one to a definition of its own. What
cannot be enforced is refused by name, or, if the reader is `lenient`, left out and reported.

The parser has bounds of 64 bits and constants of double precision for the numbers of a schema, and
takes others for the nearest ones, so that what it permits would not fit the schema. Bounds are
narrowed to what it can hold; what cannot be held is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from gptmanager.decoding.schema_overlap import excludes, excluding_property

ENFORCED = frozenset(
    {
        *("type", "enum", "const", "anyOf", "allOf", "$ref"),
        *("properties", "patternProperties", "additionalProperties", "required"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)
SOMETIMES = frozenset(
    {"format", "oneOf", "propertyNames", "not", "uniqueItems", "minProperties", "maxProperties"}
)
DROPPED = frozenset(
    {
        *("if", "dependencies", "dependentRequired", "dependentSchemas", "contains"),
        *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
    }
)
FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        "uri",
    }
)
_UP = {"minimum": True, "exclusiveMinimum": True, "maximum": False, "exclusiveMaximum": False}
_MOST = 2**63 - 1024  # the largest double below 2**63
_EXACT = 2**53
_MAX_LISTED = 20  # properties of which one must be there
TOO_DEEP = "the schema is nested too deeply"
HOW = "lenient=True, or in the server strict: false or --lenient, leaves it out and reports it"


class SchemaReader:
    """Reads one schema. `unenforced`: pointers to the keywords that were left out, in order.

    `regex_fault`: what is wrong with a regular expression, for a lenient reader; empty: nothing.
    """

    def __init__(self, lenient: bool, regex_fault: Callable[[str], str] = lambda _: "") -> None:
        self._lenient = lenient
        self._regex_fault = regex_fault
        self._names: dict[str, str] = {}  # pointer -> name of its definition
        self._definitions: dict[str, Any] = {}
        self._anchors: dict[str, tuple[Any, str]] = {}
        self.unenforced: list[str] = []

    def read(self, text: str) -> str:
        """The schema that is written for `text`; what is not JSON is left for the parser to tell.

        ValueError for what is not a schema, or cannot be enforced.
        """
        try:
            schema = json.loads(text)
        except RecursionError:
            raise ValueError(TOO_DEEP) from None
        except ValueError:
            return text
        if schema is True:
            return "{}"
        if schema is False:
            raise ValueError("the schema is false: no text fits it")
        if not isinstance(schema, dict):
            raise ValueError(f"the schema is {_shown(schema)}, expected an object, true or false")
        try:
            self._find_anchors(schema, "", "#")
            root = self._read(schema, "#")
            if self._definitions:
                root = {**root, "$defs": self._definitions}
            return json.dumps(root)
        except RecursionError:
            raise ValueError(TOO_DEEP) from None

    # What is left out ---------------------------------------------------------------------------

    def _drop(self, at: str, keyword: str, why: str = "cannot be enforced") -> None:
        pointer = f"{at}/{keyword}"
        if not self._lenient:
            raise ValueError(f"{keyword} {why} (at {pointer}): {HOW}")
        if pointer not in self.unenforced:
            self.unenforced.append(pointer)

    # References ---------------------------------------------------------------------------------

    def _find_anchors(self, part: Any, base: str, at: str) -> None:
        """Where each address points to that the schema gives to a part of its own."""
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
                self._find_anchors(value, base, f"{at}/{_escaped(name)}")

    def _target(self, reference: Any) -> tuple[Any, str] | None:
        """The part of the schema that a reference points to, and its pointer."""
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
                part = part[int(name)] if isinstance(part, list) else part[name]
            except (KeyError, IndexError, TypeError, ValueError):
                return None
            at = f"{at}/{_escaped(name)}"
        return part, at

    def _resolve(self, schema: Any) -> Any:
        """A schema, of which a reference that stands alone has been followed."""
        for _ in range(10):
            if not (isinstance(schema, Mapping) and "$ref" in schema):
                return schema
            found = self._target(schema["$ref"])
            others = {k: v for k, v in schema.items() if k in ENFORCED | SOMETIMES and k != "$ref"}
            if found is None or others:
                return True  # whatever it may be
            schema = found[0]
        return True

    def _reference(self, reference: Any, at: str) -> dict[str, Any]:
        found = self._target(reference)
        if found is None:
            if not self._lenient:
                raise ValueError(
                    f"$ref = {_shown(reference)} (at {at}) does not exist in the schema"
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

    def _read(self, schema: Any, at: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        found: dict[str, Any] = {}
        for name, value in schema.items():
            if name in DROPPED:
                self._drop(at, name)
            elif name in SOMETIMES:
                getattr(self, f"_read_{_snake(name)}")(schema, value, at, found)
            elif name == "$ref":
                found.update(self._reference(value, at))
            elif name in ENFORCED:
                self._read_enforced(name, value, at, found)
        if "properties" in found and isinstance(found["properties"], dict):
            found["properties"].update(found.pop("\0absent", {}))
        elif "\0absent" in found:
            found["properties"] = found.pop("\0absent")
        return found

    def _read_enforced(self, name: str, value: Any, at: str, found: dict[str, Any]) -> None:
        inner = f"{at}/{name}"
        if name in _UP and isinstance(value, int | float) and not isinstance(value, bool):
            value = _narrowed(name, value, _UP[name])
        elif name in ("const", "enum"):
            _check_value(name, value)
        elif name in ("properties", "patternProperties") and isinstance(value, dict):
            value = {own: self._read(it, f"{inner}/{_escaped(own)}") for own, it in value.items()}
        elif name == "pattern" and self._lenient and isinstance(value, str):
            if self._regex_fault(value):
                return self._drop(at, name)
        elif name in ("anyOf", "allOf", "items", "prefixItems") and isinstance(value, list):
            value = [self._read(it, f"{inner}/{index}") for index, it in enumerate(value)]
            if name == "anyOf":
                return _add(found, {"anyOf": value})
            if name == "allOf":
                value = [*found.get("allOf", ()), *value]
        elif name in ("items", "additionalItems", "additionalProperties"):
            value = self._read(value, inner)
        found[name] = value

    def _read_format(self, schema: Any, value: Any, at: str, found: dict[str, Any]) -> None:
        """An unknown one is an annotation, as the specification has it."""
        if value in FORMATS:
            found["format"] = value

    def _read_unique_items(self, schema: Any, value: Any, at: str, found: dict[str, Any]) -> None:
        most = schema.get("maxItems")
        if value and not (isinstance(most, int) and most <= 1):
            self._drop(at, "uniqueItems")

    def _read_min_properties(self, schema: Any, value: Any, at: str, found: dict[str, Any]) -> None:
        required = schema.get("required")
        num_required = len(set(required)) if isinstance(required, list) else 0
        properties = schema.get("properties")
        if not isinstance(value, int) or value <= num_required:
            return
        closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        if not properties and not schema.get("patternProperties"):
            found["minProperties"] = value
        elif (
            value == 1
            and closed
            and isinstance(properties, dict)
            and len(properties) <= _MAX_LISTED
        ):
            _add(found, {"anyOf": [{"required": [name]} for name in properties]})
        else:
            self._drop(at, "minProperties")

    def _read_max_properties(self, schema: Any, value: Any, at: str, found: dict[str, Any]) -> None:
        properties, patterns = schema.get("properties"), schema.get("patternProperties")
        closed = schema.get("additionalProperties") is False and not patterns
        if closed and isinstance(properties, dict) and len(properties) <= value:
            return
        if not properties and not patterns:
            found["maxProperties"] = value
        else:
            self._drop(at, "maxProperties")

    def _read_not(self, schema: Any, value: Any, at: str, found: dict[str, Any]) -> None:
        """`not` of a property that is there: it is absent."""
        names = (
            value.get("required") if isinstance(value, dict) and set(value) == {"required"} else ()
        )
        is_object = schema.get("type") == "object" or "properties" in schema
        if is_object and isinstance(names, list) and len(names) == 1:
            found["\0absent"] = {names[0]: False}
        else:
            self._drop(at, "not")

    def _read_property_names(self, schema: Any, value: Any, at: str, found: dict[str, Any]) -> None:
        """One that says nothing is left out; a list of names, or a pattern, becomes properties."""
        value = self._resolve(value)
        says = (
            {k: v for k, v in value.items() if k in ENFORCED | SOMETIMES | DROPPED}
            if isinstance(value, dict)
            else {}
        )
        says.pop("type", None)
        if says.get("minLength") == 0 or says.get("format") not in FORMATS:
            says = {k: v for k, v in says.items() if (k, v) != ("minLength", 0) and k != "format"}
        is_plain = value is True or (isinstance(value, dict) and not says)
        if is_plain:
            return
        is_open = not any(schema.get(it) for it in ("properties", "patternProperties", "required"))
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
        """As `anyOf`, where no value fits two of the branches."""
        if not isinstance(value, list):
            found["oneOf"] = value
            return
        branches = [self._read(it, f"{at}/oneOf/{index}") for index, it in enumerate(value)]
        if not self._are_exclusive(value, branches):
            self._drop(at, "oneOf", "has branches of which two may fit")
        _add(found, {"anyOf": branches})

    def _are_exclusive(self, given: list[Any], branches: list[Any]) -> bool:
        """Whether branches exclude each other; a tag that does it becomes required."""
        for index, one in enumerate(given):
            for before, other in enumerate(given[:index]):
                if excludes(one, other, self._resolve):
                    continue
                tag = excluding_property(one, other, self._resolve)
                if tag is None:
                    return False
                for branch in (index, before):
                    branches[branch] = {"allOf": [branches[branch], {"required": [tag]}]}
        return True


def _add(found: dict[str, Any], schema: dict[str, Any]) -> None:
    """Add what must fit, too."""
    if "anyOf" in found:
        found["allOf"] = [*found.get("allOf", ()), schema]
    else:
        found.update(schema)


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


def _snake(name: str) -> str:
    return re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
