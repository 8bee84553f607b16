"""Every format of calls: whole, in pieces, hostile, and as its grammar has it."""

import json
import re

import pytest
from fuzz import FUZZ
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_answers import CALLS, GIGA, LISTED, MADE, ROME, TOOLS, TWO, fits_of

from gptmanager.callbacks import load_tokenizer
from gptmanager.callbacks.answers.call_grammar import InexpressibleArguments
from gptmanager.callbacks.answers.parsing.answer_parts import Arguments, CallBegins, Content
from gptmanager.callbacks.answers.parsing.thought_tags import ThoughtTags
from gptmanager.callbacks.answers.tool_formats.formats import FORMATS
from gptmanager.server.chat.chat_answer import ChatAnswer
from gptmanager.server.chat.tools import read_tools


def parsed(form, pieces, wrap=lambda parser: parser):
    """The content, and the calls as [name, arguments]."""
    parser = wrap(form.parser(TOOLS))
    text, content, calls = "".join(pieces), "", []
    for found in [*map(parser.push, pieces), parser.flush()]:
        for one in found:
            if isinstance(one, Content):
                content += one.text
                assert text[one.begin : one.end] in (one.text, one.text.removeprefix("\n"))
            elif isinstance(one, CallBegins):
                assert one.index == len(calls)
                calls.append([one.name, ""])
            elif isinstance(one, Arguments):
                assert one.index == len(calls) - 1
                calls[-1][1] += one.text
    assert parser.num_calls == len(calls)
    return content, calls, parser.is_in_arguments


def tools_of(properties, choice="required", **more):
    """A tool `f` that requires `properties`."""
    schema = {"type": "object", "properties": properties, "required": [*properties], **more}
    return read_tools(
        [{"type": "function", "function": {"name": "f", "parameters": schema}}], choice
    )


def arguments_of(form, tools, text):
    parser = form.parser(tools)
    found = parser.push(text) + parser.flush()
    return json.loads("".join(one.text for one in found if isinstance(one, Arguments)))


def test_every_format_is_tried():
    assert {one.name for one in MADE.values()} == {one.name for one in FORMATS}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("size", [1, 3, 10**9])
def test_two_calls(name, size):
    text = TWO[name]
    content, calls, is_cut = parsed(
        MADE[name], [text[at : at + size] for at in range(0, len(text), size)]
    )
    assert (content, calls) == ("Hm." if "Hm." in text else "", CALLS) and not is_cut


@pytest.mark.parametrize("name", MADE)
def test_arguments_arrive_in_pieces(name):
    parser = MADE[name].parser(TOOLS)
    found = [one for letter in TWO[name] for one in parser.push(letter)]
    assert sum(isinstance(one, Arguments) and one.index == 0 for one in found) > 2


@pytest.mark.parametrize("name", MADE)
def test_a_call_of_no_tool_is_content(name):
    text = TWO[name].replace("look", "hack").replace("stop", "halt")
    content, calls, _ = parsed(MADE[name], [text])
    assert calls == [] and "hack" in content or name == "harmony"


@pytest.mark.parametrize("name", MADE)
def test_a_cut_call_does_not_finish_as_tool_calls(name):
    text = TWO[name]
    answer = ChatAnswer(MADE[name].parser(TOOLS))
    answer.push(text[: text.index("Rome") + 2])
    answer.flush()
    assert answer.finish_reason("stop") == "stop"


_PARTS = [
    *sorted({tag for form in MADE.values() for tag in form.tags}), "[TOOL_CALLS] [",
    "<function=look>", "<function=", "</function>", "<parameter=city>", "<parameter=days>\n",
    "</parameter>", '<invoke name="look">', '<parameter name="days">', "</invoke>", "commentary ",
    "to=functions.look", "<arg_key>days</arg_key>", "call:look{", "city:", "days:", "look(",
    "look", "stop", "[", "]", "(", ")", "{", "}", '{"name": "look", "arguments": ', ROME, "```json",
    "[look(", "city=", "'Ro\\'", '"', "'", ",", ", ", ";", "=", "\n", " ", "7", "\\", "é", "-" * 99,
    "[[[[", "<think>", "</think>", "\ud7ff", "None", "nan", '"parameters"', "function", "<",
]  # fmt: skip


