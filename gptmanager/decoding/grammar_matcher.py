"""From the text of a grammar to llguidance's matcher; and the program of a trial of that.

As a program it imports nothing of this package, so that it starts in no time: it reads a line with
the tokenizer, says "" when it is ready, and answers a line for each grammar: what is wrong with it.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

NO_TEXT = "no text fits the grammar"
_FUEL = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000}  # what exhausts it takes 0.2 s


def new_matcher(llguidance: Any, tokenizer: Any, kind: str, text: str) -> Any:
    """A matcher at its start, which is never moved on: sequences have copies.

    Raises ValueError for a grammar that is wrong, or that no text fits.
    """
    make = llguidance.LLMatcher
    if kind == "regex":
        grammar = make.grammar_from_regex(text)
    elif kind.startswith("json_schema"):
        options = {"whitespace_flexible": kind != "json_schema"}
        grammar = make.grammar_from_json_schema(text, overrides=options)
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


def new_tokenizer(llguidance: Any, text: str, end_ids: list[int]) -> Any:
    return llguidance.LLTokenizer(text, eos_token=end_ids or None)


def _bound_memory(max_bytes: int) -> None:
    """Of what is taken from now on."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
    except (ImportError, OSError):  # no Linux: time alone is bounded
        return
    most = pages * resource.getpagesize() + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _serve() -> None:
    given = json.loads(sys.stdin.readline())
    sys.path[:] = given["path"]
    llguidance = importlib.import_module("llguidance")
    tokenizer = new_tokenizer(llguidance, given["tokenizer"], given["end_ids"])
    new_matcher(llguidance, tokenizer, "regex", "a")  # starts threads, which need room of their own
    _bound_memory(given["max_bytes"])
    print('""', flush=True)
    for line in sys.stdin:
        fault = ""
        try:
            new_matcher(llguidance, tokenizer, *json.loads(line))
        except BaseException as error:  # noqa: B036 - a panic of llguidance, too
            fault = str(error) or type(error).__name__
        print(json.dumps(fault), flush=True)


if __name__ == "__main__":
    _serve()
