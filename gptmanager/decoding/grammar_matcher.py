"""From the text of a grammar to llguidance's matcher.

The matcher has bounds of 64 bits and constants of double precision for the numbers of a schema, and
takes others for the nearest ones, so that what it permits would not fit the schema. Bounds are
narrowed to what it can hold; what cannot be held is refused by name.

`answerer` is for a `ChildProcess`: with llguidance alone, it starts in no time.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from typing import Any

NO_TEXT = "no text fits the grammar"
_FUEL = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000}  # what exhausts it takes 0.2 s
_MOST = 2**63 - 1024  # the largest double below 2**63
_EXACT = 2**53
_TOO_DEEP = "the schema is nested too deeply"
_UP = {"minimum": True, "exclusiveMinimum": True, "maximum": False, "exclusiveMaximum": False}
_VALUES = ("const", "enum")
_NAMES = ("properties", "patternProperties", "$defs", "definitions")  # of schemas, not keywords
_IGNORED = ("default", "examples", "$comment", "title", "description")


def new_matcher(llguidance: Any, tokenizer: Any, kind: str, text: str) -> Any:
    """A matcher at its start, which is never moved on: sequences have copies.

    Raises ValueError for a grammar that is wrong, or that no text fits.
    """
    make = llguidance.LLMatcher
    if kind == "regex":
        grammar = make.grammar_from_regex(text)
    elif kind.startswith("json_schema"):
        options = {"whitespace_flexible": kind != "json_schema"}
        grammar = make.grammar_from_json_schema(readable_schema(text), overrides=options)
    else:
        grammar = make.grammar_from_lark(text)
    limits = llguidance.LLParserLimits(verbose_errors=False, **_FUEL)
    matcher = make(tokenizer, grammar, log_level=0, limits=limits)
    fault = matcher.get_error() or _first_fault(matcher.deep_copy(), tokenizer.eos_tokens)
    if fault:
        raise ValueError(fault)
    return matcher


def _first_fault(matcher: Any, end_ids: list[int]) -> str:
    """What goes wrong in the first steps, of which the first is the slow one; empty: nothing."""
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    fault = fault_of(matcher)
    for end_id in end_ids:
        mask &= ~(1 << end_id)
    if fault or not mask:
        return fault
    lowest = mask & -mask
    matcher.consume_token(lowest.bit_length() - 1)
    fault = fault_of(matcher)
    return "" if fault == NO_TEXT and mask != lowest else fault  # another may do


def fault_of(matcher: Any) -> str:
    """Why a matcher can go on no more, empty if it can or has come to an end."""
    fault = str(matcher.get_error()).removesuffix("\n<non-verbose/>")
    return NO_TEXT if fault.startswith("NoExtension") else fault


def text_of(schema: Any) -> str:
    """A schema as JSON, if it is not given as such. ValueError if it is nested too deeply."""
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def rule_of(schema: Any) -> str:
    """A schema as it stands in a rule of a Lark grammar; ValueError for what is none."""
    read = json.loads(readable_schema(text_of(schema)))
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return json.dumps({**read, "x-guidance": options})


def readable_schema(text: str) -> str:
    """The schema that stands for `text`; what is no JSON is left as it is, for the parser to tell.

    `true` is any JSON value. ValueError for what is no schema, or cannot be held.
    """
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError:
        return text
    if schema is True:
        return "{}"
    if schema is False:
        raise ValueError("the schema is false: no text fits it")
    if not isinstance(schema, dict):
        raise ValueError(f"the schema is {_shown(schema)}, expected an object, true or false")
    try:
        return json.dumps(_read(schema))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _read(part: Any) -> Any:
    """A schema, or what holds some."""
    if isinstance(part, list):
        return [_read(one) for one in part]
    if not isinstance(part, dict):
        return part
    return {name: _read_keyword(name, value) for name, value in part.items()}


def _read_keyword(name: str, value: Any) -> Any:
    if name in _UP and isinstance(value, int | float) and not isinstance(value, bool):
        return _narrowed(name, value, _UP[name])
    if name in _VALUES:
        _check_value(name, value)
        return value
    if name in _NAMES and isinstance(value, dict):
        return {own: _read(schema) for own, schema in value.items()}
    return value if name in _IGNORED else _read(value)


def _narrowed(name: str, bound: float, up: bool) -> float:
    """The bound, or the nearest one inside of it that is both a double and a 64-bit integer."""
    if abs(bound) <= _EXACT:
        return bound
    if not (bound <= _MOST if up else bound >= -_MOST):
        raise ValueError(f"{name} = {_shown(bound)} is beyond integers of 64 bits")
    near = float(max(-_MOST, min(bound, _MOST)))
    if abs(bound) < _MOST and (near < bound if up else near > bound):
        near = math.nextafter(near, math.inf if up else -math.inf)
    return int(near)  # whose digits are read exactly


def _check_value(name: str, value: Any) -> None:
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        for part in parts:
            _check_value(name, part)
    elif isinstance(value, int | float) and abs(value) > _EXACT:
        raise ValueError(
            f"{name} holds {_shown(value)}, which double precision does not hold as it is written"
        )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def new_tokenizer(llguidance: Any, text: str, end_ids: list[int]) -> Any:
    return llguidance.LLTokenizer(text, eos_token=end_ids or None)


def answerer(tokenizer: str, end_ids: list[int]) -> Callable[[list[str]], None]:
    """The function that compiles grammars on trial, in a process of its own."""
    llguidance = importlib.import_module("llguidance")
    made = new_tokenizer(llguidance, tokenizer, end_ids)
    new_matcher(llguidance, made, "regex", "a")  # starts threads, which need memory of their own

    def answer(question: list[str]) -> None:
        new_matcher(llguidance, made, *question)

    return answer
