"""Compiles the source of a grammar to a matcher of llguidance.

`answerer` runs in a `ChildProcess`, which imports only llguidance and therefore starts fast.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from gptmanager.decoding.guided.gbnf import lark_of
from gptmanager.decoding.guided.json_schema import TOO_DEEP, SchemaReader

NO_TEXT = "the grammar permits no text"
# Limits of the lexer's work, in llguidance's units: at the start, and in each step. A grammar that
# exceeds a limit fails after about 0.2 s.
_FUEL = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000}
_MAX_FOLLOWED = 16  # tokens after which a dead end of a grammar is left to the request


class GrammarSource(NamedTuple):
    """The source of a grammar.

    `text` is the grammar or the JSON schema, according to `kind`. `schemas` holds the pairs (rule
    name, JSON schema) of the rules of a Lark grammar that are JSON schemas. `lenient` holds the
    names of the rules from which keywords that cannot be enforced are left out. If the whole
    grammar is one JSON schema, its rule name is "".
    """

    kind: str
    text: str
    schemas: tuple[tuple[str, str], ...] = ()
    lenient: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        texts = (self.text, *(schema for _, schema in self.schemas))
        return sum(len(text.encode(errors="surrogatepass")) for text in texts)


def new_matcher(llguidance: Any, tokenizer: Any, kind: str, text: str) -> Any:
    """Return a matcher in its initial state. Callers advance only copies of it.

    `text` is the text that `read_source` returns. Raise ValueError if the grammar is invalid or
    permits no text.
    """
    make = llguidance.LLMatcher
    if kind == "regex":
        grammar = make.grammar_from_regex(text)
    elif kind.startswith("json_schema"):
        options = {"whitespace_flexible": kind != "json_schema"}
        try:
            grammar = make.grammar_from_json_schema(text, overrides=options)
        except ValueError as error:
            is_deep = str(error).startswith("recursion limit exceeded")  # at a place of new text
            raise ValueError(TOO_DEEP if is_deep else str(error)) from None
    else:
        grammar = make.grammar_from_lark(text)
    limits = llguidance.LLParserLimits(verbose_errors=False, **_FUEL)
    matcher = make(tokenizer, grammar, log_level=0, limits=limits)
    fault = matcher.get_error() or _first_fault(matcher.deep_copy(), tokenizer.eos_tokens)
    if fault:
        is_of_lark = kind == "gbnf" and fault != NO_TEXT
        raise ValueError(f"converted to Lark: {fault}" if is_of_lark else fault)
    return matcher


def _first_fault(matcher: Any, end_ids: list[int]) -> str:
    """Follow the grammar while only one token may be next, and return the error of this, or "".

    Where several tokens may be next, accept only the lowest: others may be permitted texts.
    """
    for _ in range(_MAX_FOLLOWED):
        mask, may_end = int.from_bytes(matcher.compute_bitmask(), "little"), matcher.is_accepting()
        fault = fault_of(matcher)
        for end_id in end_ids:
            mask &= ~(1 << end_id)
        if fault or not mask:
            return fault
        lowest = mask & -mask
        matcher.consume_token(lowest.bit_length() - 1)
        fault = fault_of(matcher)  # not NO_TEXT, which only a mask finds
        if fault or may_end or mask != lowest:
            return fault
    return ""


def fault_of(matcher: Any) -> str:
    """Return why a matcher cannot continue, or "" if it can or if its text is complete."""
    fault = str(matcher.get_error()).removesuffix("\n<non-verbose/>")
    return NO_TEXT if fault.startswith("NoExtension") else fault


def text_of(schema: Any) -> str:
    """Return a schema as JSON text. Raise ValueError if it is nested too deeply."""
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def read_source(
    llguidance: Any, source: GrammarSource, *, expands: bool = True
) -> tuple[str, list[str]]:
    """Return the grammar as text that the parser can enforce, and the keywords left out of it.

    Each keyword that was left out is given as the name of its rule followed by a JSON pointer, such
    as "x#/items/uniqueItems". With `expands`, keywords are replaced by equivalent schemas where
    possible. Raise ValueError for a schema that is invalid or cannot be enforced.
    """
    make = llguidance.LLMatcher
    unenforced: list[str] = []

    def read(name: str, schema: str) -> str:
        reader = SchemaReader(
            name in source.lenient,
            lambda pattern: make.validate_grammar(make.grammar_from_regex(pattern)),
            expands=expands,
        )
        text = reader.read(schema)
        unenforced.extend(f"{name}{pointer}" for pointer in reader.unenforced)
        return text

    if source.kind.startswith("json_schema"):
        return read("", source.text), unenforced
    rules = [lark_of(source.text) if source.kind == "gbnf" else source.text]
    for name, schema in source.schemas:
        options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        rule = {**json.loads(read(name, schema)), "x-guidance": options}
        rules.append(f"{name}: %json {json.dumps(rule)}")
    return "\n".join(rules), unenforced


def new_tokenizer(llguidance: Any, text: str, end_ids: list[int]) -> Any:
    """Return llguidance's form of the tokenizer that `text` describes in JSON."""
    return llguidance.LLTokenizer(text, eos_token=end_ids or None)


def answerer(tokenizer: str, end_ids: list[int]) -> Callable[[list[Any]], tuple[str, list[str]]]:
    """Return the function with which the child process checks a grammar by compiling it.

    The function takes the fields of a `GrammarSource`, and returns the result of `read_source`.
    """
    llguidance = importlib.import_module("llguidance")
    made = new_tokenizer(llguidance, tokenizer, end_ids)
    # llguidance starts its threads here, before the memory is limited
    new_matcher(llguidance, made, "regex", "a")

    def answer(question: list[Any]) -> tuple[str, list[str]]:
        source = GrammarSource(*question)
        try:
            return compiled(source, expands=True)
        except ValueError:
            if not source.lenient:
                raise
            return compiled(source, expands=False)  # the expanded schema may be too large

    def compiled(source: GrammarSource, *, expands: bool) -> tuple[str, list[str]]:
        text, unenforced = read_source(llguidance, source, expands=expands)
        new_matcher(llguidance, made, source.kind, text)
        return text, unenforced

    return answer
