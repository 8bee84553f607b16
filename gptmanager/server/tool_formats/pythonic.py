"""The format of some Llama models: the whole answer is a list of calls in Python's syntax.

[get_weather(city="Rome"), add(a=1, b=2)]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gptmanager.server.answer_parsing.answer_parts import Arguments, Found
from gptmanager.server.answer_parsing.call_parser import NAME, SPACE, CallParser, State, read_header
from gptmanager.server.tool_formats.call_grammar import CallShape, grammar_text
from gptmanager.server.tool_formats.python_values import LiteralScan, json_of_literal
from gptmanager.server.tool_formats.schema_types import (
    as_json,
    properties_of,
    required_of,
    types_of,
)
from gptmanager.server.tool_formats.tool_format import ShapedFormat

_SHOWN = re.compile(r"\[\w+\(\w+=\w+")
_KEY = re.compile(r"\s*([^\W\d][\w-]{0,255})\s*=(?!=)")


class PythonicParser(CallParser):
    """Returns each argument when it is complete. An argument that is not a literal is a string."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        self._order = {name: list(properties_of(it)) for name, it in parameters.items()}
        self._positions: list[str] = []  # names of the last call's positional arguments
        self._num_values = 0
        self._scan = LiteralScan()

    def _begins_call(self, rest: str) -> bool:
        return rest.startswith("[")

    def _read_header(self, found: list[Found]) -> bool:
        first = "[" if not self.num_calls else ","
        header = read_header(self._text, (first, SPACE, NAME, SPACE, "("))
        if header == ("", 0):
            return False
        if header is None or header[0] not in self._names:
            return self._reject_call(found)
        self._take(header[1])
        self._call(header[0], found)
        self._positions, self._num_values = self._order[header[0]], 0
        self._scan, self._state = LiteralScan(), State.ARGUMENTS
        return True

    def _read_arguments(self, found: list[Found]) -> bool:
        end = self._scan.take(self._text)
        if end is None:
            return False
        piece, last = self._take(end), self._take(1)
        self._scan = LiteralScan()
        if piece.strip():
            self._add_value(piece, found)
        if last != ",":
            closing = "}" if self._num_values else "{}"
            found.append(Arguments(self.num_calls - 1, closing))
            self._state = State.BETWEEN
        return True

    def _add_value(self, text: str, found: list[Found]) -> None:
        key, index = _KEY.match(text), self._num_values
        if key is not None:
            name, text = key[1], text[key.end() :]
        else:
            name = self._positions[index] if index < len(self._positions) else f"argument_{index}"
        value = json_of_literal(text.strip())
        value = as_json(text.strip()) if value is None else value
        before = ", " if index else "{"
        found.append(Arguments(self.num_calls - 1, f"{before}{as_json(name)}: {value}"))
        self._num_values += 1

    def _read_between(self) -> bool:
        """Read the comma before the next call, or the end of the list."""
        rest = self._text.lstrip()
        if not rest:
            return False
        self._before = self._text[: -len(rest)]
        if rest[0] == ",":
            self._text, self._state = rest, State.HEADER
        else:
            self._text, self._state = rest.removeprefix("]"), State.PLAIN
        return True


def _body(rule: str, schema: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the grammar of named arguments: first the required ones, then the optional ones.

    Both groups are in the schema's order. A boolean argument is written as True or False, and any
    other argument as JSON, which the parser also accepts.
    """
    properties, required = properties_of(schema), required_of(schema)
    ordered = sorted(properties, key=lambda name: name not in required)
    lines, schemas = [], {}
    for index, name in enumerate(ordered):
        one, more = f"{rule}_{index}", f"{rule}_{index + 1}"
        value, key = f"{one}_value", grammar_text(f"{name}=", {})
        if types_of(properties[name]) == {"boolean"}:
            lines.append(f'{one}_argument: {key} ("True" | "False")')
        else:
            lines.append(f"{one}_argument: {key} {value}")
            schemas[value] = properties[name]
        optional = name not in required
        lines.append(
            f"{one}_first: {one}_argument {more}_next" + (f" | {more}_first" if optional else "")
        )
        following = f'", " {one}_argument {more}_next'
        lines.append(f"{one}_next: {following}" + (f" | {more}_next" if optional else ""))
    last = f"{rule}_{len(ordered)}"
    return [f"{rule}: {rule}_0_first", *lines, f'{last}_first: ""', f'{last}_next: ""'], schemas


_SHAPE = CallShape("", "(", ")", begin="[", joint=", ", end="]", body=_body)


class Pythonic(ShapedFormat):
    name = "pythonic"
    shape = _SHAPE
    parser_class = PythonicParser

    @staticmethod
    def is_in(template: str) -> bool:
        return _SHOWN.search(template) is not None
