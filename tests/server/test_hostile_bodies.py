"""Every field of every body that the server reads, with values that harm careless servers.

The fields come from the tables that read them, so that a new one is tried, too. A server in a
process of its own is attacked, so that its memory can be measured.
"""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import threading

import orjson
import pytest
from child import Child
from hostile_values import (
    HOSTILE,
    allowed_growth,
    forget_peak,
    memory_of,
    names_for,
    places,
    with_value,
)
from running_server import MODEL

from gptmanager.server.chat.messages import count_items
from gptmanager.server.http import body
from gptmanager.server.http.access import AccessSettings
from gptmanager.server.openapi import ENDPOINTS

CHAT = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "b"},
        {
            "role": "assistant",
            "content": "a",
            "reasoning_content": "b",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "a"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": "d",
                "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
            },
        }
    ],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "max_tokens": 1,
}
FORMAT = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    },
    "stream_options": {"include_usage": True},
    "structured_outputs": {"json": {"type": "object"}},
    "logit_bias": {"5": 1},
    "chat_template_kwargs": {"a": 1},
    "documents": [{"a": "b"}],
    "stop": ["a"],
    "bad_words": ["a"],
    "stop_token_ids": [5],
}
MESSAGES = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "b"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "b"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a"}]},
        ]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "none"},
}  # fmt: skip
# for each path a body that is taken; fields that are not in it are added to it one by one
ITEMS = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "a"},
    ],
    "tools": [{"type": "function", **CHAT["tools"][0]["function"]}],
    "tool_choice": "none",
    "text": {"format": {"type": "text"}},
    "max_output_tokens": 1,
}
BODIES = {
    "/v1/completions": {"prompt": [[5, 6]], "max_tokens": 1},
    "/v1/chat/completions": CHAT,
    "/v1/responses": ITEMS,
    "/v1/responses/input_tokens": ITEMS,
    "/v1/messages": {**MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": MESSAGES,
    "/tokenize": {"messages": CHAT["messages"], "tools": CHAT["tools"]},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "b"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}


def attacks(endpoint):
    """(place, body around it) for each field, also those inside of others."""
    whole = BODIES[endpoint.path]
    for place in places(whole):
        yield place, whole
    for name in endpoint.fields:
        if name not in whole:
            yield (name,), whole
            if name in FORMAT:
                around = {**whole, name: FORMAT[name]}
                yield from ((place, around) for place in places(around) if place[0] == name)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """(pid, connection) of a server of its own."""
    folder = tmp_path_factory.mktemp("adapters")
    command = [sys.executable, "-m", "gptmanager", "serve", "--model", MODEL, "--port", "0"]
    command += ["--threads", "1", "--adapter-dir", str(folder)]
    with Child(command, stderr=subprocess.PIPE, text=True) as process:
        found = (re.search(r"http://([\d.]+):(\d+)", line) for line in process.stderr)
        address = next(filter(None, found))
        connection = http.client.HTTPConnection(address[1], int(address[2]), timeout=60)
        try:
            for path, sent in BODIES.items():  # what is imported at first use is no growth
                answer_to(connection, path, orjson.dumps(sent))
            yield process.pid, connection
        finally:
            connection.close()
            process.terminate()
            process.stderr.read()


def answer_to(connection, path, content):
    connection.request("POST", path, content, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_every_body_that_the_server_reads_is_attacked():
    assert {it.path for it in ENDPOINTS if it.fields is not None} == set(BODIES)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.every(8)
def test_a_hostile_value_is_refused_by_name_or_answered(attacked, path, name):
    pid, connection = attacked
    endpoint = next(it for it in ENDPOINTS if it.path == path)
    before, _ = memory_of(pid)
    forget_peak(pid)
    largest = b""
    for index, (place, around) in enumerate(attacks(endpoint)):
        if name not in names_for(index):
            continue
        sent = with_value(around, place, HOSTILE[name])
        largest = max(largest, sent, key=len)
        status, answer = answer_to(connection, path, sent)
        assert status == 200 or 400 <= status < 500, (place, status, answer[:500])
        if status != 200:
            error = orjson.loads(answer)["error"]
            assert error["message"] and len(answer) < 3000, (place, len(answer))
    _, peak = memory_of(pid)
    assert peak - before < allowed_growth(largest)
    connection.request("GET", "/health")
    assert connection.getresponse().read() == b'{"status":"ready"}'


class Guarded(list):
    """A list that may be counted, and not read."""

    def __iter__(self):
        raise AssertionError("it is read")

    def __getitem__(self, index):
        if index == 0:
            return 5
        raise AssertionError("it is read")


@pytest.mark.parametrize(
    ("path", "name"), [("/v1/completions", "prompt"), ("/detokenize", "tokens")]
)
def test_token_ids_are_counted_before_they_are_read(server, client, monkeypatch, path, name):
    plain = body.parse_json

    def parse(text):
        found = plain(text)
        return {**found, name: Guarded(found[name])}

    monkeypatch.setattr(body, "parse_json", parse)
    answer = client.post(path, json={name: [5] * 513})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name, answer.text
    assert "513" in answer.text and "512" in answer.text


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("/v1/completions", {"prompt": [1, "x"]}, "prompt[1] must be a token id, got 'x'"),
        (
            "/v1/completions",
            {"prompt": [[1], [2, None]]},
            "prompt[1][1] must be a token id, got None",
        ),
        ("/v1/completions", {"prompt": [[1], [2, 640]]}, "prompt[1][1] = 640 is outside 0 to 639"),
        ("/detokenize", {"tokens": [1, 2.5]}, "tokens[1] must be a token id, got 2.5"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1] = -1 is outside 0 to 639"),
    ],
)
def test_an_invalid_token_id_is_named(client, path, content, message):
    error = client.post(path, json=content).json()["error"]
    assert error["message"] == message and message.startswith(error["param"])


