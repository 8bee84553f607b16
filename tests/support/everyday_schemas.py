"""Ten schemas as pydantic and zod write them, which ordinary clients send."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, Field, IPvAnyAddress, SecretStr


class _Color(Enum):
    RED = "red"
    BLUE = "blue"


class _Step(BaseModel):
    explanation: str
    output: str


class _Reasoning(BaseModel):
    steps: list[_Step]
    final_answer: str


class _Person(BaseModel):
    name: str = Field(min_length=1, max_length=20, description="in full")
    age: int = Field(ge=0, lt=150)
    color: _Color | None = None
    born: date
    tags: list[str] = Field(default_factory=list, max_length=3)


class _File(BaseModel):
    path: Path
    secret: SecretStr
    content: bytes
    address: IPvAnyAddress
    other: IPv4Address
    key: UUID
    seen: datetime
    price: Decimal


class _Tagged(BaseModel):
    labels: set[Literal["a", "b", "c"]]
    scores: dict[str, float]
    pair: tuple[int, str]


class _Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class _Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class _Pets(BaseModel):
    pets: list[Annotated[_Cat | _Dog, Field(discriminator="kind")]]


class _Node(BaseModel):
    value: int
    children: list[_Node] = []


_ZOD = "https://json-schema.org/draft/2020-12/schema"
_ZOD_RECORD: dict[str, Any] = {
    "$schema": _ZOD,
    "type": "object",
    "properties": {
        "byName": {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "number"},
        },
        "byKey": {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["low", "high"]},
            "additionalProperties": {"type": "boolean"},
            "required": ["low", "high"],
        },
    },
    "required": ["byName", "byKey"],
    "additionalProperties": False,
}
_ZOD_FORMATS: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "email": {
            "type": "string",
            "format": "email",
            "pattern": "^[A-Za-z0-9_+-]+@[A-Za-z0-9-]+\\.[A-Za-z]{2,}$",
        },
        "url": {"type": "string", "format": "uri"},
        "slug": {"type": "string", "format": "nanoid", "minLength": 2, "maxLength": 9},
        "count": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
        "when": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
    },
    "required": ["email", "slug", "count", "when"],
    "additionalProperties": False,
}
_ZOD_UNION: dict[str, Any] = {
    "$schema": _ZOD,
    "oneOf": [
        {
            "type": "object",
            "properties": {"type": {"type": "string", "const": "move"}, "by": {"type": "number"}},
            "required": ["type", "by"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"type": {"type": "string", "const": "stop"}},
            "required": ["type"],
            "additionalProperties": False,
        },
    ],
}
_ZOD_TUPLE: dict[str, Any] = {
    "$schema": _ZOD,
    "type": "object",
    "properties": {
        "point": {"type": "array", "prefixItems": [{"type": "number"}, {"type": "number"}]},
        "mode": {"default": "fast", "type": "string", "enum": ["fast", "slow"]},
        "next": {"$ref": "#/$defs/__schema0"},
    },
    "required": ["point", "mode"],
    "additionalProperties": False,
    "$defs": {"__schema0": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
}

PYDANTIC = (_Reasoning, _Person, _File, _Tagged, _Pets, _Node)
EVERYDAY: dict[str, dict[str, Any]] = {
    **{model.__name__.strip("_"): model.model_json_schema() for model in PYDANTIC},
    "zod record": _ZOD_RECORD,
    "zod formats": _ZOD_FORMATS,
    "zod union": _ZOD_UNION,
    "zod tuple": _ZOD_TUPLE,
}
