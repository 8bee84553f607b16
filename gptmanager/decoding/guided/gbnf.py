"""Converts grammars in GBNF, llama.cpp's form of BNF, to Lark syntax.

llguidance has a converter, which refuses some grammars and changes the meaning of others. Their
text is prepared for it, and its result is corrected.
"""

from __future__ import annotations

import importlib
import re

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
# A literal or a character class, or the ends of lines with their comments, and a `|` after them.
_GBNF = re.compile(
    r'("(?:[^"\\]|\\.?)*(?:"|\Z)|\[(?:[^]\\]|\\.?)*(?:\]|\Z))'
    r"|((?:(?:#[^\n]*|\r)?\n[ \t]*)+)(\|?)|#[^\n]*",
    re.DOTALL,
)
_COMMENT = re.compile(r"#[^\n]*")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
# A literal or a regular expression, or the name of a terminal.
_LARK = re.compile(r'("(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/)|\b_*[A-Z][A-Z0-9_]*\b', re.DOTALL)
_SET_OPERATOR = re.compile(r"\\.|(&&|--|~~)", re.DOTALL)


def is_gbnf(grammar: str) -> bool:
    """Return whether a grammar is in GBNF, and not in Lark: it defines a rule with `::=`.

    `llguidance.gbnf_to_lark.is_lark_syntax` is not used, because it takes a grammar in GBNF with a
    rule `start` for Lark, and a grammar in Lark with attributes of the rule `start` for GBNF.
    """
    return _RULE.search(grammar) is not None


def lark_of(grammar: str) -> str:
    """Return a grammar in GBNF as Lark. Raise ValueError if it is invalid or nested too deeply."""
    converter = importlib.import_module("llguidance.gbnf_to_lark")
    prepared = _GBNF.sub(_prepared, grammar)
    try:
        lark: str = converter.gbnf_to_lark(prepared)
    except RecursionError:
        raise ValueError("the grammar is nested too deeply") from None
    except IndexError:
        raise ValueError("the grammar ends inside an escape") from None
    except Exception as error:  # the converter raises Exception itself
        raise ValueError(str(error)) from None
    return _LARK.sub(_corrected, lark)


def _prepared(token: re.Match[str]) -> str:
    """Return a token as the converter can read it, which permits a new line only after a `|`."""
    text, line_ends, bar = token.groups()
    if text is not None:
        return _ESCAPE.sub(_plain, text)
    # The time of the converter is quadratic in the number of comments.
    return "" if line_ends is None else bar + _COMMENT.sub("", line_ends)


def _plain(escape: re.Match[str]) -> str:
    """Return an escape as the converter can read it, which drops the zeros of a code point."""
    digits = escape[1] or escape[2] or escape[3]
    if digits is None and escape[0][1] not in "[]-":
        return escape[0]
    code = ord(escape[0][1]) if digits is None else int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"the escape {escape[0]} must be a Unicode character")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _corrected(token: re.Match[str]) -> str:
    """Return a token of the converter's result with the meaning that it has in GBNF."""
    text = token[0]
    if token[1] is None:
        # A rule instead of a terminal, of which the lexer would permit only the longest match.
        return text.lower()
    if text == "/./":
        return "/(?s:.)/"
    operators = [found for found in _SET_OPERATOR.findall(text) if found]
    if text[0] == "/" and operators:
        operator = operators[0]
        raise ValueError(
            f"the character class {text[1:-1]} has {operator}, which is a set operator in regular "
            f"expressions: write {operator[0]} as \\x{ord(operator[0]):02x}"
        )
    return text
