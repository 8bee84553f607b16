"""Calls of tools in the text of a model: found alike in a whole answer and in any pieces of it."""

import json
import random
import re

import pytest

from gptmanager.callbacks.answers.parsing import json_calls
from gptmanager.callbacks.answers.parsing.answer_parts import Arguments, CallBegins, Content
from gptmanager.callbacks.answers.schema_types import types_of
from gptmanager.callbacks.answers.tool_formats.hermes import HermesParser
from gptmanager.callbacks.answers.tool_formats.llama3 import Llama3Parser

NAMES = ("get_weather", "add")


def parsed(pieces, *, tagged):
    """The content, and the calls as [name, arguments]."""
    parser = (HermesParser if tagged else Llama3Parser)(NAMES)
    content, calls = "", []
    for piece in pieces:
        for one in parser.push(piece):
            content, calls = collected(one, content, calls)
    for one in parser.flush():
        content, calls = collected(one, content, calls)
    assert parser.num_calls == len(calls)
    return content, calls


def collected(one, content, calls):
    if isinstance(one, Content):
        assert one.text
        return content + one.text, calls
    if isinstance(one, CallBegins):
        assert one.index == len(calls)
        return content, [*calls, [one.name, ""]]
    assert isinstance(one, Arguments) and one.index == len(calls) - 1
    return content, [*calls[:-1], [calls[-1][0], calls[-1][1] + one.text]]


WEATHER = '{"city": "R\\"o}m\\\\e", "days": [1, {"a": "]"}]}'
HERMES = {
    "": ("", []),
    "Just text.\n": ("Just text.\n", []),
    "  \n": ("  \n", []),
    f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>': (
        "",
        [["get_weather", WEATHER]],
    ),
    'I look.\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n'
    '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>  \n': (
        "I look.",
        [["add", "{}"], ["add", '{"a":1}']],
    ),
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}, "id": "}"}\n</tool_call> Done.': (
        " Done.",
        [["add", '{"a": 1}']],
    ),
    # another order of the keys, a type, no arguments, arguments as a text
    '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>': ("", [["add", '{"a": 1}']]),
    '<tool_call>{"type": "function", "name": "add", "arguments": {}}</tool_call>': (
        "",
        [["add", "{}"]],
    ),
    '<tool_call>{"name": "add"}</tool_call>': ("", [["add", "{}"]]),
    '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>': (
        "",
        [["add", '{"a": 1}']],
    ),
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>': ("", [["add", "[1]"]]),
    # no calls
    'See\n<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>': (
        'See\n<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
        [],
    ),
    "a <tool_call> b <tool": ("a <tool_call> b <tool", []),
    '<tool_call>{"city": 5}</tool_call>': ('<tool_call>{"city": 5}</tool_call>', []),
    '<tool_call>nothing<tool_call>{"name": "add", "arguments": {}}</tool_call>': (
        "<tool_call>nothing",
        [["add", "{}"]],
    ),
    "<tool_call>{'name': 'add'}</tool_call>": ("<tool_call>{'name': 'add'}</tool_call>", []),
    '<tool_call>{"name": "add", arguments}</tool_call>': (
        '<tool_call>{"name": "add", arguments}</tool_call>',
        [],
    ),
    # cut off
    '<tool_call>\n{"name": "add", "arguments": {"a': ("", [["add", '{"a']]),
    '<tool_call>\n{"name": "add", "argu': ('<tool_call>\n{"name": "add", "argu', []),
    '<tool_call>{"name": "add", "arguments": {}}</tool_': ("", [["add", "{}"]]),
    '<tool_call>{"name": "add", "arguments": {}}</tool_call><tool_c': ("<tool_c", [["add", "{}"]]),
}
LLAMA = {
    "": ("", []),
    " Hi {there}": (" Hi {there}", []),
    f'{{"name": "get_weather", "parameters": {WEATHER}}}': ("", [["get_weather", WEATHER]]),
    '\n {"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {}}\n': (
        "",
        [["add", '{"a": 1}'], ["add", "{}"]],
    ),
    '{"type": "function", "name": "add", "parameters": {"a": 1}}': ("", [["add", '{"a": 1}']]),
    '{"parameters": {"a": 1}, "name": "add"}': ("", [["add", '{"a": 1}']]),
    '{"answer": 42}': ('{"answer": 42}', []),
    '{"name": "Ann", "age": 7} or so': ('{"name": "Ann", "age": 7} or so', []),
    '{"name": "add", "parameters": {}} and text': (" and text", [["add", "{}"]]),
    '{"name": "add", "parameters": {"a": [1, 2': ("", [["add", '{"a": [1, 2']]),
    '{"name": "ad': ('{"name": "ad', []),
    "{}": ("{}", []),
    "{ 5": ("{ 5", []),
}
CASES = [(True, *case) for case in HERMES.items()] + [(False, *case) for case in LLAMA.items()]


