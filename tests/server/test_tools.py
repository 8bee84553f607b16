"""Tools: what requests say of them, formats told from chat templates, and grammars of calls."""

import json
import re
from pathlib import Path

import pytest
from tool_answers import fits_of

from gptmanager.callbacks import load_tokenizer
from gptmanager.callbacks.answers.call_grammar import marks_of
from gptmanager.callbacks.answers.reasoning import Reasoning
from gptmanager.callbacks.answers.tool_formats import hermes, llama3
from gptmanager.callbacks.answers.tool_formats.formats import FORMATS, format_of
from gptmanager.server import arguments
from gptmanager.server.chat.functions import has_functions, read_functions
from gptmanager.server.chat.tools import read_tools
from gptmanager.server.errors import ApiError

TEMPLATES = Path(__file__).parent / "chat_templates"


def tool(name, parameters=None, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/Letter"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"Letter": {"enum": ["x", "y"]}},  # pydantic writes them so
}
TOOLS = [tool("add", PARAMETERS), tool("stop")]


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


ADD = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("name", "form"),
    [("qwen", "hermes"), ("llama3", "llama3"), ("mistral", "mistral"), ("gemma", None),
     ("dates", None), ("harmony", "harmony")],
)  # fmt: skip
def test_templates_determine_formats(name, form):
    found = format_of("auto", (TEMPLATES / f"{name}.jinja").read_text())
    assert (found and found.name) == form


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("<tool_call>\n<function=name>\n<parameter=x> {{ call.arguments }}", "qwen3_coder"),
        ("<｜tool▁call▁begin｜>' + tool.type + '<｜tool▁sep｜>", "deepseek"),  # noqa: RUF001
        ("<|header_start|> as [func_name1(params_name1=params_value1...)]", "pythonic"),
        ("<|start_header_id|>{{ message.role }}<|end_header_id|>", None),  # shows no tools
        ('{"name": ..., "parameters": ...}', None),
        ("'<|tool_call>call:' + name + '{' + arguments + '}<tool_call|>'", "gemma4"),
        ('<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "x"}]<|END_ACTION|>', "cohere"),
        ("<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value>", "glm45"),
        ("set begin = '<minimax:tool_call>' <invoke name=", "minimax_m2"),
        ("<seed:tool_call>\\n<function=name>\\n<parameter=x>value</parameter>", "seed_oss"),
        ("respond only with <|tool_call|> followed by a JSON list of tools used", "json_list"),
        ('<TOOLCALL>[{"name": "x", "arguments": {}}]</TOOLCALL>', "json_list"),
        ('within <tool_call></tool_call>, as <tool_calls>[{"name": ...}]', "json_list"),
        ('<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <arguments>}', "hermes"),
        ("<tool_call> {{ call.arguments }} </tool_call>", None),
        ("'<function_calls>' + calls + '</function_calls>'", "olmo3"),
        ("List of tools: <|tool_list_start|>[", "lfm2"),
        ("<|tool_calls_section_begin|>{{ calls }}<|tool_calls_section_end|>", "kimi_k2"),
        ("set dsml_token = '｜DSML｜'", "deepseek_v32"),  # noqa: RUF001
        ("set tool_calls_token = '<|tools_prefix|>'", "apertus"),
        (
            '<function=example_function_name>{"example_name": "example_value"}</function>',
            "functionary",
        ),
        ("<function={name}>{arguments}</function>", None),
        ("<|tool_call:begin|>id<|tool_call:name|>name<|tool_call:args|>", "solar_open"),
        ("'<function name=\"' ~ tool_call.name ~ '\">' '<param name=\"'", "minicpm5"),
        ("a call is <function name='x'>, or '<function name=\"'", None),
        ("set HYTK = ':opensource' and toolsep_token = '<tool_sep{}>'.format(HYTK)", "hy3"),
        ("toolsep_token = '<tool_sep{}>'", None),
        ("'<start_function_call>call:' + name + '{' + arguments + '}'", "functiongemma"),
        ("argkey_begin_token = '<arg_key{}>' argvalue_begin_token = '<arg_value{}>'", None),
        ("{{ '>>>' + tool_call['function']['name'] + '\\n' + arguments }}", None),
        ('following the format below:\\n<tool_calls>\\n{"name": <tool-name>', "json_list"),
        ("ns.content + ' functools[' + tool.calls | join(', ') + ']'", None),
        ('function_call="<|function_call|>"', "json_list"),
        ("role_sep='<|role_sep|>' {{ render({'role': 'function call'}) }}", "json_list"),
        ("role_sep='<|role_sep|>'", None),
        ("'\\nAction:\\n```json\\n[\\n'", "cohere"),
    ],
)
def test_formats_of_other_models(template, form):
    found = format_of("auto", template)
    assert (found and found.name) == form
    assert format_of("hermes", template).name == "hermes"


