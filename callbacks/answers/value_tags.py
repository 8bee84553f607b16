"""Formats with a tag for each value of a call: the grammar of its arguments, and their parser."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gptmanager.callbacks.answers.call_grammar import (
    check_names,
    grammar_text,
    text_until,
)
from gptmanager.callbacks.answers.parsing.answer_parts import Arguments, Found
from gptmanager.callbacks.answers.parsing.call_parser import (
    SPACE,
    HeadedCallParser,
    State,
    read_header,
)
from gptmanager.callbacks.answers.parsing.python_values import as_json, json_of_literal
from gptmanager.callbacks.answers.parsing.text_scan import (
    ObjectScan,
    first_tag,
    num_tag_letters,
)
from gptmanager.callbacks.answers.schema_types import (
    choices_of,
    is_closed,
    properties_of,
    required_of,
    types_of,
    types_of_json,
)

_KEY = re.compile(r'[^<>"]{0,256}')
_NAME = re.compile(r'[^<>"]{1,256}')
_BRACKET = re.compile(r"\s*[{\[]")


@dataclass(frozen=True, slots=True)
class ValueTags:
    """The tags around the names and the values of arguments.

    `key` is the tag that begins an argument, `begin` the text between its name and its value, and
    `end` the tag after the value. If the format marks values in JSON, `begin_json` is the text
    before these, and `begin` the text before strings. `ends` are the tags that end a call. `joint`
    follows each argument. The grammar writes `line_break` around each value; the parser drops one
    `dropped_break` before it, and one after it. A value that begins with the first of `quotes` ends
    with the second, and may contain the tags.
    """

    key: str
    begin: str
    end: str
    ends: tuple[str, ...]
    line_break: str = ""
    dropped_break: str = ""
    joint: str = "\n"
    begin_json: str = ""
    quotes: tuple[str, str] | None = None

    @property
    def value_ends(self) -> tuple[str, ...]:
        """The tags that end a value, because a model may forget the first of them."""
        return self.end, self.key, self.ends[0]

    def body(
        self, rule: str, schema: Any, marks: Mapping[str, int]
    ) -> tuple[list[str], dict[str, Any]]:
        """Return the grammar of a schema's arguments, in order, and the schemas of further rules.

        If the schema has no properties, the grammar allows any arguments with strings as values,
        unless the schema forbids additional properties.
        """
        properties, required = properties_of(schema), required_of(schema)
        check_names(properties, _NAME)
        end, joint = self.line_break + self.end, grammar_text(self.joint, marks)
        ends = f"{grammar_text(end, marks)} {joint}"
        text_rule = [
            *text_until(f"{rule}_until", end, marks, self.value_ends),
            f"{rule}_text: {rule}_until {joint}",
        ]
        if not properties:
            key = grammar_text(self.key, marks)
            begin = grammar_text(self.begin + self.line_break, marks)
            any_one = f'{key} /[^<>"\\n]{{1,64}}/ {begin} {rule}_text'
            return [f"{rule}: " + ('""' if is_closed(schema) else f"({any_one})*"), *text_rule], {}
        lines, schemas, parts, has_text = [], {}, [], False
        for index, (name, own) in enumerate(properties.items()):
            one = f"{rule}_{index}"
            begin = self.begin if types_of(own) <= {"string"} else self.begin_json or self.begin
            begins = grammar_text(self.key + name + begin + self.line_break, marks)
            choices = choices_of(own)
            if types_of(own) <= {"string"} and choices is not None:
                texts = " | ".join(grammar_text(str(it), marks) for it in choices)
                lines.append(f"{one}_value: {begins} ({texts}) {ends}")
            elif types_of(own) <= {"string"}:
                lines.append(f"{one}_value: {begins} {rule}_text")
                has_text = True
            else:
                lines.append(f"{one}_value: {begins} {one} {ends}")
                schemas[one] = own
            parts.append(f"{one}_value" + ("" if name in required else "?"))
        lines.insert(0, f"{rule}: " + " ".join(parts))
        return lines + (text_rule if has_text else []), schemas


class _BracketScan(ObjectScan):
    """Finds strings in a list or an object in JSON or in Python's syntax."""

    breaks = re.compile(r"""["'{}\[\]]""")

    def __init__(self) -> None:
        super().__init__()
        self._num_scanned = 0
        self._has_ended = False

    def is_in_string(self, text: str, end: int) -> bool:
        """Return whether the first `end` characters of `text` end within a string.

        Each call passes the whole text again, and a larger `end`.
        """
        if not self._has_ended:
            self._has_ended = self.take(text[self._num_scanned : end]) is not None
            self._num_scanned = end
        return bool(self.quote) and not self._has_ended


