"""Formats with calls in Python's syntax.

Some Llama models, as the whole answer:      [get_weather(city="Rome"), add(a=1, b=2)]
LFM2: <|tool_call_start|>[get_weather(city="Rome"), add(a=1, b=2)]<|tool_call_end|>
OLMo 3, a call in each line: <function_calls>get_weather(city="Rome")
                             add(a=1, b=2)</function_calls>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from gptmanager.callbacks.answers.call_grammar import (
    CallShape,
    check_names,
    grammar_text,
    named_values,
)
from gptmanager.callbacks.answers.parsing.answer_parts import Found
from gptmanager.callbacks.answers.parsing.argument_list import ArgumentListParser
from gptmanager.callbacks.answers.parsing.call_parser import NAME, SPACE, State
from gptmanager.callbacks.answers.parsing.python_values import as_json, json_of_literal
from gptmanager.callbacks.answers.schema_types import (
    is_closed,
    properties_of,
    required_of,
    types_of,
)
from gptmanager.callbacks.answers.tool_format import ShapedFormat

_SHOWN = re.compile(r"\[\w+\(\w+=\w+")
_NAME = re.compile(r"[^\W\d][\w-]{0,255}")
_KEY = re.compile(rf"\s*({_NAME.pattern})\s*=(?!=)")


class PythonicParser(ArgumentListParser):
    """A parser that takes an argument that is not a literal as a string.

    `bracket`: the text that begins a list of calls, after the opener. `separator`: the text between
    two calls, or "" if only white space is between them. `closers[0]` ends the list.
    """

    closers: ClassVar[tuple[str, ...]] = ("]",)
    bracket: ClassVar[str] = "["
    separator: ClassVar[str] = ","

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        self._order = {name: list(properties_of(it)) for name, it in parameters.items()}
        self._positions: list[str] = []  # names of the last call's positional arguments
        self._is_first = True  # the next call is the first of its list

    def _begins_call(self, rest: str) -> bool:
        return rest.startswith(self.bracket)

    def _begin(self, opener: str) -> None:
        super()._begin(opener)
        self._is_first = True

    def _header(self) -> tuple[str | re.Pattern[str], ...]:
        before = self.bracket if self._is_first else self.separator
        return SPACE, before, SPACE, NAME, SPACE, "("

    def _call(self, name: str, found: list[Found], call_id: str = "") -> None:
        super()._call(name, found, call_id)
        self._positions, self._is_first = self._order[name], False

    def _argument(self, text: str, index: int) -> tuple[str, str]:
        key = _KEY.match(text)
        if key is not None:
            name, text = key[1], text[key.end() :]
        else:
            name = self._positions[index] if index < len(self._positions) else f"argument_{index}"
        value = json_of_literal(text.strip())
        return name, as_json(text.strip()) if value is None else value

    def _read_between(self) -> bool:
        """Read the text between two calls, or the end of the list."""
        rest = self._text.lstrip()
        if not rest:
            return False
        is_end = any(rest.startswith(tag) or tag.startswith(rest) for tag in self.closers)
        if is_end or not rest.startswith(self.separator):
            return super()._read_between()
        self._before, self._text = self._text[: -len(rest)], rest
        self._state = State.HEADER
        return True


class Lfm2Parser(PythonicParser):
    openers = ("<|tool_call_start|>",)
    closers = ("]<|tool_call_end|>", "]", "<|tool_call_end|>")


class Olmo3Parser(PythonicParser):
    openers = ("<function_calls>",)
    closers = ("</function_calls>",)
    bracket = separator = ""


def _body(rule: str, schema: Any, marks: Mapping[str, int]) -> tuple[list[str], dict[str, Any]]:
    """Return the grammar of named arguments: first the required ones, then the optional ones.

    Both groups are in the schema's order. A boolean argument is written as True or False, and any
    other argument as JSON, which the parser also accepts. If the schema has no properties, the
    grammar allows any arguments, unless the schema forbids additional properties.
    """
    properties, required = properties_of(schema), required_of(schema)
    check_names(properties, _NAME)
    schemas: dict[str, Any] = {}
    if not properties and not is_closed(schema):
        one = f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" {rule}_any'
        return [f'{rule}: ({one} (", " {one})*)?'], {f"{rule}_any": True}

    def value_of(one: str, name: str) -> str:
        key = grammar_text(f"{name}=", marks)
        if types_of(properties[name]) == {"boolean"}:
            return f'{key} ("True" | "False")'
        schemas[f"{one}_value"] = properties[name]
        return f"{key} {one}_value"

    names = sorted(properties, key=lambda name: name not in required)
    return named_values(rule, schema, names, ", ", value_of), schemas


def _written(arguments: Mapping[str, Any]) -> str:
    """Return named arguments in Python's syntax, with double quotes where JSON has them."""
    texts = {key: as_json(it) if isinstance(it, str) else repr(it) for key, it in arguments.items()}
    return ", ".join(f"{key}={text}" for key, text in texts.items())


class Pythonic(ShapedFormat):
    name = "pythonic"
    shape = CallShape("", "(", ")", begin="[", joint=", ", end="]", body=_body)
    parser_class = PythonicParser

    @staticmethod
    def is_in(template: str) -> bool:
        return _SHOWN.search(template) is not None


class Lfm2(ShapedFormat):
    name = "lfm2"
    tags = ("<|tool_call_start|>", "<|tool_call_end|>")
    shape = CallShape(
        "", "(", ")", f"{tags[0]}[", ", ", f"]{tags[1]}", tags[0], tags, _body, write=_written
    )
    parser_class = Lfm2Parser

    @staticmethod
    def is_in(template: str) -> bool:
        return any(one in template for one in ("<|tool_call_start|>", "List of tools: "))


class Olmo3(ShapedFormat):
    name = "olmo3"
    tags = ("<function_calls>", "</function_calls>")
    shape = CallShape("", "(", ")", tags[0], "\n", tags[1], tags[0], tags, _body)
    parser_class = Olmo3Parser

    @staticmethod
    def is_in(template: str) -> bool:
        return "<function_calls>" in template