def test_the_command_and_the_page_list_all_formats_in_order():
    assert {*arguments._CALLS} - {"auto"} == {one.name for one in FORMATS}
    assert {*arguments._THOUGHTS} - {"auto"} == {one.value for one in Reasoning}
    table = Path("docs/serving.md").read_text().partition("### Formats of tool calls")[2]
    assert re.findall(r"^\| `(\w+)`", table, re.M)[: len(FORMATS)] == [it.name for it in FORMATS]


def test_what_may_be_called():
    assert read_tools(None, None) is None and read_tools([], "auto") is None
    assert read_tools(TOOLS, "none") is None
    auto = read_tools(TOOLS, None)
    assert list(auto.parameters) == ["add", "stop"] and not auto.required and auto.parallel
    required = read_tools(TOOLS, "required", parallel_tool_calls=False)
    assert required.required and not required.parallel and required.listed is TOOLS
    named = read_tools(TOOLS, ADD)
    assert list(named.parameters) == ["add"] and named.required and named.listed is TOOLS
    some = read_tools(TOOLS, allowed("required", "stop"))
    assert list(some.parameters) == ["stop"] and some.required and some.listed is TOOLS
    assert not read_tools(TOOLS, allowed("auto", "stop", "add")).required


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ({}, None, "tools"),
        ([tool("a")] * 129, None, "tools"),
        (["add"], None, "tools[0]"),
        ([{"type": "retrieval"}], None, "tools[0].type"),
        ([tool("a"), tool("a b")], None, "tools[1].function.name"),
        ([tool("a"), tool("a")], None, "tools[1].function.name"),
        ([tool("a", {"type": "string"})], None, "tools[0].function.parameters.type"),
        ([tool("a", [])], None, "tools[0].function.parameters"),
        (TOOLS, "some", "tool_choice"),
        (TOOLS, {"type": "function"}, "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "other"}}, "tool_choice.function.name"),
        (TOOLS, allowed("often", "add"), "tool_choice.allowed_tools.mode"),
        (TOOLS, allowed("auto", "other"), "tool_choice.allowed_tools.tools"),
        (TOOLS, allowed("auto"), "tool_choice.allowed_tools.tools"),
        (TOOLS, allowed(ADD, "add"), "tool_choice.allowed_tools.mode"),
        (TOOLS, allowed("auto", *["add"] * 129), "tool_choice.allowed_tools.tools"),
        (TOOLS, allowed("auto", "add", 5), "tool_choice.allowed_tools.tools[1]"),
        (None, allowed("required", "add"), "tool_choice"),
        (None, "required", "tool_choice"),
        ([], ADD, "tool_choice"),
    ],
)
def test_wrong_tools_are_refused_by_name(tools, choice, param):
    with pytest.raises(ApiError) as refused:
        read_tools(tools, choice)
    assert refused.value.status == 400 and refused.value.param == param
    assert param in refused.value.message


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ({}, None, "tools: {} must be a list of at most 128 tools"),
        (TOOLS, "", "tool_choice: '' must be 'none', 'auto', 'required', or name a function"),
        ([tool("a", [])], None, "parameters: [] must be a JSON schema object"),
        ([tool("a", {"type": "string"})], None, "parameters.type: 'string' must be 'object'"),
        (TOOLS, allowed("often", "add"), "mode: 'often' must be 'auto' or 'required'"),
        (TOOLS, allowed("auto", "add", 5), "'name': 5}} must name a function"),
    ],
)
def test_a_refusal_of_tools_quotes_the_value(tools, choice, message):
    with pytest.raises(ApiError, match=re.escape(message)):
        read_tools(tools, choice)


def test_templates_are_shown_what_models_are_trained_to_read():
    odd = {"strict": True, "cache_control": {"type": "ephemeral"}, "description": None}
    given = [{**tool("add", PARAMETERS, **odd), "displayTitle": "Add", "group": 1}, tool("stop")]
    found = read_tools(given, None)
    plain = [tool("add", PARAMETERS), {"type": "function", "function": {"name": "stop"}}]
    assert found.for_template() == plain == read_tools(plain, None).for_template()
    described = tool("add", PARAMETERS, description="adds")
    assert read_tools([described], None).for_template() == [described]


FUNCTIONS = [tool["function"] for tool in TOOLS]


def test_deprecated_functions_are_tools():
    assert not has_functions({"tools": TOOLS}) and has_functions({"function_call": "auto"})
    assert read_functions(None, "auto") is None and read_functions(FUNCTIONS, "none") is None
    auto = read_functions(FUNCTIONS, None)
    assert list(auto.parameters) == ["add", "stop"] and not auto.required and not auto.parallel
    assert auto.listed == TOOLS
    named = read_functions(FUNCTIONS, {"name": "add"})
    assert list(named.parameters) == ["add"] and named.required


