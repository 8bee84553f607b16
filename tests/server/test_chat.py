"""Chats through OpenAI's own client: text, streams, tools, and answers in a form."""

import json
from enum import Enum
from pathlib import Path
from typing import Literal

import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field
from running_server import running_server, settings_of
from scripted_server import scripted_server

TEMPLATES = Path(__file__).parent / "chat_templates"
ADD = [{"role": "user", "content": "17 + 25 ="}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Zürich"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
SCHEMAS = {
    "get_weather": PARAMETERS,
    "stop": {"type": "object", "additionalProperties": False},
}
TAGS = ("<tool_call>", "</tool_call>", "<think>")


def client_of(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def chat(server):
    with client_of(server) as client:
        yield client.chat.completions


def joined(stream):
    """Message, finish reason and chunks of a stream, joined as clients do it."""
    content, calls, reason, chunks = "", [], None, list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(calls)
                    calls.append([call.function.name, call.function.arguments])
                else:
                    assert call.function.name is None
                    calls[call.index][1] += call.function.arguments
    return content, calls, reason, chunks


# The bundled model


def test_an_answer(chat):
    answer = chat.create(model="tiny_llama", messages=ADD)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", " 42")
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.usage.prompt_tokens == 7 and answer.usage.completion_tokens == 4


def test_a_stream_is_the_answer(chat):
    options = {"include_usage": True}
    stream = chat.create(model="tiny_llama", messages=ADD, stream=True, stream_options=options)
    content, calls, reason, chunks = joined(stream)
    assert (content, calls, reason) == (" 42", [], "stop")
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 4
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_last_message_is_continued(chat):
    messages = [*ADD, {"role": "assistant", "content": " 4"}]
    answer = chat.create(model="tiny_llama", messages=messages,
                         extra_body={"continue_final_message": True})  # fmt: skip
    assert answer.choices[0].message.content == "2"


def test_max_tokens_and_what_is_left(chat):
    cut = chat.create(model="tiny_llama", messages=ADD, max_completion_tokens=1)
    assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 1
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
        chat.create(model="tiny_llama", messages=ADD, max_tokens=512)
    whole = chat.create(
        model="tiny_llama", messages=ADD, max_tokens=-1, extra_body={"ignore_eos": True}
    )
    assert whole.usage.total_tokens == 512


def test_log_probs_and_tokens_of_a_stream_are_those_of_the_whole(chat):
    given = {"model": "tiny_llama", "messages": ADD, "logprobs": True,
             "extra_body": {"return_token_ids": True}}  # fmt: skip
    whole = chat.create(**given)
    (choice,) = whole.choices
    listed = choice.logprobs.content
    assert "".join(one.token for one in listed) == choice.message.content
    assert all(one.logprob <= 0 and bytes(one.bytes).decode() == one.token for one in listed)
    assert len(choice.token_ids) == whole.usage.completion_tokens
    assert len(whole.prompt_token_ids) == 7
    chunks = list(chat.create(stream=True, **given))
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    told = [chunk.choices[0] for chunk in chunks]
    assert [token for one in told for token in one.token_ids] == choice.token_ids
    streamed = [one for piece in told if piece.logprobs for one in piece.logprobs.content]
    assert streamed == listed and not told[0].token_ids


def test_a_text_that_stops(chat):
    given = {"model": "tiny_llama", "stop": ["2"], "messages": ADD}
    (choice,) = chat.create(**given).choices
    assert (choice.message.content, choice.finish_reason, choice.stop_reason) == (" 4", "stop", "2")
    content, _, reason, chunks = joined(chat.create(stream=True, **given))
    assert (content, reason, chunks[-1].choices[0].stop_reason) == (" 4", "stop", "2")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 8, "min_tokens": 9}, "min_tokens"),
        ({"messages": None}, "messages"),
        ({"message": []}, "message"),
        ({"bad_words": ["a"], "guided_regex": "a"}, None),
        ({"max_completion_tokens": 512}, "max_completion_tokens"),
        ({"messages": [*ADD[:1] * 400, "Hi"]}, "messages[400]"),
        ({"messages": [{"role": "user", "content": "a " * 600}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].type"),
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "many"}, "tool_choice"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"structured_outputs": {"json": {"type": "strin"}}}, "structured_outputs.json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": ["a"]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_come_before_the_first_event(client, fields, param, stream):
    body = {"model": "tiny_llama", "messages": ADD, "stream": stream, **fields}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_choices_are_of_the_list(chat):
    answer = chat.create(model="tiny_llama", messages=ADD, n=3, seed=1, temperature=1.0,
                         extra_body={"guided_choice": ["red", "blue"]})  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} <= {"red", "blue"}


class Color(str, Enum):
    RED = "red"
    BLUE = "blue"


