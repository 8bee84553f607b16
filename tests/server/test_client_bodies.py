"""Bodies as ordinary clients send them, in their awkward moments too, are answered.

`client_bodies/` has a file for each client, written by hand after its documented shapes.
"""

import copy
import json
import re
from pathlib import Path

import httpx
import pytest
from client_model import NAME, save_client_model
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from running_server import running_server, settings_of

BODIES = Path(__file__).parent / "client_bodies"
CLIENTS = [
    *("openai_python", "openai_node", "litellm", "langchain", "llamaindex", "instructor"),
    *("pydantic_ai", "ai_sdk", "lm_eval", "guidellm", "continue", "aider"),
    *("anthropic_python", "codex", "go_openai", "home_assistant", "dify", "cline", "genai_perf"),
    *("mistral", "inspect_ai", "open_webui", "grok_cli"),
]
CASES = [
    pytest.param(case, id=f"{client}: {case['name']}")
    for client in CLIENTS
    for case in json.loads((BODIES / f"{client}.json").read_text(encoding="utf-8"))
]
CHATS = "/v1/chat/completions"
# the types of the first and the last event of a stream
EVENTS = {
    "/v1/messages": ("message_start", "message_stop"),
    "/v1/responses": ("response.created", "response.completed"),
}
ENDS = {"end_turn", "tool_use", "max_tokens", "model_context_window_exceeded", "completed"}
REASONS = {"stop", "length", "tool_calls", "function_call"}


@pytest.fixture(scope="module")
def client(tmp_path_factory, one_torch_thread):
    folder = tmp_path_factory.mktemp("model")
    save_client_model(folder)
    settings = settings_of(model=folder, served_model_name=NAME)
    with running_server(settings) as server, httpx.Client(base_url=server.url, timeout=60) as own:
        assert own.get("/v1/models").json()["data"][0]["max_model_len"] == 8192
        yield own


def test_there_are_enough_of_every_client():
    assert {path.stem for path in BODIES.glob("*.json")} == set(CLIENTS)
    assert len(CASES) >= 80


def events(text):
    """The events of a stream, which is nothing but data frames and ends with [DONE]."""
    frames = text.split("\n\n")
    assert frames.pop() == "" and all(frame.startswith("data: ") for frame in frames)
    assert frames.pop() == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def check_type(cls, answer):
    """What the client library makes of it; its type of completions knows no null, the API does."""
    if cls is Completion:
        answer = copy.deepcopy(answer)
        for choice in answer["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            if choice["logprobs"]:
                for key in ("token_logprobs", "top_logprobs"):
                    choice["logprobs"][key] = [one for one in choice["logprobs"][key] if one]
    cls.model_validate(answer)


def check_stream(body, is_chat, text):
    chunks = events(text)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    for chunk in chunks:
        check_type(ChatCompletionChunk if is_chat else Completion, chunk)
    prompts = 1 if is_chat else len(body["prompt"]) if isinstance(body["prompt"], list) else 1
    reasons = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert choice["index"] not in reasons, "nothing comes after the finish reason"
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    assert len(reasons) == prompts * body.get("n", 1) and set(reasons.values()) <= REASONS
    if body.get("stream_options", {}).get("include_usage"):
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["prompt_tokens"] > 0


def check_whole(body, is_chat, answer):
    check_type(ChatCompletion if is_chat else Completion, answer)
    for choice in answer["choices"]:
        assert choice["finish_reason"] in REASONS
        if is_chat and choice["finish_reason"] != "length":
            check_form(body, choice["message"])


def check_form(body, message):
    """What has not been cut off has the form that was asked for."""
    form = (body.get("response_format") or {}).get("type")
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if message.get("function_call"):
        calls.append(message["function_call"])
    if form is not None and not calls:
        json.loads(message["content"])
    assert all(isinstance(json.loads(call["arguments"]), dict) for call in calls)
    choice = body.get("tool_choice") or body.get("function_call") or "auto"
    if choice != "auto":
        assert calls, "a call was required"


def check_named(body, route, text):
    """Check an answer of a protocol with named events."""
    if not body.get("stream"):
        answer = json.loads(text)
        assert answer.get("stop_reason", answer.get("status")) in ENDS
        return
    heads, data = zip(*(frame.split("\n", 1) for frame in text.strip().split("\n\n")), strict=True)
    kinds = [json.loads(one.removeprefix("data: "))["type"] for one in data]
    assert [f"event: {kind}" for kind in kinds] == list(heads)
    assert (kinds[0], kinds[-1]) == EVENTS[route]


@pytest.mark.parametrize("case", CASES)
def test_it_is_answered(client, case):
    body, route = case["body"], case.get("route", CHATS)
    response = client.post(route, json=body, headers=case.get("headers", {}))
    assert response.status_code == 200, response.text
    is_chat = route == CHATS
    if body.get("stream"):
        assert response.headers["Content-Type"].startswith("text/event-stream")
    if route in EVENTS:
        check_named(body, route, response.text)
    elif body.get("stream"):
        check_stream(body, is_chat, response.text)
    else:
        check_whole(body, is_chat, response.json())
    warned = response.headers.get("Warning", "")
    names = {name for text in re.findall(r'"[^"]*: ([^"]*)"', warned) for name in text.split(", ")}
    assert names == set(case.get("warns", ())), warned