@pytest.mark.parametrize("name", MADE)
@pytest.mark.every(4)
def test_an_answer_cut_anywhere_is_the_whole(name):
    """Also with thoughts, and whatever the model writes: no error, and nothing is lost twice."""

    @settings(max_examples=20 * FUZZ)
    @given(
        st.lists(st.one_of(st.sampled_from(_PARTS), st.just(TWO[name])), max_size=14).map("".join),
        st.sets(st.integers(1, 300)),
        st.booleans(),
    )
    def check(text, cuts, thinks):
        at = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
        pieces = [text[begin:end] for begin, end in zip(at, at[1:], strict=False)]
        wrap = ThoughtTags if thinks and name != "harmony" else lambda parser: parser
        whole = parsed(MADE[name], [text], wrap)
        assert parsed(MADE[name], pieces, wrap) == whole == parsed(MADE[name], list(text), wrap)
        if not whole[1] and name != "harmony" and not thinks:
            ends = "<|message_sep|>" if name == "gigachat 3" else "\0"
            assert whole[0] == text.replace(ends, "")

    check()


@pytest.mark.parametrize("name", MADE)
def test_huge_answers_take_linear_time(name):
    """Unclosed, nested and endless: some millions of letters in pieces."""
    for text in (
        " " * 10**5,
        "[" * 10**5,
        "(" * 10**5,
        TWO[name].replace("Rome", "R\n" * 10**5),
        TWO[name].replace("2", '["' + "</parameter>" * 10**4 + "</arg_value>" * 10**4),
        "<" * 10**5,
    ):
        parsed(MADE[name], [text[at : at + 100] for at in range(0, len(text), 100)])


@pytest.mark.parametrize("name", MADE)
def test_calls_as_text_are_found_again(name):
    look = {"city": "a \"b\"\n'c', é", "days": -2, "exact": True, "tags": ["x", "]"], "unit": None}
    text = MADE[name].text([("look", look), ("stop", {})])
    if MADE[name].name in ("json_list", "lfm2"):
        content, calls, _ = parsed(MADE[name], [text])
        assert content == "" and [(it, json.loads(one)) for it, one in calls] == [
            ("look", look), ("stop", {})
        ]  # fmt: skip
    else:
        assert text is None


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ("city='It\\'s', days=-1", '{"city": "It\'s", "days": -1}'),
        ('city="a, (b)]", exact=True', '{"city": "a, (b)]", "exact": true}'),
        ("'Rome', 2", '{"city": "Rome", "days": 2}'),
        ("tags=['a', None], unit=x.y", '{"tags": ["a", null], "unit": "x.y"}'),
        ("days=-(1), exact={1}", '{"days": -1, "exact": "{1}"}'),
        ("city='''It's, ''so''''', days=2", '{"city": "It\'s, \'\'so", "days": 2}'),
        ('city="""a "b, \\"""c)""", days=2', '{"city": "a \\"b, \\"\\"\\"c)", "days": 2}'),
        ("city='', unit=\"\"", '{"city": "", "unit": ""}'),
        ("city='It's, 5\" o'clock' , days=2", '{"city": "It\'s, 5\\" o\'clock", "days": 2}'),
        (
            "city=\"a\n'b'\t\\n\", tags=['\r', null]",
            '{"city": "a\\n\'b\'\\t\\n", "tags": ["\\r", null]}',
        ),
        ("unit={'a': true, \"b\": [false]}", '{"unit": {"a": true, "b": [false]}}'),
        ("city='a', 'b'", '{"city": "a", "days": "b"}'),
        ("days=" + "(" * 10**3 + ")" * 10**3, None),
    ],
)
def test_values_in_python(given, arguments):
    text = f"[look({given})]"
    content, calls, _ = parsed(MADE["pythonic"], [text])
    assert parsed(MADE["pythonic"], list(text))[:2] == (content, calls)
    assert content == "" and calls[0][0] == "look"
    assert isinstance(json.loads(calls[0][1]), dict)
    assert arguments is None or calls[0][1] == arguments