class Ball(BaseModel):
    color: Color
    size: Literal[1, 2, 3]
    tags: list[Literal["a", "b"]] = Field(max_length=2)


def test_pydantic_models_are_parsed(chat):
    answer = chat.parse(model="tiny_llama", messages=ADD, response_format=Ball,
                        temperature=1.0, seed=3)  # fmt: skip
    assert isinstance(answer.choices[0].message.parsed, Ball)


def test_a_json_object(chat):
    answer = chat.create(model="tiny_llama", messages=ADD, temperature=1.0, seed=1, max_tokens=40,
                         response_format={"type": "json_object"})  # fmt: skip
    (choice,) = answer.choices
    assert choice.message.content.startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


# Tools: formats by the template, models by a script


def scripted(tmp_path_factory, template, **fields):
    path = TEMPLATES / f"{template}.jinja"
    folder = tmp_path_factory.mktemp(template)
    return scripted_server(folder, path, messages=ADD, tools=TOOLS, **fields)


@pytest.fixture(scope="module")
def llama3(tmp_path_factory, one_torch_thread):
    with scripted(tmp_path_factory, "llama3") as ask:
        yield ask


@pytest.fixture(scope="module")
def qwen(tmp_path_factory, one_torch_thread):
    given = {"tags": TAGS, "trust_request_chat_template": True}
    with scripted(tmp_path_factory, "qwen", **given) as ask:
        yield ask


@pytest.fixture(scope="module")
def hermes(tmp_path_factory, one_torch_thread):
    """Tags in letters."""
    with scripted(tmp_path_factory, "qwen") as ask:
        yield ask


CALLS = (
    "I look.\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)
FOUND = [["get_weather", '{"city": "Zürich", "days": 2}'], ["stop", "{}"]]


def calls_of(choice):
    return [[one.function.name, one.function.arguments] for one in choice.message.tool_calls or ()]


def fits(name, arguments):
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    return True


def test_calls_in_a_text(qwen):
    (choice,) = qwen(CALLS).choices
    found = calls_of(choice)
    assert (choice.message.content, found) == ("I look.", FOUND)
    assert choice.finish_reason == "tool_calls"
    content, calls, reason, chunks = joined(qwen(CALLS, stream=True))
    assert (content, calls, reason) == ("I look.", FOUND, "tool_calls")
    assert len(chunks) >= 7  # one for each part, even if all tokens arrive at once


def test_calls_of_llama_3(llama3):
    text = '{"name": "get_weather", "parameters": {"city": "Rome", "days": 1}}'
    found = [["get_weather", '{"city": "Rome", "days": 1}']]
    (choice,) = llama3(text).choices
    assert (choice.message.content, calls_of(choice)) == (None, found)
    assert joined(llama3(text, stream=True))[:3] == ("", found, "tool_calls")
    (choice,) = llama3('{"answer": 42} is what I think').choices
    assert choice.message.content == '{"answer": 42} is what I think'
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None


@pytest.mark.parametrize("form", ["qwen", "hermes", "llama3"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.every(2)
def test_a_required_call_is_right_whatever_the_model_says(request, form, stream):
    ask = request.getfixturevalue(form)
    named = {"type": "function", "function": {"name": "stop"}}
    wants = (("required", {"get_weather", "stop"}), (named, {"stop"}))
    for choice, names in wants:
        for says in ("Hello!", '<tool_call>\n{"name": "other"', '{"name": "get_weather", "p'):
            fields = {"tool_choice": choice, "parallel_tool_calls": False}
            if stream:
                content, calls, reason, _ = joined(ask(says, stream=True, **fields))
            else:
                (found,) = ask(says, **fields).choices
                content, calls = found.message.content or "", calls_of(found)
                reason = found.finish_reason
            assert (content, len(calls), reason) == ("", 1, "tool_calls")
            assert calls[0][0] in names and fits(*calls[0])


@pytest.mark.parametrize("form", ["qwen", "hermes"])
def test_a_call_that_has_begun_becomes_a_right_one(request, form):
    qwen = request.getfixturevalue(form)
    says = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 70}}'
    (choice,) = qwen(says).choices
    (call,) = calls_of(choice)
    assert call[0] == "get_weather" and fits(*call) and choice.finish_reason == "tool_calls"


def test_a_call_that_is_cut_off_says_so(qwen):
    (choice,) = qwen(CALLS, max_tokens=40).choices
    assert choice.finish_reason == "length"


def test_deprecated_functions_are_answered_in_their_own_shape(qwen):
    functions = [tool["function"] for tool in TOOLS]
    says = CALLS.partition("</tool_call>")[0] + "</tool_call>"
    fields = {"tools": openai.omit, "functions": functions}
    (choice,) = qwen(says, **fields).choices
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    call = choice.message.function_call
    assert [call.name, call.arguments] == FOUND[0] and choice.message.content == "I look."
    told, reasons = ["", ""], []
    for chunk in qwen(says, stream=True, **fields):
        (one,) = chunk.choices
        reasons.append(one.finish_reason)
        assert one.delta.tool_calls is None
        if one.delta.function_call:
            told[0] += one.delta.function_call.name or ""
            told[1] += one.delta.function_call.arguments
    assert told == FOUND[0] and reasons[-1] == "function_call"
    result = {"role": "function", "name": call.name, "content": "Sun."}
    messages = [*ADD, choice.message.model_dump(), result]
    (choice,) = qwen("Fine.", messages=messages, **fields).choices
    assert (choice.message.content, choice.finish_reason) == ("Fine.", "stop")
    (choice,) = qwen("No.", **fields, function_call={"name": "stop"}).choices
    assert choice.message.function_call.name == "stop"


@pytest.mark.parametrize("ends", [{"max_tokens": 40}, {"stop": ["days"]}])
def test_after_a_call_that_was_cut_off_the_chat_goes_on(qwen, ends):
    """A client's loop sends back what it got, with whatever result."""
    (choice,) = qwen(CALLS, **ends).choices
    assert choice.finish_reason == ("length" if "max_tokens" in ends else "stop")
    ((_, arguments),) = calls_of(choice)
    with pytest.raises(ValueError):
        json.loads(arguments)
    call = choice.message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "no JSON: try again"}
    messages = [*ADD, choice.message.model_dump(), result]
    assert qwen("Sorry.", messages=messages).choices[0].message.content == "Sorry."
    tokenized = {"messages": messages, "tools": TOOLS}
    ids = qwen.post("/tokenize", json=tokenized).json()["tokens"]
    prompt = qwen.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert f'"arguments": {arguments}' in prompt


