"""The format of Qwen3-Coder: values in tags. Strings are written as they are, other values as JSON.

<tool_call>
<function=get_weather>
<parameter=city>
Rome
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from gptmanager.server.answer_parsing.answer_parts import Arguments, Found
from gptmanager.server.answer_parsing.call_parser import NAME, SPACE, HeadedCallParser, State
from gptmanager.server.answer_parsing.text_scan import num_tag_letters
from gptmanager.server.tool_formats.call_grammar import CallShape, grammar_text
from gptmanager.server.tool_formats.python_values import json_of_literal
from gptmanager.server.tool_formats.schema_types import (
    as_json,
    choices_of,
    properties_of,
    required_of,
    types_of,
)
from gptmanager.server.tool_formats.tool_format import ShapedFormat

_OPENER, _CLOSER = TAGS = ("<tool_call>", "</tool_call>")
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_ENDS = (_END_PARAMETER, _PARAMETER, _END_FUNCTION)  # ends of a value; a model may forget the first
_NEXT = (_PARAMETER, _END_FUNCTION, _CLOSER)
_KEY = re.compile(re.escape(_PARAMETER) + r"([^<>]{0,256})>")


class Qwen3CoderParser(HeadedCallParser):
    """A parser that returns strings in pieces, other values whole. Calls may lack `<tool_call>`."""

    openers = (_OPENER, _FUNCTION)
    closers = (_END_FUNCTION, _CLOSER)
    headers = {
        _OPENER: ((SPACE, _FUNCTION, SPACE, NAME, SPACE, ">"),),
        _FUNCTION: ((SPACE, NAME, SPACE, ">"),),
    }

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        self._schemas = {name: properties_of(schema) for name, schema in parameters.items()}
        self._name = ""
        self._num_values = 0
        self._is_value = self._is_text = self._has_begun = False

    def _call(self, name: str, found: list[Found]) -> None:
        super()._call(name, found)
        self._name = name

    def _begin_arguments(self, found: list[Found]) -> None:
        self._state, self._num_values, self._is_value = State.ARGUMENTS, 0, False

    def _read_arguments(self, found: list[Found]) -> bool:
        return self._read_value(found) if self._is_value else self._read_key(found)

    def _read_key(self, found: list[Found]) -> bool:
        """Read up to the value of the next parameter, or up to the end of the call."""
        at, tag = _first(self._text, _NEXT)
        if at < 0:
            self._take(len(self._text) - max(num_tag_letters(self._text, one) for one in _NEXT))
            return False
        self._take(at)
        if tag != _PARAMETER:
            self._add("}" if self._num_values else "{}", found)
            self._state = State.BETWEEN
            return True
        key = _KEY.match(self._text)
        if key is None:
            end = len(_PARAMETER) + 257
            if len(self._text) < end and "<" not in self._text[1:] and ">" not in self._text:
                return False
            self._take(len(_PARAMETER))  # not a parameter
            return True
        self._take(key.end())
        name = key[1].strip()
        schema = self._schemas[self._name].get(name)
        self._is_value, self._has_begun = True, False
        self._is_text = types_of(schema) <= {"string"}
        self._add(f"{', ' if self._num_values else '{'}{as_json(name)}: ", found)
        self._num_values += 1
        return True

    def _read_value(self, found: list[Found]) -> bool:
        """Read a value, without the line breaks around it."""
        if not self._has_begun:
            if not self._text:
                return False
            self._text, self._has_begun = self._text.removeprefix("\n"), True
            if self._is_text:
                self._add('"', found)
        at, tag = _first(self._text, _ENDS)
        if at < 0:
            if self._is_text:
                held = max(num_tag_letters(self._text, f"\n{one}") for one in _ENDS)
                held = max(held, *(num_tag_letters(self._text, one) for one in _ENDS))
                self._add(_within_quotes(self._take(len(self._text) - held)), found)
            return False
        value = self._take(at).removesuffix("\n")
        self._add(_within_quotes(value) + '"' if self._is_text else _json_of(value), found)
        self._take(len(tag) if tag == _END_PARAMETER else 0)
        self._is_value = False
        return True

    def _add(self, text: str, found: list[Found]) -> None:
        if text:
            found.append(Arguments(self.num_calls - 1, text))


def _first(text: str, tags: tuple[str, ...]) -> tuple[int, str]:
    """Return the index of the tag that occurs first in `text`, and this tag, or (-1, "")."""
    return min(((text.find(tag), tag) for tag in tags if tag in text), default=(-1, ""))


def _within_quotes(text: str) -> str:
    return as_json(text)[1:-1]


def _json_of(text: str) -> str:
    """Return a value in JSON or Python syntax as JSON, and any other text as a JSON string."""
    found = json_of_literal(text.strip())
    return as_json(text) if found is None else found


def _body(rule: str, schema: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the grammar of a schema's parameters, in order, and the schemas of undefined rules.

    An undefined rule is used in the grammar, but not defined there.

    If the schema has no properties, the grammar allows any parameters with strings as values,
    unless the schema forbids additional properties.
    """
    properties, required = properties_of(schema), required_of(schema)
    ends = grammar_text(f"\n{_END_PARAMETER}\n", {})
    if not properties:
        is_closed = isinstance(schema, Mapping) and schema.get("additionalProperties") is False
        any_one = f'"{_PARAMETER}" /[^<>\\n]{{1,64}}/ ">\\n" {rule}_text'
        lines = [f"{rule}: " + ('""' if is_closed else f"({any_one})*")]
        return lines + _text_rule(f"{rule}_text"), {}
    lines, schemas, parts, has_text = [], {}, [], False
    for index, (name, own) in enumerate(properties.items()):
        one = f"{rule}_{index}"
        begins = grammar_text(f"{_PARAMETER}{name}>\n", {})
        choices = choices_of(own)
        if types_of(own) <= {"string"} and choices is not None:
            texts = " | ".join(grammar_text(str(it), {}) for it in choices)
            lines.append(f"{one}_value: {begins} ({texts}) {ends}")
        elif types_of(own) <= {"string"}:
            lines.append(f"{one}_value: {begins} {rule}_text")
            has_text = True
        else:
            lines.append(f"{one}_value: {begins} {one} {ends}")
            schemas[one] = own
        parts.append(f"{one}_value" + ("" if name in required else "?"))
    lines.insert(0, f"{rule}: " + " ".join(parts))
    return lines + (_text_rule(f"{rule}_text") if has_text else []), schemas


def _text_rule(name: str) -> list[str]:
    ends = json.dumps(f"\n{_END_PARAMETER}\n")
    return [f"{name}[lazy]: /(?s:.*)/ {ends}"]


_SHAPE = CallShape(
    f"{_OPENER}\n{_FUNCTION}", ">\n", f"{_END_FUNCTION}\n{_CLOSER}", tag=_OPENER, tags=TAGS,
    body=_body,
)  # fmt: skip


class Qwen3Coder(ShapedFormat):
    name = "qwen3_coder"
    tags = TAGS
    shape = _SHAPE
    parser_class = Qwen3CoderParser

    @staticmethod
    def is_in(template: str) -> bool:
        return _FUNCTION in template and _PARAMETER in template
