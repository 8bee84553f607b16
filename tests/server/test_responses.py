"""/v1/responses by OpenAI's own client: items, events, calls, thoughts, stored responses."""

import functools
import json

import httpx
import pytest
from openai import OpenAI
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from running_server import running_server, settings_of

from gptmanager.server.errors import ApiError
from gptmanager.server.http.warning_header import Warnings
from gptmanager.server.openai.response_input import chat_fields, items_of, messages_of
from gptmanager.server.openai.response_store import MAX_AGE_S, ResponseStore

EVENTS = TypeAdapter(ResponseStreamEvent)
ASKS = "17 + 25 ="
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LOOK = {"type": "function", "name": "look", "parameters": CITY}
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = f"<think>\nI look.\n</think>\n\nI see.\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def server(scripted_qwen):
    return scripted_qwen


@pytest.fixture
def ask(server):
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        def ask(says, **fields):
            server.says(says)
            return client.responses.create(model="scripted", **{"input": ASKS, **fields})

        ask.client = client
        yield ask


def plain(response):
    """A response without what differs between two of them."""
    found = json.loads(response.to_json())
    for key in ("id", "created_at", "completed_at"):
        found.pop(key)
    del found["usage"]["input_tokens_details"]
    for item in found["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return found


def test_a_text(ask):
    metadata = {f"{number:0512}": "b" * 512 for number in range(16)}  # the most that is allowed
    found = ask("42", instructions="Add.", metadata=metadata, max_output_tokens=20)
    assert isinstance(found, OpenAIResponse)
    assert (found.output_text, found.status, found.metadata) == ("42", "completed", metadata)
    assert found.instructions == "Add." and found.usage.output_tokens == 3
    assert found.usage.total_tokens == found.usage.input_tokens + 3
    cut = ask("4242424242", max_output_tokens=2)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"


def test_an_answer_without_a_text_has_a_message(ask):
    whole = ask("")
    (message,) = whole.output
    assert (whole.status, message.type, message.content[0].text) == ("completed", "message", "")
    events = [*ask("", stream=True)]
    assert plain(events[-1].response) == plain(whole)
    assert [one.type.removeprefix("response.") for one in events[2:]] == [
        *("output_item.added", "content_part.added", "output_text.done", "content_part.done"),
        *("output_item.done", "completed"),
    ]
    assert ask("42", previous_response_id=whole.id).output_text == "42"


def test_a_stream_is_the_whole_response(ask):
    whole = ask(ANSWER, tools=[LOOK])
    kinds = [item.type for item in whole.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output[0].content[0].text == "I look." and whole.output_text == "I see."
    assert json.loads(whole.output[3].arguments) == {"city": "Rome"}
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    events = [*ask(ANSWER, tools=[LOOK], stream=True)]
    assert [one.sequence_number for one in events] == list(range(len(events)))
    for one in events:  # the client itself checks nothing
        EVENTS.validate_python(one.to_dict(), strict=False)
    assert plain(events[-1].response) == plain(whole)
    assert [one.type for one in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.output == [] and events[-1].type == "response.completed"
    texts = {}
    for one in events:
        if one.type.endswith(".delta"):
            key = (one.output_index, one.type.removesuffix(".delta"))
            texts[key] = texts.get(key, "") + one.delta
        elif one.type.endswith(("_text.done", "arguments.done")):
            assert texts[one.output_index, one.type.removesuffix(".done")] in (
                getattr(one, "text", None), getattr(one, "arguments", None))  # fmt: skip
        elif one.type == "response.output_item.added":
            assert not getattr(one.item, "content", None) and one.item.status == "in_progress"
        elif one.type == "response.output_item.done":
            assert one.item == whole.output[one.output_index].model_copy(
                update={name: getattr(one.item, name) for name in ("id", "call_id")
                        if hasattr(one.item, name)})  # fmt: skip
    assert len(texts) == 4


LISTED = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def test_log_probabilities_are_those_of_the_text(ask):
    whole = ask(ANSWER, tools=[LOOK], **LISTED)
    listed = whole.output[1].content[0].logprobs
    assert "".join(one.token for one in listed).strip() == "I see."
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 and one.bytes for one in listed)
    assert whole.top_logprobs == 2
    events = [*ask(ANSWER, tools=[LOOK], stream=True, **LISTED)]
    for one in events:
        EVENTS.validate_python(one.to_dict(), strict=False)
    assert plain(events[-1].response) == plain(whole)
    by_type = {}
    for one in events:
        by_type.setdefault(one.type, []).append(one)
    (done,) = by_type["response.output_text.done"]
    streamed = [it for one in by_type["response.output_text.delta"] for it in one.logprobs]
    tokens = [one.token for one in listed]
    assert [it.token for it in done.logprobs] == [it.token for it in streamed] == tokens
    added = [one.part for one in by_type["response.content_part.added"]]
    assert [part.to_dict().get("logprobs") for part in added] == [None, []]
    assert ask("42", top_logprobs=1).output[0].content[0].logprobs[0].top_logprobs
    for name in ("reasoning.encrypted_content", "web_search_call.action.sources"):
        assert ask("42", include=[name]).output[0].content[0].logprobs == []


def test_the_helper_for_streams(ask):
    class City(BaseModel):
        city: str

    ask('{"city": "Rome"}')
    fields = {"model": "scripted", "input": ASKS, "text_format": City}
    with ask.client.responses.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        found = stream.get_final_response()
    assert found.output_parsed is None or found.output_parsed.city is not None
    assert {"response.output_text.delta", "response.completed"} <= kinds


def test_structured_text_and_required_calls(ask):
    form = {
        "type": "json_schema",
        "name": "place",
        "schema": {**CITY, "additionalProperties": False},
    }
    found = ask('{"city": "Rome"}', text={"format": form})
    assert json.loads(found.output_text) == {"city": "Rome"}
    choice = {"type": "function", "name": "look"}
    found = ask(CALL, tools=[LOOK], tool_choice=choice)
    assert found.output[0].type == "function_call" and found.output[0].name == "look"


def test_a_response_goes_on(ask):
    first = ask(ANSWER, tools=[LOOK])
    result = {
        "type": "function_call_output", "call_id": first.output[2].call_id, "output": "sunny",
    }  # fmt: skip
    second = ask("Sunny.", input=[result], previous_response_id=first.id, tools=[LOOK])
    by_hand = [{"role": "user", "content": ASKS}, *first.output, result]
    third = ask("Sunny.", input=by_hand, tools=[LOOK])
    assert second.usage.input_tokens == third.usage.input_tokens > first.usage.input_tokens
    responses = ask.client.responses
    assert responses.retrieve(second.id).output_text == "Sunny."
    items = [*responses.input_items.list(second.id, order="asc", limit=2)]
    assert [one.type for one in items[-2:]] == ["function_call", "function_call_output"]
    assert len(items) == 6
    assert (items[0].type, items[0].content[0].text) == ("message", ASKS)
    assert items[0].content[0].type == "input_text"
    responses.delete(second.id)
    unstored = ask("42", store=False)
    for name in (second.id, unstored.id, "resp_other"):
        with pytest.raises(Exception, match="is stored") as refused:
            responses.retrieve(name)
        assert refused.value.status_code == 404
    with pytest.raises(Exception, match="no response of this id") as refused:
        ask("42", previous_response_id="resp_other")
    assert refused.value.code == "previous_response_not_found"
    with pytest.raises(Exception, match="only background"):
        responses.cancel(first.id)


def test_input_tokens_are_counted(ask):
    first = ask(ANSWER, tools=[LOOK], instructions="Look.")
    count = ask.client.responses.input_tokens.count
    fields = {"model": "scripted", "tools": [LOOK], "instructions": "Look."}
    assert count(input=ASKS, **fields).input_tokens == first.usage.input_tokens
    longer = count(input="And now?", previous_response_id=first.id, **fields).input_tokens
    assert longer > first.usage.total_tokens
    with pytest.raises(Exception, match="does not exist"):
        count(input=ASKS, model="other")


def test_stored_items_are_referred_to(ask):
    """By clients that keep ids instead of items, such as the AI SDK."""
    first = ask(ANSWER, tools=[LOOK])
    asked = {"role": "user", "content": ASKS}
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "sun"}
    names = [{"type": "item_reference", "id": one.id} for one in first.output]
    whole = ask("Sunny.", input=[asked, *first.output, result], tools=[LOOK])
    short = ask("Sunny.", input=[asked, *names, result], tools=[LOOK])
    assert short.usage.input_tokens == whole.usage.input_tokens
    for wrong in ([*names, names[0]], [{**names[0], "id": names[0]["id"] + "0"}]):
        with pytest.raises(Exception, match=r"input\[\d\]\.id: no item") as refused:
            ask("42", input=wrong)
        assert refused.value.code == "item_not_found"


RESULT = {"type": "function_call_output", "call_id": "1", "output": {"a": 1}}
IMAGE = [{"type": "input_image"}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"role": "user", "content": IMAGE}]}, "input[0].content[0].type"),
        ({"input": [{"type": "reasoning", "summary": []}, {"role": "assistant", "content": IMAGE}]},
         "input[1].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_a_0"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": 7}]}, "input[0].id"),
        ({"input": [{"type": "web_search_call", "id": "a"}]}, "input[0].type"),
        ({"input": [{"role": "critic", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "output": ""}]}, "input[0].call_id"),
        ({"input": [RESULT]}, "input[0].output"),
        ({"input": [RESULT | {"output": IMAGE}]}, "input[0].output[0].type"),
        ({"input": [RESULT | {"output": "a"}, {"role": "user", "content": 7}]}, "input[1].content"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "file_search", "vector_store_ids": ["a"]}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [LOOK, {"type": "web_search"}], "tool_choice": {"type": "web_search"}},
         "tool_choice"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}, LOOK, {"type": "function", "name": "a b"}]},
         "tools[2].name"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "b"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"background": True}, "background"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"conversation": "a"}, "conversation"),
        ({"prompt": {"id": "a"}}, "prompt"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": "17 " * 5000}, "input"),
        ({"input": "a" * 10**6}, "input"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(server, fields, param):
    answer = server.post("/v1/responses", json={"input": ASKS, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": ""}, "input must be a string or a list of items, with at least one, got ''"),
        ({"metadata": {"a": 1}}, "metadata: {'a': 1} must have at most 16 keys"),
        ({"metadata": dict.fromkeys("abcdefghijklmnopq", "")}, "must have at most 16 keys"),
        ({"metadata": {"a": "b" * 513}}, "strings of at most 512 characters"),
        ({"metadata": {"a" * 513: "b"}}, "strings of at most 512 characters"),
        ({"previous_response_id": "resp_1"}, "no response of this id is stored: 'resp_1'"),
    ],
)
def test_a_refusal_quotes_the_value(server, fields, message):
    answer = server.post("/v1/responses", json={"input": ASKS, **fields})
    assert message in answer.json()["error"]["message"]


def test_items_that_follow_each_other_are_one_message():
    call = {"type": "function_call", "call_id": "1", "name": "a", "arguments": "{}"}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = {"type": "message", "role": "assistant", "content": "I call."}
    result = {"type": "function_call_output", "call_id": "1", "output": "b"}
    messages, places = messages_of([*items_of("Hi"), thought, said, call, call, result, said, said])
    roles = [one["role"] for one in messages]
    assert roles == ["user", "assistant", "tool", "assistant", "assistant"]
    assert messages[1].keys() == {"role", "reasoning_content", "content", "tool_calls"}
    assert len(messages[1]["tool_calls"]) == 2 and places[2] == "input[5]"
    goal = {"type": "function_call_output", "name": "goal", "namespace": "agent", "output": "a"}
    (found,), _ = messages_of([goal])
    assert found == {"role": "tool", "name": "goal", "content": "a"}
    warnings = Warnings()
    chat_fields({"truncation": "auto", "text": {"verbosity": "low"}}, warnings)
    assert "'text.verbosity', truncation" in warnings.headers()["Warning"]
    with pytest.raises(ApiError, match=r"input\[0\]"):
        messages_of([7])


def test_the_store_has_limits():
    now = [0.0]
    store = ResponseStore(most=2, most_bytes=200, clock=lambda: now[0])

    def add(name, size=1, owner=""):
        store.add(owner, {"id": name, "output": "x" * size}, [])

    for name in "abc":
        add(name)
    assert store.find("", "a") is None and store.find("", "c") is not None
    assert store.find("other", "c") is None and not store.delete("other", "c")
    for _ in range(10):
        add("c")  # counts once
    assert store.find("", "b") is not None
    add("d", 170)
    assert store.find("", "c") is None and store.find("", "d") is not None
    add("e", 500)
    assert store.find("", "e") is None and store.find("", "d") is not None
    now[0] = MAX_AGE_S
    assert store.find("", "d") is None
    add("f")
    assert store.delete("", "f") and not store.delete("", "f")


def test_events_have_names(server):
    server.says("42")
    with httpx.stream("POST", f"{server.url}/v1/responses", json={"input": ASKS, "stream": True},
                      timeout=30) as answer:  # fmt: skip
        lines = [line for line in answer.iter_lines() if line.startswith("event: ")]
    assert lines[0] == "event: response.created" and lines[-1] == "event: response.completed"


DEEP = {"a": functools.reduce(lambda inner, _: [inner], range(900), 0)}


@pytest.mark.parametrize("name", ["input", "tools", "metadata", "text", "user", "tool_choice"])
def test_values_that_are_nested_too_deeply_are_refused(server, name):
    value = {"input": [{"role": "user", "content": "a", **DEEP}], "tools": [{**LOOK, **DEEP}]}
    value["text"] = {"format": {"type": "text", **DEEP}}
    body = {"input": ASKS, "tool_choice": "none", name: value.get(name, DEEP)}
    for stream in (False, True):
        answer = server.post("/v1/responses", json={**body, "stream": stream})
        assert answer.status_code == 400, answer.text


def test_a_response_belongs_to_its_key(tmp_path, one_torch_thread):
    """And a server with --no-store keeps none."""
    (tmp_path / "keys").write_text("a one\nb two\n")
    body = {"input": "a", "max_output_tokens": 1}
    with running_server(settings_of(api_key_file=tmp_path / "keys")) as running:
        of_a, of_b = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        url = f"{running.url}/v1/responses"
        name = httpx.post(url, json=body, headers=of_a, timeout=30).json()["id"]
        for path in (f"/{name}", f"/{name}/input_items"):
            assert httpx.get(url + path, headers=of_a).status_code == 200
            assert httpx.get(url + path, headers=of_b).status_code == 404
        assert httpx.delete(f"{url}/{name}", headers=of_b).status_code == 404
        again = {**body, "previous_response_id": name}
        answers = [httpx.post(url, json=again, headers=key, timeout=30) for key in (of_a, of_b)]
        assert [one.status_code for one in answers] == [200, 400]
    with running_server(settings_of(no_store=True)) as running:
        url = f"{running.url}/v1/responses"
        answer = httpx.post(url, json={**body, "store": True}, timeout=30).json()
        assert answer["store"] is False
        assert httpx.get(f"{url}/{answer['id']}").status_code == 404
        again = httpx.post(url, json={**body, "previous_response_id": answer["id"]})
        assert again.status_code == 400 and "--no-store" in again.text