@pytest.mark.parametrize("items", ["arguments.items()", "arguments | items"])
def test_a_template_that_needs_objects_gets_a_cut_call_as_one(qwen, items):
    """Arguments are given as text first, because most templates write texts as they are."""
    each = f"{{% for key, value in call.function.{items} %}}({{{{ key }}}}={{{{ value }}}})"
    each += "{% endfor %}"
    template = f"{{% for call in messages[-1].tool_calls %}}{each}{{% endfor %}}"
    calls = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": arguments}}
        for name, arguments in (("a", '{"city": "Par'), ("b", '{"city": "Rome"}'))
    ]
    messages = [*ADD, {"role": "assistant", "content": None, "tool_calls": calls}]

    def tokenized(template):
        return qwen.post("/tokenize", json={"messages": messages, "chat_template": template})

    ids = tokenized(template).json()["tokens"]
    prompt = qwen.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert prompt == '(arguments={"city": "Par)(city=Rome)'
    refused = tokenized("{{ raise_exception('No calls!') }}")
    assert refused.status_code == 400 and "No calls!" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("shown", "calls"),
    [
        ("respond with <|tool_call|>",
         '<|tool_call|>[{"name": "look", "arguments": {"city": "Pa\\"ris", "near": [true]}}, '
         '{"name": "stop", "arguments": {}}]'),
        ("List of tools: ",
         '<|tool_call_start|>[look(city="Pa\\"ris", near=[True]), stop()]<|tool_call_end|>'),
        ("<tool_call>{{ '{\"name\":' }}", ""),  # templates of this format write calls themselves
    ],
)  # fmt: skip
def test_calls_are_text_for_a_template_that_leaves_them_out(qwen, shown, calls):
    given = [("look", '{"city": "Pa\\"ris", "near": [true]}'), ("stop", "{}")]
    listed = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in given
    ]
    messages = [*ADD, {"role": "assistant", "content": "I look.", "tool_calls": listed}]
    body = {"messages": messages, "chat_template": f"{shown}|{{{{ messages[-1].content }}}}"}
    ids = qwen.post("/tokenize", json=body).json()["tokens"]
    prompt = qwen.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert prompt.partition("|I look.")[2] == calls


def test_llama_3_which_takes_one_call_in_a_message_gets_one(llama3):
    call = '{"name": "get_weather", "parameters": {"city": "Rome", "days": 1}}'
    loose = {
        "type": "object",
        "properties": {"a": {"type": "strin"}},
    }  # so that nothing guides the calls
    tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "parameters": loose}}]
    (choice,) = llama3(f"{call}; {call}", tools=tools).choices
    assert len(calls_of(choice)) == 1 and choice.finish_reason == "tool_calls"
    two = [{"id": name, "type": "function", "function": {"name": "stop", "arguments": "{}"}}
           for name in "ab"]  # fmt: skip
    results = [{"role": "tool", "tool_call_id": name, "content": f"saw {name}"} for name in "ba"]
    messages = [*ADD, {"role": "assistant", "content": None, "tool_calls": two}, *results]
    for given in (TOOLS, []):
        assert llama3("Done.", messages=messages, tools=given).choices[0].message.content == "Done."
    ids = llama3.post("/tokenize", json={"messages": messages}).json()["tokens"]
    prompt = llama3.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert prompt.count('"name": "stop"') == 2 and prompt.index("saw a") < prompt.index("saw b")


