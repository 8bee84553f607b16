"""Converts values in Python's syntax to JSON, for models that write calls as Python."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

_LONGEST = 1 << 16  # characters; longer values are not parsed as Python
_BREAKS = re.compile(r"""(?P<quote>\"{3}|'{3}|["'])|[()\[\]{},]""")
_QUOTES = re.compile(r"""\"{3}|'{3}|["']""")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LONGEST_SPACE = 16  # between a string and the comma or bracket after it
# Some models write 'It's' without a backslash. So a single mark ends its string only before a
# comma, a colon or a closing bracket.
_AFTER = rf"(?=\s{{0,{_LONGEST_SPACE}}}[,:)\]}}])"
_ENDS = {
    mark: re.compile(rf"{mark}{after}|\\")
    for mark, after in (("'", _AFTER), ('"', _AFTER), ("'''", ""), ('"""', ""))
}
_UNESCAPED = re.compile(r"""\\.|["'\n\r\0]""", re.DOTALL)
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\0": r"\x00", '"': r"\"", "'": r"\'"}
_CONSTANTS = {"true": True, "false": False, "null": None}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


STRICT_JSON = json.JSONDecoder(parse_constant=_refuse_constant)  # without NaN and Infinity


def as_json(value: Any) -> str:
    """Return a value as JSON, which UTF-8 can encode: single surrogates are escaped.

    Raise ValueError or TypeError if JSON cannot represent the value.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda one: f"\\u{ord(one[0]):04x}", text)


def json_of_literal(text: str) -> str | None:
    """Convert a value in JSON or in Python's syntax to JSON; return None if it is neither."""
    try:
        STRICT_JSON.decode(text)
        return text
    except (ValueError, RecursionError):
        pass
    if len(text) > _LONGEST:
        return None
    for written in (text, _with_escapes(text)):
        try:
            with warnings.catch_warnings():  # unknown escapes in strings cause warnings
                warnings.simplefilter("ignore")
                tree = _JsonConstants().visit(ast.parse(written.strip(), mode="eval"))
                return as_json(ast.literal_eval(tree))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


class _JsonConstants(ast.NodeTransformer):
    """Replaces the names true, false and null by their values."""

    def visit_Name(self, node: ast.Name) -> ast.AST:  # noqa: N802 - the name that ast asks for
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def _with_escapes(text: str) -> str:
    """Return a value in Python's syntax with backslashes before the marks within its strings.

    Line breaks in its strings become escapes, too. Returns `text` if a string does not end.
    """
    parts, at, text = [], 0, f"{text},"
    while (mark := _QUOTES.search(text, at)) is not None:
        parts.append(text[at : mark.end()])
        at = begin = mark.end()
        while True:
            found = _ENDS[mark[0]].search(text, at)
            if found is None:
                return text[:-1]
            if found[0] != "\\":
                break
            at = found.start() + 2
        body = text[begin : found.start()]
        parts.append(_UNESCAPED.sub(lambda one: _ESCAPES.get(one[0], one[0]), body) + mark[0])
        at = found.end()
    return "".join([*parts, text[at:-1]])


class LiteralScan:
    """Finds the end of a value in Python's syntax, in a text that arrives in pieces.

    A subclass may have another syntax. `breaks`: the brackets, the comma and, as group "quote", the
    beginnings of strings. `ends`: for each of them, the end of its string, and perhaps a backslash.
    `num_held`: letters at the end of the text in which a break may begin. `num_after`: letters
    after the mark at the end of a string that decide whether it is the end.
    """

    breaks: ClassVar[re.Pattern[str]] = _BREAKS
    ends: ClassVar[Mapping[str, re.Pattern[str]]] = _ENDS
    num_held: ClassVar[int] = 0
    num_after: ClassVar[int] = _LONGEST_SPACE

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._at = 0

    def take(self, text: str) -> int | None:
        """Return the index of the comma or bracket after the value at the beginning of `text`.

        The result is None if the value continues. Each call passes the whole text again, with new
        text at its end.
        """
        while True:
            found = (self.ends[self._quote] if self._quote else self.breaks).search(text, self._at)
            if found is None:
                num_held = len(self._quote) + self.num_after if self._quote else self.num_held
                self._at = max(self._at, len(text) - num_held)
                return None
            mark, at = found[0], found.start()
            if self._quote:
                self._at = at + (2 if mark == "\\" else len(mark))
                self._quote = self._quote if mark == "\\" else ""
            elif found["quote"]:
                if len(text) - at < 3 and text[at:] in (
                    mark,
                    mark * 2,
                ):  # a triple quote may follow
                    self._at = at
                    return None
                self._at, self._quote = at + len(mark), mark
            else:
                self._at = at + 1
                if mark in "([{":
                    self._depth += 1
                elif not self._depth:
                    return at
                elif mark != ",":
                    self._depth -= 1
