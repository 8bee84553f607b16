"""The formats of Gemma 4 and FunctionGemma: objects without quotes around names, and with marks
around strings.

Gemma 4:       <|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:[1,2]}<tool_call|>
FunctionGemma: <start_function_call>call:get_weather{city:<escape>Rome<escape>,days:[1,2]}
               <end_function_call>
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from gptmanager.callbacks.answers.call_grammar import (
    CallShape,
    check_names,
    grammar_text,
    named_values,
    text_until,
)
from gptmanager.callbacks.answers.parsing.argument_list import ArgumentListParser
from gptmanager.callbacks.answers.parsing.call_parser import NAME, SPACE
from gptmanager.callbacks.answers.parsing.python_values import LiteralScan, as_json, json_of_literal
from gptmanager.callbacks.answers.schema_types import (
    choices_of,
    resolved,
    types_of,
)
from gptmanager.callbacks.answers.tool_format import ShapedFormat

_WORD = re.compile(r"[^\s{}\[\],:][^{}\[\],:]*")
_NAME = re.compile(r"[^{}\[\],:<>]{1,256}")
_ANY_KEY = r'/[^\s<>{}\[\],:"][^<>{}\[\],:"]{0,63}/'
_KEYS = {"object": "properties", "array": "items"}  # schemas with these keys may lack a type
_LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_MAX_DEPTH = 64


class _Gemma4Scan(LiteralScan):
    """Finds the end of a value, in a text that arrives in pieces."""

    breaks = re.compile(r'(?P<quote><\|"\|>)|[{}\[\],]')
    ends = {'<|"|>': re.compile(r'<\|"\|>')}
    num_held = len('<|"|>') - 1
    num_after = 0


class _FunctionGemmaScan(LiteralScan):
    breaks = re.compile(r"(?P<quote><escape>)|[{}\[\],]")
    ends = {"<escape>": re.compile("<escape>")}
    num_held = len("<escape>") - 1
    num_after = 0


class Gemma4Parser(ArgumentListParser):
    openers = ("<|tool_call>",)
    closers = ("<tool_call|>",)
    scan_class: ClassVar[type[LiteralScan]] = _Gemma4Scan

    def _header(self) -> tuple[str | re.Pattern[str], ...]:
        return SPACE, "call:", NAME, SPACE, "{"

    def _argument(self, text: str, index: int) -> tuple[str, str]:
        (quote,) = self.scan_class.ends
        mark = f"(?:{re.escape(quote)})?"
        key = re.match(rf"\s*{mark}({_NAME.pattern}){mark}\s*:", text)
        if key is None:
            return f"argument_{index}", _json_of(text, quote)
        return key[1].strip(), _json_of(text[key.end() :], quote)


class FunctionGemmaParser(Gemma4Parser):
    openers = ("<start_function_call>",)
    closers = ("<end_function_call>",)
    scan_class = _FunctionGemmaScan


def _json_of(text: str, quote: str) -> str:
    """Return a value as JSON; words that are neither numbers nor constants are strings."""
    parts = text.strip().split(quote)
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
    """Builds the grammar of arguments.

    It follows the schema in types, properties, items, references and alternatives. The contents of
    strings and the number of properties are not checked. `lines` are the grammar lines so far,
    `schemas` the JSON schemas by the names of their rules.
    """

    def __init__(self, rule: str, root: Any, marks: Mapping[str, int], quote: str) -> None:
        self.lines = text_until(f"{rule}_string", quote, marks)
        self.schemas: dict[str, Any] = {}
        self._rule, self._root, self._marks = rule, root, marks
        self._quote = quote
        self._string = f"{grammar_text(quote, marks)} {rule}_string"
        self._references: dict[str, str] = {}  # reference -> rule
        self._pending: list[str] = []  # references that have no rule in `lines` yet
        self._any = ""
        self._num_rules = 0

    def object(self, schema: Any, depth: int = 0) -> str:
        """Return the grammar of an object without its braces.

        Named values are in alphabetical order. An object without properties has any names.
        """
        own = schema if isinstance(schema, Mapping) else {}
        properties = own.get("properties")
        if not properties or not isinstance(properties, Mapping):
            others = own.get("additionalProperties", True)
            if others is False:
                return '""'
            pair = f'{_ANY_KEY} ":" {self.value(others, depth + 1)}'
            return f'({pair} ("," {pair})*)?'
        check_names(properties, _NAME)
        rule = self._new_rule()

        def value_of(_: str, name: str) -> str:
            key = grammar_text(f"{name}:", self._marks)
            return f"{key} {self.value(properties[name], depth + 1)}"

        self.lines += named_values(rule, schema, sorted(properties), ",", value_of)
        return rule

    def value(self, schema: Any, depth: int) -> str:
        """Return the grammar of a value of `schema`, which is nested in `depth` other schemas.

        Raises ValueError if `depth` is greater than `_MAX_DEPTH`.
        """
        if depth > _MAX_DEPTH:
            raise ValueError(f"a schema of a tool is nested deeper than {_MAX_DEPTH} levels")
        if not isinstance(schema, Mapping):
            return self._any_value()
        place = schema.get("$ref")
        if isinstance(place, str):
            return self._referenced(place)
        choices = choices_of(schema)
        if choices is not None:
            return _one_of(
                [grammar_text(_written(one, self._quote), self._marks) for one in choices]
            )
        kinds = types_of({"type": schema.get("type")})
        kinds = kinds or frozenset(kind for kind, key in _KEYS.items() if key in schema)
        several = schema.get("anyOf", schema.get("oneOf"))
        if not kinds and isinstance(several, list) and several:
            return _one_of([self.value(one, depth + 1) for one in several])
        return self._of_kinds(schema, kinds, depth)

    def _of_kinds(self, schema: Mapping[str, Any], kinds: frozenset[str], depth: int) -> str:
        parts = []
        if "string" in kinds:
            parts.append(self._string)
        if "object" in kinds:
            parts.append(f'"{{" {self.object(schema, depth)} "}}"')
        if "array" in kinds:
            parts.append(self._array(schema, depth))
        others = kinds - {"string", "object", "array"}
        if others:
            rule = self._new_rule()
            kept = schema if others == kinds else {key: schema[key] for key in _LIMITS & {*schema}}
            self.schemas[rule] = {**kept, "type": sorted(others)}
            parts.append(rule)
        return _one_of(parts) if parts else self._any_value()

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        first = schema.get("prefixItems")
        if isinstance(first, list) and first:  # exactly these items
            items = ' "," '.join(self.value(one, depth + 1) for one in first)
            return f'"[" {items} "]"'
        least, most = (schema.get(key) for key in ("minItems", "maxItems"))
        least = least if isinstance(least, int) else 0
        if most == 0:
            return '"[" "]"'
        item = self.value(schema.get("items", True), depth + 1)
        more = f"{max(least - 1, 0)},{most - 1 if isinstance(most, int) else ''}"
        many = item if most == 1 else f'{item} ("," {item}){{{more}}}'
        return f'"[" {many} "]"' if least else f'"[" ({many})? "]"'

    def add_references(self) -> None:
        """Add the rules of the schemas to which the schemas so far refer."""
        while self._pending:
            place = self._pending.pop()
            found = resolved({"$ref": place}, self._root)
            self.lines.append(f"{self._references[place]}: {self.value(found, 0)}")

    def _referenced(self, place: str) -> str:
        """Return the rule of the schema at a reference, which `add_references` adds."""
        if place not in self._references:
            self._references[place] = self._new_rule()
            self._pending.append(place)
        return self._references[place]

    def _any_value(self) -> str:
        if not self._any:
            rule = self._any = f"{self._rule}_any"
            kinds = frozenset(("string", "object", "array", "number", "boolean", "null"))
            self.lines.append(f"{rule}: {self._of_kinds({}, kinds, 0)}")
        return self._any

    def _new_rule(self) -> str:
        self._num_rules += 1
        return f"{self._rule}_v{self._num_rules}"


def _one_of(parts: Sequence[str]) -> str:
    return f"({' | '.join(parts)})"


def _written(value: Any, quote: str) -> str:
    """Return a value as the model writes it."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(_written(one, quote) for one in value)}]"
    if isinstance(value, Mapping):
        pairs = (f"{key}:{_written(one, quote)}" for key, one in value.items())
        return f"{{{','.join(pairs)}}}"
    return as_json(value)


