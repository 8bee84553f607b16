"""Fields of JSON bodies: one table reads a body, and describes it in the OpenAPI document.

Decides what a value may be. Knows nothing of what it is for. An absent field and null are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from gptmanager.errors import quoted
from gptmanager.server.errors import ApiError


class Kind(Protocol):
    """The values that a field may have."""

    def read(self, where: str, value: Any) -> Any:
        """The value as the server takes it; ApiError 400 names `where`, the value and the limit."""

    def schema(self) -> dict[str, Any]:
        """The same as a JSON schema."""


class Field(NamedTuple):
    """A key of a body. `help` goes into the OpenAPI document."""

    name: str
    kind: Kind
    help: str = ""
    required: bool = False


def read_fields(
    body: Mapping[str, Any], fields: Mapping[str, Field], *, lenient: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """The values that are given, by name, and the names that are unknown (only if `lenient`).

    Raises ApiError 400 for a wrong value, a required one that is missing, and an unknown name.
    """
    unknown = [name for name, value in body.items() if name not in fields and value is not None]
    if unknown and not lenient:
        raise wrong(
            unknown[0],
            f"{quoted(unknown[0])} is an unknown field; a server started with --lenient ignores it",
            code="unknown_field",
        )
    given = {}
    for name, field in fields.items():
        value = body.get(name)
        if value is not None:
            given[name] = field.kind.read(name, value)
        elif field.required:
            raise wrong(name, f"{name} is missing")
    return given, unknown


def by_name(*groups: Sequence[Field]) -> dict[str, Field]:
    return {field.name: field for group in groups for field in group}


def object_schema(fields: Mapping[str, Field], *, closed: bool = True) -> dict[str, Any]:
    """A body of these fields. `closed`: with no others."""
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


def wrong(where: str, message: str, *, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=where, code=code)


# Kinds ------------------------------------------------------------------------------------------


class Number(NamedTuple):
    """A finite number within `low..high`; `or_zero`: or 0, which lies below. `excludes_low`:
    `low` itself lies outside.
    """

    low: float = -math.inf
    high: float = math.inf
    or_zero: bool = False
    excludes_low: bool = False

    def read(self, where: str, value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise wrong(where, f"{where} = {quoted(value)} is no number")
        if not (self.low <= value <= self.high or (self.or_zero and value == 0)):
            outside = _outside(self.low, self.high)
            told = f"{outside}, and not 0" if self.or_zero else outside
            raise wrong(where, f"{where} = {quoted(value)} is {told}")
        if self.excludes_low and value == self.low:
            raise wrong(where, f"{where} = {quoted(value)} must be more than {self.low:g}")
        return float(value)

    def schema(self) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "number", **_bounds(self.low, self.high)}
        if self.excludes_low:
            found["exclusiveMinimum"] = found.pop("minimum")
        return {"anyOf": [found, {"const": 0}]} if self.or_zero else found


class Integer(NamedTuple):
    """An integer within `low..high`; 5.0 is one, too."""

    low: float = -math.inf
    high: float = math.inf

    def read(self, where: str, value: Any) -> int:
        whole = int(value) if type(value) is float and value.is_integer() else value
        if type(whole) is not int:
            raise wrong(where, f"{where} = {quoted(value)} is no integer")
        if not self.low <= whole <= self.high:
            raise wrong(where, f"{where} = {quoted(value)} is {_outside(self.low, self.high)}")
        if whole is not value and abs(whole) >= 2**53:
            raise wrong(where, f"{where} = {quoted(value)} is no exact integer")
        return whole

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", **_bounds(self.low, self.high)}


class Flag(NamedTuple):
    def read(self, where: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise wrong(where, f"{where} = {quoted(value)} is neither true nor false")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


class Text(NamedTuple):
    """A text of `shortest..longest` characters."""

    shortest: int = 0
    longest: int | None = None

    def read(self, where: str, value: Any) -> str:
        if not isinstance(value, str):
            raise wrong(where, f"{where} = {quoted(value)} is no text")
        if len(value) < self.shortest:
            raise wrong(where, f"{where} is a text of {len(value)} characters: too short")
        if self.longest is not None and len(value) > self.longest:
            raise wrong(where, f"{where} has {len(value)} characters, {self.longest} are allowed")
        return value

    def schema(self) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "string"}
        if self.shortest:
            found["minLength"] = self.shortest
        if self.longest is not None:
            found["maxLength"] = self.longest
        return found


class OneOf(NamedTuple):
    """One of several texts."""

    values: tuple[str, ...]

    def read(self, where: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.values:
            raise wrong(where, f"{where} = {quoted(value)} is none of {', '.join(self.values)}")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.values)}


class ListOf(NamedTuple):
    """A list of `shortest..longest` values of one kind."""

    kind: Kind
    shortest: int = 0
    longest: int | None = None

    def read(self, where: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise wrong(where, f"{where} = {quoted(value)} is no list")
        if len(value) < self.shortest:
            raise wrong(where, f"{where} has {len(value)} items, at least {self.shortest} needed")
        if self.longest is not None and len(value) > self.longest:
            raise wrong(where, f"{where} has {len(value)} items, {self.longest} are allowed")
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
    """A list of token ids, none of which is read yet: `check_token_ids` does that when the model
    has said how many there may be.
    """

    def read(self, where: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise wrong(where, f"{where} = {quoted(value)} must be a list of token ids")
        return value

    def schema(self) -> dict[str, Any]:
        return ListOf(Integer(0, 2**31 - 1)).schema()


class TextOrTexts(NamedTuple):
    """A text, or a list of at most `longest`, as a list; none of them empty. `longest_text`:
    characters of each.
    """

    longest: int
    longest_text: int | None = None

    def read(self, where: str, value: Any) -> list[str]:
        if isinstance(value, str):
            return [self._text.read(where, value)]
        if not isinstance(value, list):
            raise wrong(where, f"{where} = {quoted(value)} is neither a text nor a list of texts")
        return ListOf(self._text, longest=self.longest).read(where, value)

    def schema(self) -> dict[str, Any]:
        several = ListOf(self._text, longest=self.longest).schema()
        return {"anyOf": [self._text.schema(), several]}

    @property
    def _text(self) -> Text:
        return Text(1, self.longest_text)


class Object(NamedTuple):
    """An object. `fields`: the keys that are read, others are left out; None: all, as they are."""

    fields: Mapping[str, Field] | None = None

    def read(self, where: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong(where, f"{where} = {quoted(value)} is no object")
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
    """Whatever JSON it is: read elsewhere, or without effect. `described`: its JSON schema."""

    described: Mapping[str, Any] | None = None

    def read(self, where: str, value: Any) -> Any:
        return value

    def schema(self) -> dict[str, Any]:
        return dict(self.described or {})


def check_token_ids(where: str, ids: Sequence[Any], vocab_size: int) -> None:
    """ApiError 400 names the first that is not a token id of the vocabulary."""
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
        raise wrong(at, f"{at} = {quoted(odd)} is no token id")
    raise wrong(where.partition("[")[0], f"{at} = {quoted(odd)} is outside 0 to {last}")


def are_integers(values: Sequence[Any], low: float, high: float) -> bool:
    """Whether all are integers within `low..high`; quick for millions of them."""
    return set(map(type, values)) == {int} and low <= min(values) and max(values) <= high


def _outside(low: float, high: float) -> str:
    least, most = (str(it) if type(it) is int else f"{it:g}" for it in (low, high))
    if math.isinf(high):
        return f"less than {least}"
    if math.isinf(low):
        return f"more than {most}"
    return f"outside {least} to {most}"


def _bounds(low: float, high: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if not math.isinf(low):
        found["minimum"] = low
    if not math.isinf(high):
        found["maximum"] = high
    return found
