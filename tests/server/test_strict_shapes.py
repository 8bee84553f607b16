"""Answers in the shapes that OpenAI documents: right types, known values, few keys of our own."""

import functools
import json

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import FunctionTool, Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LOOK = {"name": "look", "parameters": CITY}
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = f"<think>\nI look.\n</think>\n\nI see.\n{CALL}\n{CALL}"
# Keys that OpenAI's models of an answer lack, and that docs/http_api.md names. OpenAI's own server
# sends `bytes`, `name` and `store`, too.
OWN = {"reasoning", "reasoning_content", "stop_reason", "bytes", "name", "store"}
LATE = {"deadline_s": 1e-9}  # a whole answer is a 504

CHATS = {
    "plain": {},
    "tools": {"tools": [{"type": "function", "function": LOOK}]},
    "function": {"functions": [LOOK]},
    "scored": {"logprobs": True, "top_logprobs": 2},
    "cut": {"max_tokens": 9},
    "usage": {"stream_options": {"include_usage": True}},
    "late": LATE,
}
COMPLETIONS = {
    "plain": {},
    "scored": {"logprobs": 2},
    "cut": {"max_tokens": 2},
    "usage": {"stream_options": {"include_usage": True}},
    "late": LATE,
}
RESPONSES = {
    "plain": {},
    "tools": {"tools": [{"type": "function", **LOOK}]},
    "scored": {"top_logprobs": 2},
    "cut": {"max_output_tokens": 9},
    "late": LATE,
}


@pytest.fixture(scope="module")
def server(scripted_qwen):
    return scripted_qwen


def whole(server, path, **body):
    server.says(ANSWER)
    found = httpx.post(f"{server.url}/v1/{path}", json={"model": "scripted", **body}, timeout=30)
    assert found.status_code == 200, found.text
    return found.json()


def events(server, path, **body):
    server.says(ANSWER)
    body = {"model": "scripted", "stream": True, **body}
    text = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=30).text
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def unknown(value):
    """The keys of an answer that its model does not have, at any depth."""
    if isinstance(value, list):
        return set().union(*map(unknown, value))
    if not isinstance(value, BaseModel):
        return set()
    fields = [getattr(value, name) for name in type(value).model_fields]
    return set(value.model_extra or ()) | unknown(fields)


validator = functools.cache(TypeAdapter)  # it takes seconds to build some


def check(shape, value):
    found = validator(shape).validate_json(json.dumps(value), strict=True)
    assert unknown(found) <= OWN
    return found


@pytest.mark.parametrize("case", CHATS)
@pytest.mark.every(3)
def test_chats(server, case):
    body = {"messages": [{"role": "user", "content": "17 + 25 ="}], **CHATS[case]}
    chunks = events(server, "chat/completions", **body)
    for chunk in chunks:
        check(ChatCompletionChunk, chunk)
        assert chunk["system_fingerprint"].startswith("gptmanager-")  # some clients need it
    if case == "late":
        (choice,) = chunks[-1]["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")
    elif case != "usage":
        assert check(ChatCompletion, whole(server, "chat/completions", **body)).system_fingerprint


@pytest.mark.parametrize("case", COMPLETIONS)
def test_completions(server, case):
    body = {"prompt": "17 + 25 =", **COMPLETIONS[case]}
    for chunk in events(server, "completions", **body):
        for choice in chunk["choices"]:  # null until the end, which OpenAI's model does not know
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        check(Completion, chunk)
    if case not in ("late", "usage"):
        check(Completion, whole(server, "completions", **body))


@pytest.mark.parametrize("case", RESPONSES)
@pytest.mark.every(3)
def test_responses(server, case):
    body = {"input": "17 + 25 =", **RESPONSES[case]}
    for event in events(server, "responses", **body):
        check(ResponseStreamEvent, event)
    if case != "late":
        for tool in check(Response, whole(server, "responses", **body)).tools:
            assert tool.model_fields_set >= {"name", "parameters", "strict", "type"}
            assert isinstance(tool, FunctionTool)