def _body(
    rule: str, schema: Any, marks: Mapping[str, int], *, quote: str
) -> tuple[list[str], dict[str, Any]]:
    grammar = _Grammar(rule, schema, marks, quote)
    grammar.lines.append(f"{rule}: {grammar.object(resolved(schema, schema))}")
    grammar.add_references()
    return grammar.lines, grammar.schemas


def _shape(opener: str, closer: str, quote: str) -> CallShape:
    body, tags = functools.partial(_body, quote=quote), (opener, closer, quote)
    return CallShape(
        f"{opener}call:", "{", f"}}{closer}", joint="", tag=opener, tags=tags, body=body
    )


class Gemma4(ShapedFormat):
    name = "gemma4"
    tags = ("<|tool_call>", "<tool_call|>", '<|"|>')
    shape = _shape(*tags)
    parser_class = Gemma4Parser

    @staticmethod
    def is_in(template: str) -> bool:
        return "<|tool_call>" in template and "<tool_call|>" in template


class FunctionGemma(ShapedFormat):
    name = "functiongemma"
    tags = ("<start_function_call>", "<end_function_call>", "<escape>")
    shape = _shape(*tags)
    parser_class = FunctionGemmaParser

    @staticmethod
    def is_in(template: str) -> bool:
        return "<start_function_call>" in template