@pytest.mark.parametrize(("tagged", "text", "expected"), CASES)
def test_any_pieces_say_what_the_whole_says(tagged, text, expected):
    assert parsed([text], tagged=tagged) == expected
    assert parsed(list(text), tagged=tagged) == expected
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(pieces, tagged=tagged) == expected


def test_patterns_that_are_matched_with_each_piece_have_limits():
    """Otherwise the time of a call with many spaces grows with their square."""
    for pattern in (json_calls._HEADER, json_calls._FIRST_KEY):
        assert re.search(r"[*+]", pattern.pattern) is None
    spaces = " " * 65
    text = f'<tool_call>{{{spaces}"name"{spaces}:"add", "arguments": {{}}}}</tool_call>'
    assert parsed([text], tagged=True) == parsed(text, tagged=True) == ("", [["add", "{}"]])


def test_an_object_that_is_nested_too_deeply_is_text():
    text = '<tool_call>{"id": ' + "[" * 10**5 + "]" * 10**5 + ', "name": "add"}</tool_call>'
    assert parsed([text], tagged=True) == (text, [])


@pytest.mark.parametrize("seed", range(40))
def test_random_calls_come_back_as_they_were_written(seed):
    rng = random.Random(seed)
    letters = 'ab"\\{}[]:, \n<>/é日'

    def value(depth):
        kind = rng.randrange(6 if depth < 3 else 3)
        if kind == 3:
            return [value(depth + 1) for _ in range(rng.randrange(3))]
        if kind > 3:
            return {text(): value(depth + 1) for _ in range(rng.randrange(3))}
        return rng.choice([None, True, -1.5, text(), text(), 10**12])

    def text():
        return "".join(rng.choices(letters, k=rng.randrange(6)))

    def arguments():
        given = {text(): value(0) for _ in range(rng.randrange(4))}
        return json.dumps(given, ensure_ascii=rng.random() < 0.5)

    calls = [[rng.choice(NAMES), arguments()] for _ in range(rng.randint(1, 3))]
    for tagged, key, joint in ((True, "arguments", "\n"), (False, "parameters", "; ")):
        bodies = [f'{{"name": "{name}", "{key}": {given}}}' for name, given in calls]
        if tagged:
            bodies = [f"<tool_call>\n{body}\n</tool_call>" for body in bodies]
        whole = joint.join(bodies)
        assert parsed([whole], tagged=tagged) == parsed(whole, tagged=tagged) == ("", calls)


def test_pieces_come_as_soon_as_they_are_known():
    parser = HermesParser(NAMES)
    assert parser.push("Let me see.") == [Content("Let me see.")]
    assert parser.push(" <") == []
    assert parser.push("3\n") == [Content(" <3")]
    assert parser.push('<tool_call>\n{"name": "add", "arguments": ') == []
    assert parser.push('{"a"') == [CallBegins(0, "add"), Arguments(0, '{"a"')]
    assert parser.push(": 1}") == [Arguments(0, ": 1}")]
    assert parser.push("}\n</tool_call>") == parser.flush() == []
    parser = Llama3Parser(NAMES)
    assert parser.push('{"answer"') == [Content('{"answer"')], "no call has such a key"


def test_the_types_of_a_value_are_found_eight_alternatives_and_references_deep():
    nested = {"type": ["string", "null"]}
    for _ in range(8):
        nested = {"anyOf": [nested, {"const": 1}]}
    assert types_of(nested) == {"string", "null", "integer"}
    assert types_of({"oneOf": [nested]}) == {"integer"}
    last = {"type": "array"}
    chain = {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(7)}
    assert types_of({"$ref": "#/$defs/0", "$defs": {**chain, "7": last}}) == {"array"}
    assert not types_of(
        {"$ref": "#/$defs/00", "$defs": {"00": {"$ref": "#/$defs/0"}, **chain, "7": last}}
    )