@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ({"city": 'a "b"\n<c>', "days": "2"}, {"city": 'a "b"\n<c>', "days": 2}),
        ({"city": "12", "exact": "True"}, {"city": "12", "exact": True}),
        ({"tags": '["a",\n"b"]', "unit": "C"}, {"tags": ["a", "b"], "unit": "C"}),
        ({"days": "two", "other": "1"}, {"days": "two", "other": "1"}),
    ],
)
def test_values_in_tags(values, arguments):
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    _, calls, _ = parsed(MADE["qwen3_coder"], [f"<function=look>\n{body}</function>"])
    assert json.loads(calls[0][1]) == arguments


IN_TAGS = ("qwen3_coder", "seed_oss", "minimax_m2", "glm45", "minicpm5", "hy3")


@pytest.mark.parametrize("name", [*IN_TAGS, "deepseek_v32"])
def test_tags_within_json_do_not_end_a_value(name):
    """Unless the JSON does not end; a string that is not JSON ends at its tag."""
    tags = MADE[name].parser_class.tags
    ends = "".join((*tags.value_ends, '\\"', "\\n"))
    for value, found in (
        (json.dumps([ends, "]"]), [ends, "]"]),
        (f" {json.dumps([[tags.end], {tags.key: 1}])}", [[tags.end], {tags.key: 1}]),
        (f"['{tags.end}', \"It's\", {{}}]", [tags.end, "It's", {}]),
        (f"['{tags.end}", "['"),
        (f"[x]({tags.end[:-1]}it's)", f"[x]({tags.end[:-1]}it's)"),
        (f'["x{tags.end}', '["x'),
    ):
        text = TWO[name].replace("days", "tags", 1)
        at = text.index("2", text.index("tags"))
        text = text[:at] + value + text[at + 1 :]
        content, calls, is_cut = parsed(MADE[name], [text])
        assert (content, calls, is_cut) == parsed(MADE[name], list(text))
        assert json.loads(calls[0][1]) == {"city": "Rome", "tags": found}
        assert content == "Hm." and calls[1:] == CALLS[1:] and not is_cut


def test_a_text_in_brackets_that_is_not_json_ends_at_its_tag():
    """An apostrophe in it does not begin a string that has the arguments after it."""
    kinds = [{"anyOf": [{"type": "string"}, {"type": one}]} for one in ("null", "array")]
    for kind in kinds:
        tools = tools_of({"a": kind, "b": kind, "c": kind})
        body = "".join(
            f"<parameter={key}>{value}</parameter>"
            for key, value in (("a", "[ ] don't"), ("b", "{it's}"), ("c", "null"))
        )
        text = f"<seed:tool_call><function=f>{body}</function></seed:tool_call>"
        found = arguments_of(MADE["seed_oss"], tools, text)
        assert found == {
            "a": "[ ] don't",
            "b": "{it's}",
            "c": None if "null" in str(kind) else "null",
        }


def test_a_tag_within_json_does_not_end_a_call():
    look = {"city": "</tool_call>", "days": 2}
    text = TWO["hermes"].replace(ROME, json.dumps(look))
    content, calls, _ = parsed(MADE["hermes"], list(text))
    assert content == "Hm." and json.loads(calls[0][1]) == look and calls[1:] == CALLS[1:]


def test_single_surrogates_stay_escaped():
    """A body in UTF-8 cannot have them."""
    for form, text in (
        ("pythonic", "[look(city='\\ud800', unit='\\ud83d\\ude00')]"),
        ("hermes", '<tool_call>{"arguments": {"city": "\\ud800"}, "name": "look"}</tool_call>'),
    ):
        _, calls, _ = parsed(MADE[form], [text])
        assert calls[0][1].startswith('{"city": "\\ud800"') and calls[0][1].isascii()


def test_a_call_that_is_not_json_is_content():
    text = '<tool_call>{"arguments": {"city": NaN}, "name": "look"}</tool_call>'
    assert parsed(MADE["hermes"], [text]) == (text, [], False)


def test_a_value_of_a_type_that_is_not_allowed_is_a_string_if_it_may_be_one():
    kinds = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    tools = tools_of({"a": kinds, "b": kinds, "c": {"type": ["string", "number"]}, "d": kinds})
    body = "".join(
        f"<parameter={key}>{value}</parameter>"
        for key, value in (("a", "12"), ("b", "null"), ("c", "12"), ("d", '"12"'))
    )
    found = arguments_of(MADE["seed_oss"], tools, f"<seed:tool_call><function=f>{body}</function>")
    assert found == {"a": "12", "b": None, "c": 12, "d": "12"}


