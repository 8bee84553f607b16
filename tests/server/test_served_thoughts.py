"""Thoughts through a server: in answers, streams, usage and prompts, and before JSON."""

import json
from pathlib import Path

import pytest
from scripted_server import scripted_server

from gptmanager.callbacks.answers.parsing import harmony_parser as harmony

TEMPLATES = Path(__file__).parent / "chat_templates"
ADD = [{"role": "user", "content": "17 + 25 ="}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Zürich"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
CALL = '{"name": "look", "arguments": {"city": "Rome"}}'
HEAD = "<|start|>assistant"
TO_LOOK = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"city": "Rome"}'
JSON = {
    "type": "json_schema",
    "json_schema": {"name": "place", "schema": PARAMETERS},
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory, one_torch_thread):
    tags = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    folder, path = tmp_path_factory.mktemp("qwen"), TEMPLATES / "qwen.jinja"
    given = {"messages": ADD, "tags": tags, "trust_request_chat_template": True}
    with scripted_server(folder, path, **given) as ask:
        yield ask


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory, one_torch_thread):
    folder, path = tmp_path_factory.mktemp("harmony"), TEMPLATES / "harmony.jinja"
    with scripted_server(folder, path, messages=ADD, special=harmony.TAGS) as ask:
        yield ask


def whole(ask, text, **fields):
    """Thought, content, calls, finish reason, and the numbers of tokens."""
    answer = ask(text, temperature=0, **fields)
    (choice,) = answer.choices
    message = choice.message
    assert getattr(message, "reasoning", None) == getattr(message, "reasoning_content", None)
    calls = [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]
    return (
        getattr(message, "reasoning_content", None),
        message.content,
        calls,
        choice.finish_reason,
        answer.usage.completion_tokens,
        answer.usage.completion_tokens_details.reasoning_tokens,
    )


def streamed(ask, text, **fields):
    thought, content, calls, reason, usage, counts = None, None, [], None, None, []
    options = {"include_usage": True, "continuous_usage_stats": True}
    for chunk in ask(text, temperature=0, stream=True, stream_options=options, **fields):
        usage = chunk.usage
        counts.append(usage.completion_tokens_details.reasoning_tokens)
        for choice in chunk.choices:
            delta, reason = choice.delta, choice.finish_reason or reason
            assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
            if getattr(delta, "reasoning", None):
                thought = (thought or "") + delta.reasoning
            if delta.content:
                content = (content or "") + delta.content
            for call in delta.tool_calls or ():
                if call.id is not None:
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments
    assert counts == sorted(counts)
    calls = [tuple(call) for call in calls]
    details = usage.completion_tokens_details
    return thought, content, calls, reason, usage.completion_tokens, details.reasoning_tokens


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("qwen", "<think>\nI é add.\n</think>\n\nIt is 42.",
         ("I é add.", "It is 42.", [], "stop")),
        ("qwen", f"<think>\nI call <tool_call>{CALL}</tool_call>.\n</think>\n\nI look.\n"
         f"<tool_call>\n{CALL}\n</tool_call>",
         (f"I call <tool_call>{CALL}</tool_call>.", "I look.", [("look", '{"city": "Rome"}')],
          "tool_calls")),
        ("qwen", "42", (None, "42", [], "stop")),
        ("gpt_oss", f"<|channel|>analysis<|message|>I add.<|end|>{HEAD}<|channel|>final<|message|>"
         "It is 42.", ("I add.", "It is 42.", [], "stop")),
        ("gpt_oss", f"<|channel|>analysis<|message|>{CALL}<|end|>{HEAD}{TO_LOOK}",
         (CALL, None, [("look", '{"city": "Rome"}')], "tool_calls")),
    ],
)  # fmt: skip
@pytest.mark.every(3)
def test_a_stream_is_the_whole_answer(request, form, text, expected):
    ask = request.getfixturevalue(form)
    found = whole(ask, text, tools=TOOLS)
    assert found[:4] == expected
    assert streamed(ask, text, tools=TOOLS) == found
    total, thoughts = found[4:]
    assert (0 < thoughts < total) if expected[0] else thoughts == 0