class TaggedValuesParser(HeadedCallParser):
    """A parser that returns strings in pieces, and other values whole.

    A tag within a string of an object or a list does not end this value, unless the string does
    not end, or the value is neither JSON nor Python. The first such value is the last
    in which tags are passed, because each may be read to the end of the answer for nothing.
    """

    tags: ValueTags

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        self._schemas = {name: properties_of(schema) for name, schema in parameters.items()}
        self._name = ""
        self._num_values = 0
        self._types: frozenset[str] = frozenset()  # the types of the last value
        self._is_value = self._is_text = self._has_begun = self._is_quoted = False
        self._num_passed = 0  # characters of a value in which no tag ends it
        self._brackets: _BracketScan | None = None  # open while a value is an object or a list
        self._reads_brackets = True
        tags, line_break = self.tags, self.tags.dropped_break
        self._next = (tags.key, *tags.ends)
        self._ends = re.compile("|".join(map(re.escape, tags.value_ends)))
        self._held = {f"{before}{one}" for one in tags.value_ends for before in ("", line_break)}
        if tags.quotes:
            self._end_quote = re.compile(re.escape(tags.quotes[1]))
            self._held.add(tags.quotes[1])
        self._keys = [
            (tags.key, _KEY, *(SPACE if it.isspace() else it for it in _split(begin)))
            for begin in (tags.begin, tags.begin_json)
            if begin
        ]

    def _call(self, name: str, found: list[Found], call_id: str = "") -> None:
        super()._call(name, found, call_id)
        self._name = name

    def _begin_arguments(self, found: list[Found]) -> None:
        self._state, self._num_values, self._is_value = State.ARGUMENTS, 0, False

    def flush(self) -> list[Found]:
        found: list[Found] = []
        if self._state is State.ARGUMENTS and self._is_value and self._brackets is not None:
            self._reads_brackets, self._brackets, self._num_passed = False, None, 0
            while self._step(found):
                pass
        return found + super().flush()

    def _read_arguments(self, found: list[Found]) -> bool:
        return self._read_value(found) if self._is_value else self._read_key(found)

    def _read_key(self, found: list[Found]) -> bool:
        """Read up to the value of the next argument, or up to the end of the call."""
        at, tag = first_tag(self._text, self._next)
        if at < 0:
            self._take(
                len(self._text) - max(num_tag_letters(self._text, one) for one in self._next)
            )
            return False
        self._take(at)
        if tag != self.tags.key:
            self._add("}" if self._num_values else "{}", found)
            self._state = State.BETWEEN
            return True
        keys = [read_header(self._text, header, _KEY) for header in self._keys]
        is_json = keys[-1] is not None and len(keys) == 2
        key = keys[-1] or keys[0]
        if key is None:
            self._take(len(tag))  # not an argument
            return True
        name, end = key
        if not end:
            return False
        self._take(end)
        name = name.strip()
        self._is_value, self._has_begun = True, False
        self._brackets, self._num_passed = None, 0
        self._types = types_of(self._schemas[self._name].get(name))
        self._is_text = self._types <= {"string"}
        if len(keys) == 2:  # the model marks a string, which the schema must allow
            self._is_text = not is_json and (self._is_text or "string" in self._types)
        self._add(f"{', ' if self._num_values else '{'}{as_json(name)}: ", found)
        self._num_values += 1
        return True

    def _read_value(self, found: list[Found]) -> bool:
        """Read a value, without the line breaks around it."""
        line_break = self.tags.dropped_break
        if not self._has_begun:
            quote = self.tags.quotes[0] if self.tags.quotes else ""
            self._is_quoted = bool(quote) and self._text.startswith(quote)
            if not self._is_quoted and (not self._text or quote.startswith(self._text)):
                return False
            self._take(len(quote) if self._is_quoted else 0)
            self._text, self._has_begun = self._text.removeprefix(line_break), True
            if self._is_text:
                self._add('"', found)
        end = self._value_end()
        if end is None:
            if self._is_text:
                held = max(num_tag_letters(self._text, one) for one in self._held)
                self._add(_within_quotes(self._take(len(self._text) - held)), found)
            return False
        if self._brackets is not None and self._is_not_json(end.start()):
            self._reads_brackets, self._brackets, self._num_passed = False, None, 0
            return True
        value = self._take(end.start()).removesuffix(line_break)
        self._add(_within_quotes(value) + '"' if self._is_text else self._json_of(value), found)
        self._take(len(end[0]) if end[0] == self.tags.end or self._is_quoted else 0)
        self._is_value = False
        return True

    def _value_end(self) -> re.Match[str] | None:
        """Return the tag that ends the value, or None if it is not there yet."""
        ends = self._end_quote if self._is_quoted else self._ends
        if self._is_text:
            return ends.search(self._text)
        may_begin = self._brackets is None and self._reads_brackets and not self._is_quoted
        if may_begin and self._types & {"array", "object"} and _BRACKET.match(self._text):
            self._brackets = _BracketScan()
        found = ends.search(self._text, self._num_passed)
        while found and self._brackets and self._brackets.is_in_string(self._text, found.start()):
            self._num_passed = found.end()
            found = ends.search(self._text, self._num_passed)
        if found is None:  # a tag may begin in the last letters
            num_held = max(map(len, self.tags.value_ends)) - 1
            self._num_passed = max(self._num_passed, len(self._text) - num_held)
        return found

    def _is_not_json(self, end: int) -> bool:
        """Return whether tags are passed in a value up to `end` that is not an object or a list."""
        first = self._ends.search(self._text)
        has_passed = first is not None and first.start() < end
        return has_passed and json_of_literal(self._text[:end].strip()) is None

    def _json_of(self, text: str) -> str:
        """Return a value in JSON or Python syntax as JSON, and any other text as a JSON string.

        A value of a type that the schema does not allow is also a string, if it may be one.
        """
        found = json_of_literal(text.strip())
        if found is None or ("string" in self._types and not types_of_json(found) & self._types):
            return as_json(text)
        return found

    def _add(self, text: str, found: list[Found]) -> None:
        if text:
            found.append(Arguments(self.num_calls - 1, text))


def _split(text: str) -> list[str]:
    """Divide a text into white space and other parts."""
    return [part for part in re.split(r"(\s+)", text) if part]


def _within_quotes(text: str) -> str:
    return as_json(text)[1:-1]
