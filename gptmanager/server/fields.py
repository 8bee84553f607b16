"""Fields of JSON bodies: a table that validates a body and describes it in the OpenAPI document.

This module checks types and ranges only; the endpoints give values their meaning. A field with the
value null counts as absent.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, Protocol

import orjson

from gptmanager.errors import quoted
from gptmanager.server.errors import ApiError

# Names that APIs and other servers have for the same field, ours first.
_SAME = (
    (
        *("max_tokens", "max_output_tokens", "max_completion_tokens"),
        *("max_new_tokens", "max_length", "n_predict", "num_predict"),
    ),
    ("messages", "input", "prompt"),
    ("stop", "stop_sequences"),
    ("response_format", "format"),
    ("enable_thinking", "think"),
)
# A number, true or false in a string.
_NUMBER = re.compile(
    r"[ \t\n]*(-?(0|[1-9]\d{0,19})(\.\d{1,19})?(e[+-]?\d{1,3})?|true|false)[ \t\n]*", re.I | re.A
)
_MAX_COMPARED = 64  # characters of an unknown name that is compared with the known ones
_QUOTED = re.compile(r"""(?<!\w)('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")


class Kind(Protocol):
    """The type and range of a field."""

    def read(self, where: str, value: Any) -> Any:
        """Return the checked value. Raises ApiError (400) if the value is not allowed.

        `where` is the place of the field in the body, for the error.
        """

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the allowed values."""


class Field(NamedTuple):
    """A key of a body. `help` is its description in the OpenAPI document."""

    name: str
    kind: Kind
    help: str = ""
    required: bool = False


def read_fields(
    body: Mapping[str, Any], fields: Mapping[str, Field], *, lenient: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return the given values by name, and the unknown names.

    Raises ApiError (400) for a wrong value, for a missing required field, and, unless `lenient`,
    for an unknown name. If `lenient`, numbers, true and false may be strings.
    """
    unknown = [name for name, value in body.items() if name not in fields and value is not None]
    if unknown and not lenient:
        name = unknown[0]
        text = f"{quoted(name)} is an unknown field; a server started with --lenient ignores it"
        near = _near(name, fields)
        meant = f" (did you mean {near!r}?)" if near else ""
        raise bad_request(name, f"{text}{meant}", code="unknown_field")
    given = {}
    for name, field in fields.items():
        value = body.get(name)
        if value is not None:
            given[name] = _read(name, field.kind, value, lenient)
        elif field.required:
            raise bad_request(name, f"{name} is missing")
    return given, unknown


def _read(name: str, kind: Kind, value: Any, lenient: bool) -> Any:
    try:
        return kind.read(name, value)
    except ApiError:
        if not (lenient and isinstance(value, str) and _NUMBER.fullmatch(value)):
            raise
    return kind.read(name, json.loads(value.lower(), parse_int=orjson.loads))  # float from 2^64 on


def _near(name: str, fields: Mapping[str, Field]) -> str:
    """Return the field that an unknown name probably means, or ""."""
    same = [ours for names in _SAME if name in names for ours in names if ours in fields]
    if same or len(name) > _MAX_COMPARED:
        return same[0] if same else ""
    return next(iter(get_close_matches(name, fields, 1, 0.8)), "")


def by_name(*groups: Sequence[Field]) -> dict[str, Field]:
    """Return the fields of all `groups` by name."""
    return {field.name: field for group in groups for field in group}


def object_schema(fields: Mapping[str, Field], *, closed: bool = True) -> dict[str, Any]:
    """Return the JSON schema of a body with `fields`. `closed`: other keys are not allowed."""
    properties = {}
    for name, field in fields.items():
        schema = field.kind.schema()
        if not field.required:
            schema = {"anyOf": [schema, {"type": "null"}]}
        properties[name] = {**schema, "description": field.help} if field.help else schema
    found: dict[str, Any] = {"type": "object", "properties": properties}
    required = [name for name, field in fields.items() if field.required]
    if required:
        found["required"] = required
    if closed:
        found["additionalProperties"] = False
    return found


def bad_request(where: str, message: str, *, code: str | None = None) -> ApiError:
    """Return the error (400) for the field `where`. `message` is the complete text."""
    return ApiError(400, message, param=where, code=code)


def field_error(where: str, what: str) -> ApiError:
    """Return the error (400) for the field `where`. The message is `where`, a colon and `what`."""
    return bad_request(where, f"{where}: {what}")


def wrong_key(where: str, given: Mapping[str, Any], key: str, expected: str) -> ApiError:
    """Return the error (400) for `given[key]`, which is missing or is not `expected`.

    `where` is the place of the object `given`.
    """
    found = "is missing; it" if given.get(key) is None else quoted(given[key])
    return field_error(f"{where}.{key}", f"{found} must be {expected}")


def must_be(where: str, expected: str, value: Any) -> ApiError:
    """Return the error (400) for the field `where`, which must be `expected` but is `value`."""
    return bad_request(where, f"{where} must be {expected}, got {quoted(value)}")


def outside_quotes(text: str, change: Callable[[str], str]) -> str:
    """Return the text of an error with `change` applied to all of it except the quoted values."""
    parts = _QUOTED.split(text)
    parts[::2] = map(change, parts[::2])
    return "".join(parts)


# Kinds ------------------------------------------------------------------------------------------


class Number(NamedTuple):
    """A finite number from `low` to `high`. `excludes_low`: `low` itself is not allowed."""

    low: float = -math.inf
    high: float = math.inf
    excludes_low: bool = False

    def read(self, where: str, value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise must_be(where, "a number", value)
        if not self.low <= value <= self.high:
            problem = _range_problem(self.low, self.high)
            raise bad_request(where, f"{where} = {quoted(value)} {problem}")
        if self.excludes_low and value == self.low:
            raise bad_request(where, f"{where} = {quoted(value)} must be more than {self.low:g}")
        return float(value)

    def schema(self) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "number", **_bounds(self.low, self.high)}
        if self.excludes_low:
            found["exclusiveMinimum"] = found.pop("minimum")
        return found


class Integer(NamedTuple):
    """An integer from `low` to `high`.

    A float without a fraction, such as 5.0, is converted if its magnitude is less than 2**53.
    """

    low: float = -math.inf
    high: float = math.inf

    def read(self, where: str, value: Any) -> int:
        whole = int(value) if type(value) is float and value.is_integer() else value
        if type(whole) is not int:
            raise must_be(where, "an integer", value)
        if not self.low <= whole <= self.high:
            raise bad_request(
                where, f"{where} = {quoted(value)} {_range_problem(self.low, self.high)}"
            )
        if whole is not value and abs(whole) >= 2**53:
            raise bad_request(
                where, f"{where} = {quoted(value)} is not exact: send an integer of up to 64 bits"
            )
        return whole

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", **_bounds(self.low, self.high)}


class Flag(NamedTuple):
    """True or false."""

    def read(self, where: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise must_be(where, "true or false", value)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


class Text(NamedTuple):
    """A string of `shortest` to `longest` characters."""

    shortest: int = 0
    longest: int | None = None

    def read(self, where: str, value: Any) -> str:
        if not isinstance(value, str):
            raise must_be(where, "a string", value)
        _check_size(where, len(value), "characters", self.shortest, self.longest)
        return value

    def schema(self) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "string"}
        if self.shortest:
            found["minLength"] = self.shortest
        if self.longest is not None:
            found["maxLength"] = self.longest
        return found


class OneOf(NamedTuple):
    """One of the strings `values`."""

    values: tuple[str, ...]

    def read(self, where: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.values:
            raise must_be(where, f"one of {', '.join(self.values)}", value)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.values)}