def test_messages_their_parts_and_calls_are_counted_before_they_are_read(client):
    assert count_items(Guarded([5] * 11), 10) == 11
    assert count_items([{"content": Guarded([5] * 6), "tool_calls": Guarded([5] * 7)}], 10) == 13
    assert count_items("no list", 10) == 0
    part, call = {"type": "text", "text": "a"}, {"function": {"name": "f", "arguments": "{}"}}
    for messages in (
        [{"role": "user", "content": "a"}] * 513,
        [{"role": "user", "content": [part] * 513}],
        [{"role": "assistant", "tool_calls": [call] * 513}],
    ):
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = client.post(path, json={"messages": messages})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["code"] == "context_length_exceeded"
    documents = {"messages": [{"role": "user", "content": "a"}], "documents": [{}] * 1025}
    assert "1025" in client.post("/tokenize", json=documents).json()["error"]["message"]


def test_a_large_body_is_parsed_outside_the_event_loop(server, client, monkeypatch):
    threads, plain = [], body.parse_json

    def parse(text):
        threads.append(threading.current_thread())
        return plain(text)

    monkeypatch.setattr(body, "parse_json", parse)
    for size in (1, body.LARGE_BODY):
        client.post("/tokenize", json={"prompt": "a" * size})
    assert threads[0] is not threads[1] and threads[1].name.startswith("asyncio_")


def test_a_body_has_4_mib_for_text_and_64_mib_for_tensors():
    access, told = AccessSettings(), AccessSettings(max_body_bytes=7)
    assert (access.body_limit(), access.body_limit(carries_tensors=True)) == (4 << 20, 64 << 20)
    assert (told.body_limit(), told.body_limit(carries_tensors=True)) == (7, 7)


def test_bodies_of_all_clients_together_have_a_limit(server, client):
    """They count while they are read and parsed, and no longer."""
    room = server.engine.body_budget
    left = room._left
    with room.reserved(left - 400):
        for content in (b'{"prompt": "%s"}' % (b"a" * 500), iter([b"a" * 300, b"a" * 300])):
            refused = client.post("/tokenize", content=content)
            assert refused.status_code == 429 and "Retry-After" in refused.headers
            assert refused.json()["error"]["code"] == "too_many_bodies"
        assert client.post("/tokenize", json={"prompt": "a" * 300}).status_code == 200
    assert client.post("/tokenize", content="a" * 500).status_code == 400
    assert room._left == left