def test_the_number_of_tokens_in_a_thought(qwen, gpt_oss):
    def tokens(ask, text):
        return ask.post("/tokenize", json={"prompt": text}).json()["count"]

    text = "\nI add two numbers.\n"
    assert whole(qwen, f"<think>{text}</think>\n\n42")[-1] == tokens(qwen, text)
    answer = f"<|channel|>analysis<|message|>{text}<|end|>{HEAD}<|channel|>final<|message|>42"
    assert whole(gpt_oss, answer)[-1] == tokens(gpt_oss, text)


def test_a_call_ends_a_thought_that_is_not_closed(qwen):
    text = f"<think>\nI look.\n<tool_call>\n{CALL}\n</tool_call>"
    found = whole(qwen, text, tools=TOOLS)
    assert found[:4] == ("I look.", None, [("look", '{"city": "Rome"}')], "tool_calls")
    assert streamed(qwen, text, tools=TOOLS) == found


@pytest.mark.parametrize("stream", [False, True])
def test_json_begins_after_the_thought(qwen, gpt_oss, stream):
    read = streamed if stream else whole
    found = read(qwen, "<think>\nSo.\n</think>\n\nRome!", response_format=JSON)
    assert found[0] == "So." and json.loads(found[1])["city"] in ("Rome", "Zürich")
    found = read(qwen, "Rome!", response_format=JSON)
    assert found[0] is None and json.loads(found[1])
    text = f"<|channel|>analysis<|message|>So.<|end|>{HEAD}<|channel|>final<|message|>Rome!"
    found = read(gpt_oss, text, response_format=JSON)
    assert found[0] == "So." and json.loads(found[1])


def test_json_begins_at_once_after_a_closed_thought(qwen):
    text = "<think>\nSo.\n</think>\n\nRome!"
    found = whole(qwen, text, response_format=JSON, extra_body={"enable_thinking": False})
    assert found[0] is None and json.loads(found[1]) and found[-1] == 0
    given = {"chat_template_kwargs": {"enable_thinking": False}}
    assert whole(qwen, text, response_format=JSON, extra_body=given) == found


def test_a_call_after_a_closed_thought(qwen):
    """The parser of calls alone reads such an answer."""
    given = {"tools": TOOLS, "extra_body": {"enable_thinking": False}}
    text = f"<tool_call>\n{CALL}\n</tool_call>"
    found = whole(qwen, text, **given)
    assert found[0] is None and found[2] == [("look", '{"city": "Rome"}')] and found[-1] == 0
    assert streamed(qwen, text, **given) == found


def test_a_prompt_that_opens_the_thought(qwen):
    given = {"chat_template": "{{ messages[0].content }}<think>\n</think>A<think>\n"}
    text = "So.\n</think>\n\nRome!"
    found = whole(qwen, text, extra_body=given)
    assert found[:3] == ("So.", "Rome!", []) and found[-1] > 0
    assert streamed(qwen, text, extra_body=given) == found
    found = whole(qwen, text, extra_body=given, response_format=JSON)
    assert found[0] == "So." and json.loads(found[1])


@pytest.mark.parametrize("says", ["Hello!", "<|channel|>final<|message|>No."])
def test_a_required_call_after_a_thought(qwen, gpt_oss, says):
    for ask, thought in (
        (qwen, "<think>\nSo.\n</think>\n\n"),
        (gpt_oss, f"<|channel|>analysis<|message|>So.<|end|>{HEAD}"),
    ):
        found = whole(ask, thought + says, tools=TOOLS, tool_choice="required")
        assert found[0] == "So." and found[3] == "tool_calls"
        assert [name for name, _ in found[2]] == ["look"] and json.loads(found[2][0][1])["city"]


def test_a_call_or_json_in_harmony(gpt_oss):
    text = "<|channel|>final<|message|>Rome!"
    found = whole(gpt_oss, text, tools=TOOLS, response_format=JSON)
    assert found[2] == [] and json.loads(found[1])
    found = whole(gpt_oss, TO_LOOK, tools=TOOLS, response_format=JSON)
    assert found[2] == [("look", '{"city": "Rome"}')]


def test_thoughts_and_efforts_reach_the_template_of_harmony(gpt_oss):
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        *ADD,
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "Sun."},
    ]
    given = {"messages": messages, "reasoning_effort": "high"}
    answer = gpt_oss.post("/tokenize", json=given)
    assert "Warning" not in answer.headers
    text = gpt_oss.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"]
    assert "Reasoning: high" in text and "<|channel|>analysis<|message|>Hm.<|end|>" in text
