"""Structured outputs: the fields that ask for them, and grammars that do not compile."""

import asyncio
import functools
import re
import sys
from concurrent.futures import Future
from dataclasses import replace

import pytest

from gptmanager.callbacks import load_tokenizer
from gptmanager.callbacks.answers.tool_formats.gemma4 import Gemma4
from gptmanager.callbacks.answers.tool_formats.hermes import Hermes
from gptmanager.environment.distribution import install_command
from gptmanager.server.chat.tools import read_tools
from gptmanager.server.errors import ApiError
from gptmanager.server.http.warning_header import Warnings
from gptmanager.server.text.structured import OutputRule, StructuredOutputs, read_output_rule

HERMES = Hermes()
SCHEMA = {"type": "object"}


DEEP = functools.reduce(lambda inner, _: {"items": inner}, range(1000), SCHEMA)


def json_schema(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "guided_json": None}, None),
        ({"structured_outputs": {"regex": None, "json_object": False}}, None),
        (
            {"response_format": {"type": "json_object"}},
            OutputRule("response_format", "json_object", True),
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA, "strict": False}},
            OutputRule("response_format.schema", "json", SCHEMA, lenient=True),
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            OutputRule("response_format.schema", "json", SCHEMA),
        ),
        (
            {"response_format": json_schema(SCHEMA, strict=False)},
            OutputRule("response_format.json_schema.schema", "json", SCHEMA, lenient=True),
        ),
        (
            {"response_format": json_schema(SCHEMA, strict=True, description="d")},
            OutputRule("response_format.json_schema.schema", "json", SCHEMA),
        ),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            OutputRule("structured_outputs.choice", "choice", ["a", "b"]),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            OutputRule("structured_outputs.json_object", "json_object", True),
        ),
        ({"guided_json": '{"a": 1}'}, OutputRule("guided_json", "json", '{"a": 1}')),
        ({"guided_regex": "a+"}, OutputRule("guided_regex", "regex", "a+")),
        ({"guided_choice": ["a"]}, OutputRule("guided_choice", "choice", ["a"])),
        ({"guided_grammar": "start: A"}, OutputRule("guided_grammar", "grammar", "start: A")),
        ({"grammar": "root ::= A"}, OutputRule("grammar", "grammar", "root ::= A")),
        ({"grammar": ""}, None),
        ({"ebnf": "root ::= A"}, OutputRule("ebnf", "grammar", "root ::= A")),
        ({"json_schema": SCHEMA}, OutputRule("json_schema", "json", SCHEMA)),
        ({"regex": "a+"}, OutputRule("regex", "regex", "a+")),
    ],
)  # fmt: skip
def test_fields_that_ask_for_a_form(body, rule):
    assert read_output_rule(body) == rule


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "text", "json_schema": 5}}, "response_format.json_schema"),
        (
            {"response_format": {**json_schema(SCHEMA), "type": "json_object"}},
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_schema(None)}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(5)}, "response_format.json_schema.schema"),
        ({"response_format": json_schema({}, name=5)}, "response_format.json_schema.name"),
        ({"response_format": json_schema({}, strict="yes")}, "response_format.json_schema.strict"),
        ({"structured_outputs": "json"}, "structured_outputs"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"json": "{}", "regex": "a"}}, "structured_outputs.regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_choice": "ab"}, "guided_choice"),
        ({"guided_json": [1]}, "guided_json"),
        ({"grammar": {"type": "json", "value": {}}}, "grammar"),
        ({"guided_grammar": "start: A", "ebnf": "root ::= A"}, "ebnf"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
    ],
)
def test_wrong_ones_and_two_at_once_are_refused_by_name(body, param):
    with pytest.raises(ApiError) as refused:
        read_output_rule(body)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"regex": 5}, "regex: 5 must be a string"),
        ({"guided_choice": "ab"}, "guided_choice: 'ab' must be a list of one or more strings"),
        ({"json_schema": [1]}, "json_schema: [1] must be a JSON schema: an object, or"),
        ({"structured_outputs": {"json_object": 1}}, "json_object: 1 must be true or false"),
        ({"structured_outputs": "json"}, "structured_outputs: 'json' must be an object with one"),
        ({"response_format": "json"}, "response_format: 'json' must be an object with a type"),
        ({"response_format": {}}, "response_format.type: is missing; it must be 'text', "),
        ({"response_format": {"type": "xml"}}, "response_format.type: 'xml' must be 'text', "),
        ({"response_format": {"type": "json_schema"}}, "json_schema: is missing; it must be an"),
        ({"response_format": json_schema({}, strict="yes")}, "strict: 'yes' must be true or false"),
    ],
)
def test_a_refusal_of_a_rule_quotes_the_value(body, message):
    with pytest.raises(ApiError, match=re.escape(message)):
        read_output_rule(body)


@pytest.fixture(scope="module")
def outputs():
    return StructuredOutputs(load_tokenizer("examples/tiny_llama"), [0])