@pytest.mark.parametrize(
    ("functions", "call", "param"),
    [
        ({}, None, "functions"),
        (FUNCTIONS * 65, None, "functions"),
        (["add"], None, "functions[0]"),
        ([{"name": "a b"}], None, "functions[0].name"),
        ([{"name": "a", "parameters": []}], None, "functions[0].parameters"),
        (FUNCTIONS, "sometimes", "function_call"),
        (FUNCTIONS, {"name": "x" * 10**5}, "function_call.name"),
        (None, {"name": "add"}, "function_call"),
    ],
)
def test_wrong_functions_are_refused_by_the_names_that_were_sent(functions, call, param):
    with pytest.raises(ApiError) as refused:
        read_functions(functions, call)
    assert refused.value.status == 400 and refused.value.param == param
    assert param in refused.value.message and "tool_choice" not in refused.value.message
    assert len(refused.value.message) < 1000


def test_a_function_keeps_its_name_in_an_error():
    with pytest.raises(ApiError, match=r"^functions\[1\].name: 'my_tools' is used twice"):
        read_functions([{"name": "my_tools"}] * 2, None)


@pytest.mark.parametrize("mixed", [("functions", "tools"), ("function_call", "tool_choice")])
def test_fields_of_both_kinds_are_refused(mixed):
    with pytest.raises(ApiError, match=f"either {mixed[0]} or {mixed[1]}"):
        has_functions(dict.fromkeys(mixed, "auto"))


# Grammars


@pytest.fixture(scope="module", params=["letters", "other marks", "marks"])
def fits(request):
    """With tags that are letters, and with tags that are tokens of their own."""
    tokenizer = load_tokenizer("examples/tiny_llama")
    if request.param == "marks":
        tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    if request.param != "letters":
        tokenizer.add_tokens(["<think>", "plain"])
        tokenizer.add_special_tokens(["<|end|>"])
    marks = marks_of(tokenizer, [0, 1])
    assert (marks.keys() == {"<think>", "<|end|>"}) == (request.param == "other marks")
    return fits_of(tokenizer)


def call(form, name, arguments):
    return form.before + name + form.between + arguments + form.behind


RIGHT = '{"a": 1, "b": "x"}'


@pytest.mark.parametrize("form", [hermes.SHAPE, llama3.SHAPE], ids=["hermes", "llama3"])
def test_required_calls_are_right_and_nothing_else(fits, form):
    tools = read_tools(TOOLS, "required")
    assert fits(form, tools, call(form, "add", RIGHT)) == "yes"
    assert fits(form, tools, call(form, "stop", "{}")) == "yes"
    assert json.loads(RIGHT) and fits(form, tools, "") == "begins one"
    assert fits(form, tools, form.before + "other") == form.before
    begun = form.before + "add" + form.between
    assert fits(form, tools, begun + '{"a": "1"') == begun + '{"a":'
    assert fits(form, tools, begun + '{"a": 1, "b": "z') == begun + '{"a": 1, "b": "'
    assert fits(form, tools, "Hello") == ""
    twice = "\n".join([call(form, "add", RIGHT)] * 2)
    assert (fits(form, tools, twice) == "yes") == bool(form.tag)
    alone = read_tools(TOOLS, "required", parallel_tool_calls=False)
    assert fits(form, alone, call(form, "add", RIGHT)) == "yes" != fits(form, alone, twice)
    named = read_tools(TOOLS, ADD)
    assert fits(form, named, call(form, "add", RIGHT)) == "yes" != fits(form, named, twice)
    assert fits(form, named, call(form, "stop", "{}")) == form.before


@pytest.mark.parametrize("form", [hermes.SHAPE, llama3.SHAPE], ids=["hermes", "llama3"])
def test_a_call_that_begins_is_right_and_other_text_is_free(fits, form):
    tools = read_tools(TOOLS, "auto")
    for text in ("", "Hello", '{"answer": 4}', "a <tool b {", '{"name'):
        assert fits(form, tools, text) == "yes"
    assert fits(form, tools, call(form, "add", RIGHT)) == "yes"
    assert fits(form, tools, form.before + "other") == form.before
    begun = form.before + "add" + form.between
    assert fits(form, tools, begun + '{"a": "1"') == begun + '{"a":'
    if bool(form.tag):
        both = f"I see. {call(form, 'add', RIGHT)}\n{call(form, 'stop', '{}')} Done."
        assert fits(form, tools, both) == "yes"
        assert fits(form, tools, "I see. <tool_call>{") == "I see. <tool_call>"
        thought = f"<think>I see.<think>\n{call(form, 'add', RIGHT)}<|end|>"
        assert fits(form, tools, thought) == "yes"
    assert fits(form, tools, "<think>I see a plain.<|end|>") == "yes"


@pytest.mark.parametrize("form", [hermes.SHAPE, llama3.SHAPE], ids=["hermes", "llama3"])
def test_calls_or_an_answer_in_json(fits, form):
    tools, answer = read_tools(TOOLS, "auto"), {"type": "array", "items": {"type": "integer"}}
    assert fits(form, tools, call(form, "add", RIGHT), answer) == "yes"
    assert fits(form, tools, "[1, 2]", answer) == "yes"
    assert fits(form, tools, "Hello", answer) == ""