def test_parameters_that_are_not_closed_end_at_the_next():
    text = "<tool_call><function=look><parameter=city>Rome<parameter=days>2</function></tool_call>"
    assert parsed(MADE["qwen3_coder"], [text]) == ("", [["look", ROME]], False)


def test_a_format_may_say_which_values_are_json():
    """The schema decides where the model marks a type that it does not allow."""
    values = [
        *(("city", "false", "12", "12"), ("days", "true", "2", 2), ("x", "false", "[1]", [1])),
        *(("tags", "true", "x", "x"), ("y", "true", "[1]", "[1]")),
    ]
    body = "".join(
        f'<DSMLparameter name="{name}" string="{is_text}">{text}</DSMLparameter>\n'
        for name, is_text, text, _ in values
    )
    text = f'<DSMLinvoke name="look">\n{body}</DSMLinvoke>'
    text = text.replace("DSML", "｜DSML｜")  # noqa: RUF001
    content, calls, _ = parsed(MADE["deepseek_v32"], list(text))
    assert content == "" and json.loads(calls[0][1]) == {it[0]: it[3] for it in values}


@pytest.mark.parametrize("size", [1, 6, 10**9])
def test_strings_in_quotes_may_contain_tags(size):
    values = ("<![CDATA[<b>\n</param></function>]]></param>", "<![CD</param>", "]]></param>")
    text = "".join(f'<param name="{key}">{value}' for key, value in zip("abc", values, strict=True))
    text += '<param name="days"><![CDATA[2]]></param><param name="tags"><![CDATA[["]"]]]></param>'
    text = f'<function name="look">{text}</function>'
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    content, calls, is_cut = parsed(MADE["minicpm5"], pieces)
    assert content == "" and not is_cut and json.loads(calls[0][1]) == {
        "a": "<b>\n</param></function>", "b": "<![CD", "c": "]]>", "days": 2, "tags": ["]"]
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 10**9])
def test_ids_are_those_that_the_model_writes(size):
    def ids(text, form="kimi_k2"):
        answer = ChatAnswer(MADE[form].parser(TOOLS), new_id=lambda: "new")
        for at in range(0, len(text), size):
            answer.push(text[at : at + size])
        return [call["id"] for call in answer.message()["tool_calls"]]

    assert ids(TWO["solar_open"], "solar_open") == ["a1b2c3d4e5", "f6g7h8i9j0"]
    assert ids(TWO["solar_open"].replace("a1b2c3d4e5", ""), "solar_open") == ["new", "f6g7h8i9j0"]
    text = TWO["kimi_k2"]
    assert ids(text) == ["functions.look:0", "functions.stop:1"]
    assert ids(text.replace("stop:1", "look:0")) == ["functions.look:0", "new"]
    assert ids(text.replace("stop:1", "stop:x")) == ["functions.look:0"]


def test_ids_of_mistral_have_nine_letters():
    assert len(MADE["mistral"].new_id()) == 9 and MADE["mistral"].new_id().isalnum()


@pytest.fixture(scope="module", params=[False, True], ids=["letters", "marks"])
def fits(request):
    tokenizer = load_tokenizer("examples/tiny_llama")
    if request.param:
        special = ("mistral", "harmony", "gemma4", "granite", "cohere", "lfm2", "minimax_m2")
        more = ("kimi_k2", "apertus", "deepseek_v32", "solar_open", "functiongemma")
        for name in (*special, *more):
            tokenizer.add_special_tokens([*MADE[name].tags])
        for name in ("deepseek", "hermes", "glm45", "seed_oss", "hy3"):
            tokenizer.add_tokens([*MADE[name].tags])
    return fits_of(tokenizer)


GUIDED = [name for name in MADE if name != "harmony"]
ONE = {name: TWO[name].removeprefix("Hm.") for name in GUIDED}
for name in ("pythonic", "lfm2", "olmo3"):
    ONE[name] = ONE[name].replace("'", '"')