def refusal(outputs, rule):
    with pytest.raises(ApiError) as refused:
        asyncio.run(outputs.processor(rule, Warnings()))
    assert (refused.value.status, refused.value.param) == (400, rule.where)
    return refused.value.message


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json", {"type": "strin"}, "here: Invalid type: strin"),
        ("json", "{", "here: EOF while parsing an object"),
        ("json", False, "it permits no text"),
        ("json", DEEP, "nested too deeply"),
        ("regex", "(", 'here: at 1(8): invalid regex "("'),
        ("grammar", "start: foo", 'here: lark: at 1(8): unknown name: "foo"'),
        ("grammar", "root ::= foo", "here: gbnf: Rule 'foo' not found"),
        (
            "grammar",
            'root ::= "a" $',
            "here: gbnf: Expected name at line 1, 'root ::= \"a\" ' ^ '$'",
        ),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused_in_words(outputs, kind, value, message):
    assert message in refusal(outputs, OutputRule("here", kind, value))


def with_tools(outputs, rule, choice, parameters=SCHEMA, warnings=None, form=HERMES, **more):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, **more}}]
    read, warnings = read_tools(tools, choice), Warnings() if warnings is None else warnings
    return asyncio.run(outputs.processor_with_tools(rule, read, form, warnings))


def test_a_wrong_schema_of_a_tool_is_refused_in_words_if_a_call_is_required(outputs):
    for schema in (
        {"properties": {"a": {"type": "strin"}}},
        {**SCHEMA, "properties": {"a": False}, "required": ["a"]},
    ):
        with pytest.raises(ApiError) as refused:
            with_tools(outputs, None, "required", schema)
        assert refused.value.param == "tools[0].function.parameters"
        assert with_tools(outputs, None, "auto", schema) is None


def test_arguments_that_a_format_of_calls_cannot_express_are_refused(outputs):
    named = {"properties": {"a:b": {"type": "string"}}}
    text = r"tools\[0\].function.parameters: .* cannot express the name 'a:b'"
    with pytest.raises(ApiError, match=text) as refused:
        with_tools(outputs, None, "required", named, form=Gemma4())
    assert refused.value.param == "tools[0].function.parameters"
    warnings = Warnings()
    assert with_tools(outputs, None, "auto", named, warnings, Gemma4()) is None
    assert re.search(f"not constrained: {text}", warnings.headers()["Warning"])


UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
TAGGED = {"type": "object", "properties": {"tags": UNIQUE}, "required": ["tags"]}


def test_what_a_lenient_schema_does_not_enforce_is_reported(outputs, caplog):
    rule = OutputRule("here", "json", TAGGED)
    assert "uniqueItems cannot be enforced (at #/properties/tags/uniqueItems)" in refusal(
        outputs, rule
    )
    warnings = Warnings()
    lenient = replace(rule, lenient=True)
    assert asyncio.run(outputs.processor(lenient, warnings)).unenforced == (
        "#/properties/tags/uniqueItems",
    )
    told = """299 - "not enforced in here: '/properties/tags/uniqueItems'\""""
    assert warnings.headers() == {"Warning": told}
    assert "these keywords are not enforced: #/properties/tags/uniqueItems" in caplog.text


def test_what_optional_calls_do_not_enforce_is_reported(outputs):
    for choice, more in (
        ("auto", {}),
        ("auto", {"strict": False}),
        ("required", {"strict": False}),
    ):
        warnings = Warnings()
        assert with_tools(outputs, None, choice, TAGGED, warnings, **more).kind == "lark"
        told = """299 - "not enforced in tools[0]: 'properties/tags/uniqueItems'\""""
        assert warnings.headers() == {"Warning": told}
    with pytest.raises(ApiError, match=r"function\.parameters: uniqueItems cannot"):
        with_tools(outputs, None, "required", TAGGED)
    warnings = Warnings()
    assert (
        with_tools(outputs, None, "auto", {"properties": {"a": {"type": "strin"}}}, warnings)
        is None
    )
    assert "tool calls are not constrained: tools: " in warnings.headers()["Warning"]


def test_tools_with_a_form_of_the_answer(outputs):
    assert with_tools(outputs, OutputRule("here", "regex", "a"), "required").kind == "lark"
    for kind, value in (("json", {"enum": [1]}), ("json_object", True)):
        grammar = with_tools(outputs, OutputRule("here", kind, value), "auto")
        matcher = grammar.prepare("cpu").result().deep_copy()
        ids = outputs._tokenizer.encode("1" if kind == "json" else "{}").ids
        assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    with pytest.raises(ApiError, match="here: with tools, only JSON"):
        with_tools(outputs, OutputRule("here", "regex", "a"), "auto")


def test_what_is_missing_is_named(monkeypatch):
    rule = OutputRule("guided_choice", "choice", ["a"])
    assert "no tokenizer" in refusal(StructuredOutputs(None, []), rule)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    without = StructuredOutputs(load_tokenizer("examples/tiny_llama"), [0])
    assert install_command("guided") in refusal(without, rule)
    assert with_tools(without, None, "auto") is None
    with pytest.raises(ApiError, match="pip install"):
        with_tools(without, None, "required")


def test_a_client_that_goes_away_does_not_cancel_the_grammar_of_another(outputs, monkeypatch):
    compiled = Future()

    class Grammar:
        def prepare(self, device):
            return compiled

    async def both():
        one = asyncio.ensure_future(outputs.processor(OutputRule("here", "regex", "a"), Warnings()))
        monkeypatch.setattr(outputs._guided, "regex", lambda pattern: Grammar())
        done, waiting = await asyncio.wait([one], timeout=0.05)
        assert waiting == {one}
        one.cancel()
        await asyncio.wait([one])
        assert one.cancelled() and not compiled.cancelled()

    asyncio.run(both())
