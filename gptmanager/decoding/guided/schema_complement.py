"""Complements of JSON schemas, as schemas, for `not`, `if`, and the branches of `oneOf`.

The complement of a schema permits the values that do not fit the schema. Each function also gets
`around`, the enclosing schema: values that do not fit `around` do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gptmanager.decoding.guided.schema_overlap import Resolve, canonical, listed_values, types_of

ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "default"),
        *("title", "description", "examples", "deprecated", "readOnly", "writeOnly"),
        *("discriminator", "markdownDescription", "tsType"),
    }
)
_SOME = r"[\s\S]+"  # any text that is not empty
Alternatives = list[dict[str, Any]]  # a value must fit one of them


def complement(
    schema: Any, around: Any, resolve: Resolve, depth: int = 6, *, partial: bool = False
) -> Alternatives | None:
    """Return alternatives to `schema` for a value that fits `around`.

    A value that fits an alternative does not fit `schema`. Each value that does not fit `schema`
    fits an alternative, except for some arrays (see `_of_items`) and fractions (see `_of_type`). If
    the complement of a keyword cannot be written as a schema, the keyword is left out if `partial`;
    otherwise the result is None.
    """
    schema, around = resolve(schema), resolve(around)
    if canonical(schema) == canonical(around):
        return []
    if isinstance(schema, bool):
        return [] if schema else [{}]
    if not isinstance(schema, Mapping) or not depth:
        return None
    found: Alternatives = []
    for name, value in schema.items():
        if name in ANNOTATIONS or name.startswith("x-"):
            continue
        if name == "additionalProperties":
            own = _of_additional(schema, around)
        else:
            make = _KEYWORDS.get(name)
            own = None if make is None else make(value, around, resolve, depth - 1)
        if own is not None:
            found += own
        elif not partial:
            return None
    return found


def _of_additional(schema: Mapping[str, Any], around: Any) -> Alternatives | None:
    """Return the complement of a closed object: objects with a property that only `around` has."""
    if schema["additionalProperties"] is True:
        return []
    is_closed = isinstance(around, Mapping) and around.get("additionalProperties") is False
    patterns = schema.get("patternProperties") or not is_closed or around.get("patternProperties")
    if schema["additionalProperties"] is not False or patterns:
        return None
    others = (around.get("properties") or {}).keys() - (schema.get("properties") or {}).keys()
    return [{"type": "object", "required": [name]} for name in sorted(others)]


def _of_type(value: Any, around: Any, resolve: Resolve, depth: int) -> Alternatives | None:
    others = types_of(around) - types_of({"type": value})
    if "integer" in types_of({"type": value}):
        others -= {"number"}  # "number" would permit integers; this leaves out fractions
    return [{"type": sorted(others)}] if others else []


def _of_values(values: Any, around: Any, resolve: Resolve, depth: int) -> Alternatives | None:
    known = listed_values(around)
    if known is None and types_of(around) == {"boolean"}:
        known = [True, False]
    if not isinstance(values, list):
        return None
    if known is None:
        if not all(isinstance(value, str) for value in values):
            return None
        others = sorted(types_of(around) - {"string"})
        pattern = f"^(?:{_other_text(values)})$"
        return [{"type": "string", "pattern": pattern}, *([{"type": others}] if others else [])]
    texts = {canonical(value) for value in values}
    left = [value for value in known if canonical(value) not in texts]
    return [{"enum": left}] if left else []


def _other_text(texts: Sequence[str]) -> str:
    """Return a regular expression, without look-ahead, for every text except `texts`."""
    firsts = sorted({text[0] for text in texts if text})
    if not firsts:
        return _SOME if texts else f"(?:{_SOME})?"
    letters = "".join(rf"\x{{{ord(letter):x}}}" for letter in firsts)
    branches = [] if "" in texts else [""]
    branches.append(f"[^{letters}](?:{_SOME})?")
    for letter in firsts:
        rest = _other_text([text[1:] for text in texts if text[:1] == letter])
        branches.append(rf"\x{{{ord(letter):x}}}(?:{rest})")
    return "|".join(branches)


def _of_required(names: Any, around: Any, resolve: Resolve, depth: int) -> Alternatives | None:
    needed = around.get("required") or () if isinstance(around, Mapping) else ()
    return [{"type": "object", "properties": {name: False}} for name in names if name not in needed]


def _of_properties(value: Any, around: Any, resolve: Resolve, depth: int) -> Alternatives | None:
    given = around.get("properties") or {} if isinstance(around, Mapping) else {}
    found: Alternatives = []
    for name, schema in value.items():
        own = complement(schema, given.get(name, True), resolve, depth)
        if own is None:
            return None
        found += [{"type": "object", "required": [name], "properties": {name: it}} for it in own]
    return found


def _of_items(value: Any, around: Any, resolve: Resolve, depth: int) -> Alternatives | None:
    """Permit only arrays in which all items fit the same alternative to `value`."""
    given = around.get("items", True) if isinstance(around, Mapping) else True
    own = complement(value, given, resolve, depth)
    if own is None or isinstance(value, list) or isinstance(given, list):
        return None
    return [{"type": "array", "minItems": 1, "items": it} for it in own]


def _of_contains(value: Any, around: Any, resolve: Resolve, depth: int) -> Alternatives | None:
    given = around.get("items", True) if isinstance(around, Mapping) else True
    own = complement(value, given, resolve, depth)
    return None if own is None else [{"type": "array", "items": {"anyOf": own} if own else False}]


def _of_any(value: Any, around: Any, resolve: Resolve, depth: int) -> Alternatives | None:
    each = [complement(it, around, resolve, depth) for it in value]
    if any(it is None for it in each):
        return None
    return [] if not all(each) else [{"allOf": [{"anyOf": it} for it in each]}]


def _of_all(value: Any, around: Any, resolve: Resolve, depth: int) -> Alternatives | None:
    found: Alternatives = []
    for schema in value:
        own = complement(schema, around, resolve, depth)
        if own is None:
            return None
        found += own
    return found


def _of_least(kind: str, keyword: str) -> Callable[..., Alternatives | None]:
    """Return a function that complements a minimum length: it permits shorter values."""

    def make(value: Any, around: Any, resolve: Resolve, depth: int) -> Alternatives | None:
        return [{"type": kind, keyword: value - 1}] if value > 0 else []

    return make


def _of_most(kind: str, keyword: str) -> Callable[..., Alternatives | None]:
    """Return a function that complements a maximum length: it permits longer values."""

    def make(value: Any, around: Any, resolve: Resolve, depth: int) -> Alternatives | None:
        return [{"type": kind, keyword: value + 1}]

    return make


_KEYWORDS: Mapping[str, Callable[..., Alternatives | None]] = {
    "type": _of_type,
    "enum": _of_values,
    "const": lambda value, *others: _of_values([value], *others),
    "required": _of_required,
    "properties": _of_properties,
    "items": _of_items,
    "contains": _of_contains,
    "anyOf": _of_any,
    "allOf": _of_all,
    "not": lambda value, *_: [{"allOf": [value]}],
    "minLength": _of_least("string", "maxLength"),
    "maxLength": _of_most("string", "minLength"),
    "minItems": _of_least("array", "maxItems"),
    "maxItems": _of_most("array", "minItems"),
}
