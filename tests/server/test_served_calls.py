"""Calls through a server, in a format with special tokens of its own; and what the log says."""

import json
from pathlib import Path

import pytest
from running_server import settings_of
from scripted_server import scripted_server

from gptmanager.server.chat.chat_call import ChatCalls

TEMPLATES = Path(__file__).parent / "chat_templates"
ASKS = [{"role": "user", "content": "How is Rome?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": CITY}}]
CALL = '{"name": "look", "arguments": {"city": "Rome"}}'


@pytest.fixture(scope="module")
def mistral(tmp_path_factory, one_torch_thread):
    folder, path = tmp_path_factory.mktemp("mistral"), TEMPLATES / "mistral.jinja"
    special = ("[TOOL_CALLS]", "[ARGS]")
    with scripted_server(folder, path, messages=ASKS, tools=TOOLS, special=special) as ask:
        yield ask


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_after_a_special_token(mistral, choice):
    text = f"[TOOL_CALLS] [{CALL}, {CALL}]"
    (found,) = mistral(text, tool_choice=choice).choices
    assert found.finish_reason == "tool_calls" and found.message.content is None
    calls = found.message.tool_calls
    assert [json.loads(one.function.arguments) for one in calls] == [{"city": "Rome"}] * 2
    results = [{"role": "tool", "tool_call_id": one.id, "content": "sunny"} for one in calls]
    messages = [*ASKS, found.message, *results]
    assert mistral("Sunny.", messages=messages).choices[0].message.content == "Sunny."
    arguments = ["", ""]
    for chunk in mistral(text, tool_choice=choice, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            arguments[call.index] += call.function.arguments
            assert call.id is None or len(call.id) == 9
    assert arguments == [one.function.arguments for one in calls]
    assert mistral(text, tool_choice="none").choices[0].message.tool_calls is None


def test_a_refusal_of_deprecated_functions_names_the_field_that_was_sent(client):
    """The template knows no calls, which is found after the fields are read."""
    body = {"messages": ASKS, "functions": [TOOLS[0]["function"]]}
    error = client.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "functions" and error["message"].startswith("functions: the chat")


@pytest.mark.parametrize(
    ("template", "options", "expected"),
    [
        ("qwen", {}, ["answers: think, by the chat", "calls in answers: hermes, by the chat"]),
        ("gemma", {}, ["thoughts in answers: none", "calls in answers: none; requests with tools"]),
        ("gemma", {"tool_call_parser": "pythonic", "reasoning_parser": "think"},
         ["think, by --reasoning-parser", "pythonic, by --tool-call-parser"]),
        ("gemma", {"tool_call_parser": "harmony"}, ["harmony, by --tool-call-parser"] * 2),
        ("harmony", {}, ["harmony, by the chat template"] * 2),
        ("harmony", {"tool_call_parser": "hermes"}, ["none", "hermes, by --tool-call-parser"]),
    ],
)  # fmt: skip
def test_the_log_names_the_formats_at_the_start(engine, caplog, template, options, expected):
    path = TEMPLATES / f"{template}.jinja"
    with caplog.at_level("INFO", logger="gptmanager"):
        ChatCalls(engine, settings_of(chat_template=path, **options)).log_formats()
    for text, line in zip(expected, caplog.messages, strict=True):
        assert text in line