def test_no_calls_where_none_are_wanted(qwen):
    (choice,) = qwen(CALLS, tool_choice="none").choices
    assert choice.message.content == CALLS and choice.message.tool_calls is None


def test_a_call_or_json(qwen):
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [42]}}}
    (choice,) = qwen(CALLS.removeprefix("I look.\n"), response_format=schema).choices
    assert calls_of(choice) == FOUND
    (choice,) = qwen("42", response_format=schema).choices
    assert (choice.message.content, choice.finish_reason) == ("42", "stop")
    with pytest.raises(openai.BadRequestError, match="with tools, only JSON"):
        qwen("42", extra_body={"guided_regex": "a"})


def test_words_that_no_call_and_no_text_holds(qwen):
    (choice,) = qwen(CALLS, extra_body={"bad_words": ["look"]}).choices
    assert "look" not in (choice.message.content or "")
    says, fields = CALLS.removeprefix("I look.\n"), {"extra_body": {"bad_words": ["Z"]}}
    for tool_choice in ("required", "auto"):
        (choice,) = qwen(says, tool_choice=tool_choice, **fields).choices
        (name, arguments), *_ = calls_of(choice)
        assert name == "get_weather" and json.loads(arguments)["city"] == "Rome"


SAYS = [
    CALLS,
    "I look. <tool_call>{ none } <tool_call>\n" + '{"name": "stop", "arguments": {}} then <tool',
    '{"name": "get_weather", "parameters": {"city": "Rome", "days": 1}}; {"name": "stop"',
    '  {"answer": [1, "}"]} is what I think',
]


@pytest.mark.parametrize("form", ["qwen", "hermes", "llama3"])
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.every(4)
def test_a_stream_of_calls_says_what_the_whole_answer_says(request, form, choice):
    ask = request.getfixturevalue(form)
    for number, says in enumerate(SAYS):
        given = {"tool_choice": choice, "seed": 1, "logprobs": True, "max_tokens": 13 + 29 * number}
        if number % 2:
            given.update(parallel_tool_calls=False, stop=["days", "ool", "}}"])
        (whole,) = ask(says, **given).choices
        content, calls, reason, chunks = joined(ask(says, stream=True, **given))
        assert content == (whole.message.content or "")
        assert (calls, reason) == (calls_of(whole), whole.finish_reason)
        told = [chunk.choices[0].logprobs for chunk in chunks]
        listed = [one for it in told if it for one in it.content]
        assert listed == (whole.logprobs.content if whole.logprobs else [])


def test_a_stream_has_no_event_for_text_that_is_held_back(qwen):
    deltas = [chunk.choices[0] for chunk in qwen(CALLS, stream=True)]
    empty = [one for one in deltas if not one.delta.model_dump(exclude_none=True)]
    assert empty == deltas[-1:] and empty[0].finish_reason == "tool_calls"
    ids = {"seed": 1, "extra_body": {"return_token_ids": True}}
    streamed = [
        one for chunk in qwen(CALLS, stream=True, **ids) for one in chunk.choices[0].token_ids
    ]
    assert streamed == qwen(CALLS, **ids).choices[0].token_ids


def test_calls_go_back_into_the_prompt(qwen):
    (choice,) = qwen(CALLS).choices
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "fine"}
        for call in choice.message.tool_calls
    ]
    messages = [*ADD, choice.message.model_dump(), *results]
    assert qwen("Thanks.", messages=messages).choices[0].message.content == "Thanks."


def test_a_template_in_a_request(qwen):
    short = qwen("Hi", tools=[], extra_body={"chat_template": "{{ messages[0].content }}"})
    assert short.usage.prompt_tokens == 7
    with pytest.raises(openai.BadRequestError, match="chat_template: the chat template: No cats"):
        qwen("Hi", tools=[], extra_body={"chat_template": "{{ raise_exception('No cats') }}"})
    template = "{% if range == 2 %}{{ messages[0].content }}{% endif %}"
    body = {"chat_template": template, "chat_template_kwargs": {"self": 1, "range": 2}}
    assert qwen("Hi", tools=[], extra_body=body).usage.prompt_tokens == 7


def test_the_words_of_a_template_that_refuses(tmp_path, client):
    settings = settings_of(chat_template=TEMPLATES / "gemma.jinja")
    with running_server(settings) as server, client_of(server) as own:
        with pytest.raises(openai.BadRequestError, match="System role not supported"):
            messages = [{"role": "system", "content": "x"}, *ADD]
            own.chat.completions.create(model="tiny_llama", messages=messages)