ONE["mistral tags"] = ONE["mistral tags"].replace("[CALL_ID]123456789", "")
ONE["llama3"] = ONE["llama3"].partition(";")[0]
for name, tag in (("gigachat", "<|function_call|>"), ("gigachat 3", GIGA)):
    ONE[name] = tag + ONE[name].split(tag)[1]


@pytest.mark.parametrize("name", GUIDED)
def test_guided_calls(fits, name):
    form, required = MADE[name], read_tools(LISTED, "required")
    text = ONE[name].lstrip()
    assert fits(form, required, text) == "yes"
    wrong = re.sub("(: ?|[=\n>])2", r"\1two", text)
    assert (
        wrong != text
        and len(fits(form, required, wrong)) < len(wrong)
        and fits(form, required, "Hm.") == ""
    )
    assert fits(form, TOOLS, "Hm. [1] {") == fits(form, TOOLS, ONE[name]) == "yes"
    assert len(fits(form, TOOLS, wrong)) < len(wrong)
    assert fits(form, TOOLS, "[1, 2]", {"type": "array"}) == fits(form, TOOLS, text, True) == "yes"
    alone = read_tools(LISTED, "required", parallel_tool_calls=False)
    assert (fits(form, alone, text) == "yes") == (name in ("llama3", "gigachat", "gigachat 3"))


def test_a_guided_text_may_end_with_the_tag_of_its_end(fits):
    form = MADE["gigachat 3"]
    for text in ("Hm.<|message_sep|>", f"Hm.{GIGA}" + '{"name": "stop", "arguments": {}}'):
        assert fits(form, TOOLS, text) == "yes"
    assert parsed(form, ["Hm.<|message_", "sep|>"]) == ("Hm.", [], False)


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
def test_optional_arguments(fits, name):
    def call(**values):
        if name == "pythonic":
            return f"[look({', '.join(f'{key}={value}' for key, value in values.items())})]"
        values = {key: value.strip('"') for key, value in values.items()}
        body = "".join(f"<parameter={key}>\n{it}\n</parameter>\n" for key, it in values.items())
        return f"<tool_call>\n<function=look>\n{body}</function>\n</tool_call>"

    form, tools = MADE[name], read_tools(LISTED, "required")
    assert fits(form, tools, call(city='"R"', days="2", unit='"F"', tags='["a"]')) == "yes"
    exact = "True" if name == "pythonic" else "true"
    assert fits(form, tools, call(city='"R"', days="2", exact=exact)) == "yes"
    for wrong in (call(city='"R"', unit='"F"'), call(city='"R"', days="2", unit='"K"')):
        assert len(fits(form, tools, wrong)) < len(wrong)


_THING = {"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"]}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["x", None], ["3", "[]"]),
        ({"type": ["string", "integer"], "minimum": 2}, ["x", 2], ["1", "true"]),
        ({"type": "integer", "anyOf": [{"maximum": 1}, {"minimum": 5}]}, [1, 5], ["2", "true"]),
        ({"$ref": "#/$defs/Thing"}, [{"k": 1}], ["{}", "1", "{k:true}"]),
        ({"type": "array", "items": {"$ref": "#/$defs/Thing"}}, [[], [{"k": 1}]], ["[1]", "{}"]),
        ({"$ref": "#/$defs/Tree"}, [[], [[], [[]]]], ["1", "[{}]"]),
        ({"oneOf": [_THING, {"const": "x"}]}, [{"k": 1}, "x"], ["x", "{}"]),
        ({"type": "array", "minItems": 2, "maxItems": 3}, [[1, "a"], [1, {}, []]], ["[1]", "[]"]),
        ({"type": "array", "maxItems": 1}, [[], ["a"]], ["[1,1]"]),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {}]}, [[1, True]], ["[1]"]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"b c": 1}], ["{a:{}}"]),
        ({"enum": [{"k": ["v"]}, None]}, [{"k": ["v"]}, None], ["{}"]),
        ({}, ["x", 1.5, {"a": [None]}], ["", "a:"]),
    ],
)
def test_guided_values_of_gemma(fits, schema, right, wrong):
    definitions = {"Thing": _THING, "Tree": {"items": {"$ref": "#/$defs/Tree"}, "type": "array"}}
    form, tools = MADE["gemma4"], tools_of({"a": schema}, **{"$defs": definitions})

    def written(value):
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{written(one)}" for key, one in value.items()) + "}"
        if isinstance(value, list):
            return f"[{','.join(map(written, value))}]"
        return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)

    for value in right:
        text = f"<|tool_call>call:f{{a:{written(value)}}}<tool_call|>"
        assert fits(form, tools, text) == "yes"
        assert arguments_of(form, tools, text) == {"a": value}
    for value in wrong:
        assert fits(form, tools, f"<|tool_call>call:f{{a:{value}}}<tool_call|>") != "yes"