class ListOf(NamedTuple):
    """A list of `shortest` to `longest` values of one kind."""

    kind: Kind
    shortest: int = 0
    longest: int | None = None

    def read(self, where: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise must_be(where, "a list", value)
        _check_size(where, len(value), "items", self.shortest, self.longest)
        if isinstance(self.kind, Integer) and are_integers(value, self.kind.low, self.kind.high):
            return value
        return [self.kind.read(f"{where}[{index}]", item) for index, item in enumerate(value)]

    def schema(self) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "array", "items": self.kind.schema()}
        if self.shortest:
            found["minItems"] = self.shortest
        if self.longest is not None:
            found["maxItems"] = self.longest
        return found


class TokenIds(NamedTuple):
    """A list of token ids. `read` does not check the items: the endpoint first checks the length,
    then calls `check_token_ids`.
    """

    def read(self, where: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise must_be(where, "a list of token ids", value)
        return value

    def schema(self) -> dict[str, Any]:
        return ListOf(Integer(0, 2**31 - 1)).schema()


class TextOrTexts(NamedTuple):
    """A string, or a list of at most `longest` strings. `read` returns a list for both.

    A string must have at most `longest_text` characters, and in a list at least 1. The empty string
    is an empty list.
    """

    longest: int
    longest_text: int | None = None

    def read(self, where: str, value: Any) -> list[str]:
        if isinstance(value, str):
            return [self._text.read(where, value)] if value else []
        if not isinstance(value, list):
            raise must_be(where, "a string or a list of strings", value)
        return ListOf(self._text, longest=self.longest).read(where, value)

    def schema(self) -> dict[str, Any]:
        several = ListOf(self._text, longest=self.longest).schema()
        return {"anyOf": [Text(0, self.longest_text).schema(), several]}

    @property
    def _text(self) -> Text:
        return Text(1, self.longest_text)


class Object(NamedTuple):
    """An object. Only keys in `fields` are kept. If `fields` is None, all are kept unchecked."""

    fields: Mapping[str, Field] | None = None

    def read(self, where: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise must_be(where, "an object", value)
        if self.fields is None:
            return value
        inner = {f"{where}.{name}": value[name] for name in self.fields.keys() & value.keys()}
        known = {f"{where}.{name}": field for name, field in self.fields.items()}
        given, _ = read_fields(inner, known)
        return {name.removeprefix(f"{where}."): item for name, item in given.items()}

    def schema(self) -> dict[str, Any]:
        fields = self.fields
        return {"type": "object"} if fields is None else object_schema(fields, closed=False)


class AsItIs(NamedTuple):
    """Any JSON value, which is checked elsewhere or has no effect. `described`: its JSON schema for
    the OpenAPI document.
    """

    described: Mapping[str, Any] | None = None

    def read(self, where: str, value: Any) -> Any:
        return value

    def schema(self) -> dict[str, Any]:
        return dict(self.described or {})


def check_token_ids(where: str, ids: Sequence[Any], vocab_size: int) -> None:
    """Raise ApiError (400) for the first item that is not a token id of the vocabulary."""
    last = vocab_size - 1
    if not ids or are_integers(ids, 0, last):
        return
    index, odd = next(
        (index, one)
        for index, one in enumerate(ids)
        if type(one) is not int or not 0 <= one <= last
    )
    at = f"{where}[{index}]"
    if type(odd) is not int:
        raise must_be(at, "a token id", odd)
    raise bad_request(where.partition("[")[0], f"{at} = {quoted(odd)} is outside 0 to {last}")


def are_integers(values: Sequence[Any], low: float, high: float) -> bool:
    """Return whether `values` are one or more integers from `low` to `high`, fast for millions."""
    return set(map(type, values)) == {int} and low <= min(values) and max(values) <= high


def _check_size(where: str, size: int, unit: str, shortest: int, longest: int | None) -> None:
    """Raise ApiError (400) unless `size` is from `shortest` to `longest`."""
    if size < shortest:
        raise bad_request(where, f"{where} has {size} {unit}, and needs at least {shortest}")
    if longest is not None and size > longest:
        raise bad_request(where, f"{where} has {size} {unit}, at most {longest} are allowed")


def _range_problem(low: float, high: float) -> str:
    least, most = (str(it) if type(it) is int else f"{it:g}" for it in (low, high))
    if math.isinf(high):
        return f"must be at least {least}"
    if math.isinf(low):
        return f"must be at most {most}"
    return f"is outside {least} to {most}"


def _bounds(low: float, high: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if not math.isinf(low):
        found["minimum"] = low
    if not math.isinf(high):
        found["maximum"] = high
    return found
