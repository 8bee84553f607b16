"""The format of Gemma 4: objects without quotes around names, and with marks around strings.

<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:[1,2]}<tool_call|>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gptmanager.server.answer_parsing.answer_parts import Arguments, Found
from gptmanager.server.answer_parsing.call_parser import NAME, SPACE, CallParser, State, read_header
from gptmanager.server.answer_parsing.python_values import as_json, json_of_literal
from gptmanager.server.tool_formats.call_grammar import (
    CallShape,
    grammar_text,
    named_values,
    text_until,
)
from gptmanager.server.tool_formats.schema_types import choices_of, properties_of, types_of
from gptmanager.server.tool_formats.tool_format import ShapedFormat

_QUOTE = '<|"|>'
_STRING = re.compile(re.escape(_QUOTE))
_BREAKS = re.compile(rf"{re.escape(_QUOTE)}|[{{}}\[\],]")
_WORD = re.compile(r"[^\s{}\[\],:][^{}\[\],:]*")
_KEY = re.compile(
    rf"\s*(?:{re.escape(_QUOTE)})?([^{{}}\[\],:<>]{{1,256}})(?:{re.escape(_QUOTE)})?\s*:"
)
_OPENER, _CLOSER = "<|tool_call>", "<tool_call|>"
_MAX_DEPTH = 4  # the grammar of deeper values does not follow their schema


class ValueScan:
    """Finds the end of a value, in a text that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._at = 0

    def take(self, text: str) -> int | None:
        """Return the index of the comma or bracket after the value at the beginning of `text`.

        The result is None if the value continues. Each call passes the whole text again, with new
        text at its end.
        """
        while True:
            found = (_STRING if self._is_string else _BREAKS).search(text, self._at)
            if found is None:
                self._at = max(self._at, len(text) - len(_QUOTE) + 1)
                return None
            self._at = found.end()
            if found[0] == _QUOTE:
                self._is_string = not self._is_string
            elif found[0] in "{[":
                self._depth += 1
            elif not self._depth:
                return found.start()
            elif found[0] != ",":
                self._depth -= 1


class Gemma4Parser(CallParser):
    """Returns each argument when it is complete."""

    openers = (_OPENER,)
    closers = (_CLOSER,)

    def _read_header(self, found: list[Found]) -> bool:
        header = read_header(self._text, (SPACE, "call:", NAME, SPACE, "{"))
        if header == ("", 0):
            return False
        if header is None or header[0] not in self._names:
            return self._reject_call(found)
        self._take(header[1])
        self._call(header[0], found)
        self._scan, self._num_values, self._state = ValueScan(), 0, State.ARGUMENTS
        return True

    def _read_arguments(self, found: list[Found]) -> bool:
        end = self._scan.take(self._text)
        if end is None:
            return False
        piece, last = self._take(end), self._take(1)
        self._scan = ValueScan()
        if piece.strip():
            key = _KEY.match(piece)
            name = f"argument_{self._num_values}" if key is None else key[1].strip()
            value = _json_of(piece if key is None else piece[key.end() :])
            before = ", " if self._num_values else "{"
            found.append(Arguments(self.num_calls - 1, f"{before}{as_json(name)}: {value}"))
            self._num_values += 1
        if last != ",":
            found.append(Arguments(self.num_calls - 1, "}" if self._num_values else "{}"))
            self._state = State.BETWEEN
        return True


def _json_of(text: str) -> str:
    """Return a value as JSON; words that are neither numbers nor constants are strings."""
    parts = text.strip().split(_QUOTE)
    for index, part in enumerate(parts):
        parts[index] = as_json(part) if index % 2 else _WORD.sub(_quoted_word, part)
    whole = "".join(parts)
    found = json_of_literal(whole)
    return as_json(text.strip()) if found is None else found


def _quoted_word(word: re.Match[str]) -> str:
    text = word[0].rstrip()
    value = json_of_literal(text)
    is_key = word.string[word.end() : word.end() + 1] == ":"
    return as_json(text) if is_key or value is None else value


class _Grammar:
    """Builds the grammar of values; strings in JSON schemas are not checked further.

    `lines` are the grammar lines so far, `schemas` the JSON schemas by the names of their rules.
    """

    def __init__(self, rule: str, marks: Mapping[str, int]) -> None:
        self.lines = text_until(f"{rule}_string", _QUOTE, marks)
        self.schemas: dict[str, Any] = {}
        self._rule, self._marks = rule, marks
        self._has_any = False
        self._quote = grammar_text(_QUOTE, marks)

    def object(self, rule: str, schema: Any, depth: int = 0) -> str:
        """Return the grammar of the named values in an object, in alphabetical order."""
        properties = properties_of(schema)

        def value_of(one: str, name: str) -> str:
            key = grammar_text(f"{name}:", self._marks)
            return f"{key} {self.value(f'{one}_value', properties[name], depth + 1)}"

        self.lines += named_values(rule, schema, sorted(properties), ",", value_of)
        return rule

    def value(self, rule: str, schema: Any, depth: int) -> str:
        """Return the grammar of a value of `schema`."""
        kinds, choices = types_of(schema), choices_of(schema)
        if choices is not None:
            return f"({' | '.join(self._choice(it) for it in choices)})"
        if kinds == {"string"}:
            return f"{self._quote} {self._rule}_string"
        if kinds and kinds <= {"integer", "number", "boolean", "null"}:
            self.schemas[rule] = schema
            return rule
        items = schema.get("items") if isinstance(schema, Mapping) else None
        if kinds == {"array"} and items is not None and depth < _MAX_DEPTH:
            return self._list(self.value(f"{rule}_item", items, depth + 1))
        if kinds == {"object"} and properties_of(schema) and depth < _MAX_DEPTH:
            return f'"{{" {self.object(rule, schema, depth)} "}}"'
        return self._any()

    def _choice(self, value: Any) -> str:
        text = f"{_QUOTE}{value}{_QUOTE}" if isinstance(value, str) else as_json(value)
        return grammar_text(text, self._marks)

    def _list(self, item: str) -> str:
        return f'"[" ({item} ("," {item})*)? "]"'

    def _any(self) -> str:
        """Return the grammar of any value."""
        rule = f"{self._rule}_any"
        if not self._has_any:
            self._has_any = True
            self.schemas[f"{rule}_constant"] = {"type": ["number", "boolean", "null"]}
            pair = f'/[^<>{{}}\\[\\],:"]{{1,64}}/ ":" {rule}'
            self.lines.append(
                f"{rule}: {self._quote} {self._rule}_string | {rule}_constant | "
                f'{self._list(rule)} | "{{" ({pair} ("," {pair})*)? "}}"'
            )
        return rule


def _body(rule: str, schema: Any, marks: Mapping[str, int]) -> tuple[list[str], dict[str, Any]]:
    grammar = _Grammar(rule, marks)
    grammar.object(rule, schema)
    return grammar.lines, grammar.schemas


class Gemma4(ShapedFormat):
    name = "gemma4"
    tags = (_OPENER, _CLOSER, _QUOTE)
    shape = CallShape(
        f"{_OPENER}call:", "{", f"}}{_CLOSER}", joint="", tag=_OPENER, tags=tags, body=_body
    )
    parser_class = Gemma4Parser

    @staticmethod
    def is_in(template: str) -> bool:
        return _OPENER in template and _CLOSER in template