@pytest.mark.parametrize("name", [*IN_TAGS, "deepseek_v32"])
def test_guided_strings_in_tags_do_not_end_early(fits, name):
    form, tools = MADE[name], tools_of({"city": {"type": "string"}, "days": {}})
    shape, tags = form.shape, form.parser_class.tags

    def around(value):
        return f"{tags.line_break}{value}{tags.line_break}"

    def call(city):
        body = "".join(
            f"{tags.key}{key}{tags.begin}{it}{tags.end}{tags.joint}"
            for key, it in (("city", around(city)), ("days", around("2")))
        )
        return f"{shape.begin}{shape.before}f{shape.between}{body}{shape.behind}{shape.end}"

    begun = [tag[:-1].partition("｜")[0] for tag in tags.value_ends]  # noqa: RUF001
    for city in ("</b> <i>", *(f"Rome {one}" for one in begun)):
        assert fits(form, tools, call(city)) == "yes"
        assert arguments_of(form, tools, call(city)) == {"city": city, "days": "2"}
    for tag in tags.value_ends:
        assert len(fits(form, tools, call(f"Rome {tag} x"))) < len(call(f"Rome {tag}"))
    text = f"1 < 2 </b {call('Rome')}<<</"
    tools = tools_of({"city": {"type": "string"}, "days": {}}, "auto")
    assert fits(form, tools, text) == "yes" != fits(form, tools, text.replace("days", "dyas"))


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        *(("gemma4", it) for it in ("a:b", "a,b", "a{", "]", "<a", " a", "", "x" * 257)),
        *(("pythonic", it) for it in ("a.b", "a b", "1a", "$a", 'a"', "")),
        *(("minimax_m2", it) for it in ('a"', "a>", "<a", " a", "", "x" * 257)),
    ],
)
def test_names_that_a_format_cannot_express_are_refused(name, parameter):
    with pytest.raises(InexpressibleArguments, match="cannot express the name") as refused:
        MADE[name].grammar(tools_of({"b": {}, parameter: {"type": "string"}}), {})
    assert refused.value.rule == "arguments_0"


def test_schemas_that_are_nested_too_deeply_are_refused():
    deep = {}
    for _ in range(70):
        deep = {"type": "array", "items": deep}
    with pytest.raises(InexpressibleArguments, match="deeper than 64 levels"):
        MADE["gemma4"].grammar(tools_of({"a": deep}), {})
    chain = {f"D{i}": {"items": {"$ref": f"#/$defs/D{i + 1}"}} for i in range(70)}
    tools = tools_of({"a": {"$ref": "#/$defs/D0"}}, **{"$defs": chain})
    assert "_v70:" in MADE["gemma4"].grammar(tools, {})[0]


@pytest.mark.parametrize("name", ["gemma4", "qwen3_coder", "pythonic"])
def test_tools_without_properties_take_any_arguments(fits, name):
    text = {
        "gemma4": '<|tool_call>call:f{a b:<|"|>x<|"|>}<tool_call|>',
        "pythonic": '[f(a="x")]',
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n"
        "</tool_call>",
    }[name]
    assert fits(MADE[name], tools_of({}), text) == "yes"
    assert fits(MADE[name], tools_of({}, additionalProperties=False), text) != "yes"
    root = {"$ref": "#/$defs/Root", "$defs": {"Root": _THING}}
    tools = read_tools(
        [{"type": "function", "function": {"name": "f", "parameters": root}}], "required"
    )
    assert fits(MADE[name], tools, text) != "yes"
