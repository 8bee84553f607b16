"""The keywords and formats of JSON schemas: which of them the parser enforces, and how far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gptmanager.decoding.guided.schema_overlap import types_of

# The parser enforces the keywords in ENFORCED. Keywords in SOMETIMES are enforced if they can be
# rewritten. Keywords in DROPPED are never enforced.
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
    {
        *("format", "oneOf", "propertyNames", "uniqueItems", "minProperties", "maxProperties"),
        *("not", "if", "contains", "unevaluatedProperties"),
        *("dependencies", "dependentRequired", "dependentSchemas"),
    }
)
DROPPED = frozenset({"unevaluatedItems", "$dynamicRef", "$recursiveRef"})
FORMATS = frozenset(
    {*("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"), "uri"}
)
# Patterns that the texts of a format must also match. The parser permits 29 February in all years,
# and a 60th second in all minutes. Most readers of dates refuse both, and all leap seconds.
_LEAP_YEAR = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"  # not 0000
)
_DAY = (
    "(?:[0-9]{4}-(?:0[13-9]|1[0-2])-[0-3][0-9]|[0-9]{4}-02-(?:[01][0-9]|2[0-8])"
    f"|{_LEAP_YEAR}-02-29)"
)
_SECOND = "[0-9]{2}:[0-9]{2}:[0-5]"
PATTERNS: Mapping[str, str] = {
    "date": f"^{_DAY}",
    "time": f"^{_SECOND}",
    "date-time": f"^{_DAY}.{_SECOND}",
}


def limits_names(keyword: str, value: Any) -> bool:
    """Return whether a keyword of `propertyNames` may exclude a name."""
    if keyword == "type":
        return "string" not in types_of({"type": value})
    if keyword == "format":
        return value in FORMATS
    return keyword in ENFORCED | SOMETIMES | DROPPED and (keyword, value) != ("minLength", 0)
