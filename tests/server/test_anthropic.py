"""/v1/messages: as Anthropic's own client sees it where it is installed, and as plain HTTP."""

import functools
import inspect
import json

import httpx
import pytest
from running_server import running_server, settings_of

from gptmanager.server.anthropic.messages import COUNT_FIELDS, FIELDS
from gptmanager.server.chat.chat_call import fields_renamed
from gptmanager.server.errors import ApiError

ASKS = [{"role": "user", "content": "17 + 25 ="}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORM = {"type": "json_schema", "schema": {**CITY, "additionalProperties": False}}
LOOK = {"name": "look", "description": "looks", "input_schema": CITY}


def look(city: str) -> str:
    """Look at the weather of a city."""
    return f"sunny in {city}"


CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = f"<think>\nI look.\n</think>\n\nI see.\n{CALL}\n{CALL}"
BODY = {"model": "scripted", "max_tokens": 200, "messages": ASKS}


@pytest.fixture(scope="module")
def server(scripted_qwen):
    return scripted_qwen


def ask(server, says, path="/v1/messages", **fields):
    server.says(says)
    return server.post(path, json={**BODY, **fields})


def events_of(server, says, **fields):
    server.says(says)
    body = {**BODY, **fields, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/messages", json=body, timeout=30) as answer:
        lines = [line for line in answer.iter_lines() if line]
    names, data = lines[::2], [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [f"event: {one['type']}" for one in data]
    return data


def plain(message):
    for block in message["content"]:
        block.pop("id", None)
    return message["content"], message["stop_reason"], message["usage"]["output_tokens"]


def test_blocks(server):
    message = ask(server, ANSWER, tools=[LOOK]).json()
    kinds = [block["type"] for block in message["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert message["content"][0]["thinking"] == "I look."
    assert message["content"][3]["input"] == {"city": "Rome"}
    assert message["stop_reason"] == "tool_use" and message["id"].startswith("msg_")
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] > 9


def test_the_input_of_a_call_is_the_json_that_the_model_writes(server):
    tool = {"name": "look", "input_schema": {"type": "object"}}
    answer = ask(server, CALL.replace('"Rome"', str(10**30)), tools=[tool])
    assert '"input":{"city": %d}' % 10**30 in answer.text


def test_an_answer_without_a_text_has_a_block(server):
    message = ask(server, "").json()
    assert (message["content"], message["stop_reason"]) == (
        [{"type": "text", "text": ""}],
        "end_turn",
    )
    kinds = [one["type"] for one in events_of(server, "")]
    assert kinds == [
        *("message_start", "content_block_start", "content_block_stop", "message_delta"),
        "message_stop",
    ]


def test_a_stream_is_the_whole_message(server):
    message = ask(server, ANSWER, tools=[LOOK]).json()
    events = events_of(server, ANSWER, tools=[LOOK])
    assert events[0]["type"] == "message_start" and events[0]["message"]["content"] == []
    assert [one["type"] for one in events[-2:]] == ["message_delta", "message_stop"]
    blocks, texts = [], []
    for one in events[1:-2]:
        if one["type"] == "content_block_start":
            assert one["index"] == len(blocks)
            blocks.append(one["content_block"])
            texts.append("")
        elif one["type"] == "content_block_delta":
            assert one["index"] == len(blocks) - 1
            delta = dict(one["delta"])
            kind = delta.pop("type")
            if kind == "signature_delta":
                continue
            (text,) = delta.values()
            texts[-1] += text
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(text)
        else:
            block[block["type"]] = text
    found = {**events[0]["message"], "content": blocks, **events[-2]["delta"]}
    assert plain({**found, "usage": events[-2]["usage"]}) == plain(message)


THE_TOOL = {"type": "tool", "name": "look"}


@pytest.mark.parametrize(
    ("says", "fields", "reason", "sequence"),
    [
        ("42", {}, "end_turn", None),
        ("42 and more", {"max_tokens": 2}, "max_tokens", None),
        ("42 and more", {"stop_sequences": ["and"]}, "stop_sequence", "and"),
        (CALL, {"tools": [LOOK], "max_tokens": 30}, "max_tokens", None),
        (CALL, {"tools": [LOOK], "tool_choice": {"type": "any"}}, "tool_use", None),
        (CALL, {"tools": [LOOK], "tool_choice": THE_TOOL}, "tool_use", None),
        (CALL, {"tools": [LOOK], "tool_choice": {"type": "none"}}, "end_turn", None),
    ],
)  # fmt: skip
def test_why_an_answer_ends(server, says, fields, reason, sequence):
    message = ask(server, says, **fields).json()
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence), message


def test_blocks_go_back(server):
    message = ask(server, ANSWER, tools=[LOOK]).json()
    uses = [block for block in message["content"] if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": uses[0]["id"], "content": "sunny"},
        {"type": "tool_result", "tool_use_id": uses[1]["id"], "is_error": True,
         "content": [{"type": "text", "text": "no"}]},
        {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
    ]  # fmt: skip
    messages = [*ASKS, {"role": "assistant", "content": message["content"]},
                {"role": "user", "content": results}]  # fmt: skip
    system = [{"type": "text", "text": "Look."}]
    answer = ask(server, "Sunny.", messages=messages, tools=[LOOK], system=system)
    usage = answer.json()["usage"]
    counted = server.post("/v1/messages/count_tokens",
                          json={"messages": messages, "tools": [LOOK], "system": system}
                          )  # fmt: skip
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted.json() == {"input_tokens": total}
    for use in uses:
        use["input"] = {}
    body = {"messages": messages, "tools": [LOOK], "system": system}
    shorter = server.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    assert shorter < total  # the prompt has the arguments of the calls


def test_tokens_are_counted_by_the_body_that_is_sent_next(server):
    counted = server.post("/v1/messages/count_tokens", json={"messages": ASKS}).json()
    body = {**BODY, "stream": True, "temperature": 0.5, "stop_sequences": ["a"], "min_p": 0.1}
    assert server.post("/v1/messages/count_tokens", json=body).json() == counted
    wrong = server.post("/v1/messages/count_tokens", json={**body, "temperature": "hot"})
    assert wrong.status_code == 400 and "temperature" in wrong.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": FORM}},
        {"output_format": FORM},
        {"output_format": FORM, "output_config": {"effort": "low"}},
        {"output_format": {"type": "often"}, "output_config": {"format": FORM}},
    ],
)
def test_structured_answers_and_thinking(server, fields):
    fields = {**fields, "thinking": {"type": "disabled"}}
    answer = ask(server, '{"city": "Rome"}', **fields).json()
    assert json.loads(answer["content"][0]["text"]) == {"city": "Rome"}


USER = {"role": "user", "content": [{"type": "image", "source": {}}]}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "sunny"}
SHORT = {"type": "image_embeds", "image_embeds": "AAAA"}
TEXT = {"type": "text", "text": "Rome"}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [USER]}, "messages[0].content[0].type: 'image' is not supported"),
        ({"messages": [{"role": "user", "content": [RESULT, SHORT]}]},
         "messages[0].content[1].image_embeds: has 3 bytes"),
        ({"messages": [{"role": "user", "content": [TEXT, RESULT, TEXT, RESULT, SHORT]}]},
         "messages[0].content[4].image_embeds: has 3 bytes"),
        ({"messages": [{"role": "user", "content": [{**RESULT, "content": [SHORT]}]}]},
         "messages[0].content[0].content[0].image_embeds: has 3 bytes"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content: 7 must be a string"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: is missing; it must be a string"),
        ({"messages": [{"role": "user", "content": ["a"]}]},
         "messages[0].content[0]: 'a' must be an object such as"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]},
         "tools[0].type: 'bash_20250124' is not supported: pass functions only"),
        ({"tools": [{"type": "function", "function": {"name": "look"}}]},
         "tools[0]: must be an object with the function's name"),
        ({"tools": [{"name": "a", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [LOOK], "tool_choice": {"type": "often"}}, "tool_choice.type"),
        ({"tools": [LOOK], "tool_choice": {"type": []}}, "tool_choice.type: [] must be"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "stop[].function"}},
         "tool_choice.name: 'stop[].function' must be one of the tools"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"system": 7}, "system"),
        ({"best_of": 2}, "best_of"),
        ({"messages": [{"role": "user", "content": "17 " * 5000}]},
         "prompt is too long: This model's maximum context length"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences[0] has 0 characters"),
        ({"output_format": {"type": "often"}}, "output_format.type: 'often' must be 'json_schema'"),
        ({"output_config": {"format": "json"}}, "output_config.format: 'json' must be an object"),
        ({"output_format": {**FORM, "schema": []}}, "output_format.schema"),
        ({"output_config": {"format": {**FORM, "schema": []}}}, "output_config.format.schema"),
    ],
)  # fmt: skip
def test_errors_have_the_shape_of_this_api(server, fields, where):
    answer = ask(server, "42", **fields)
    error = answer.json()
    assert answer.status_code == 400 and error["type"] == "error", error
    assert error["error"]["type"] == "invalid_request_error" and where in error["error"]["message"]
    missing = ask(server, "42", model="other").json()
    assert missing["error"]["type"] == "not_found_error"


def test_an_answer_may_end_with_the_context(server):
    """Clients set `max_tokens`, which is mandatory, to the most of Anthropic's own models."""
    messages = [{"role": "user", "content": "17 " * 1300}]
    long = ask(server, "42 " * 500, messages=messages, max_tokens=64000)
    found = long.json()
    assert found["stop_reason"] == "model_context_window_exceeded", found
    usage = found["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert num_prompt + usage["output_tokens"] == 4096
    assert (
        f"max_tokens = 64000 does not fit and is lowered to {4096 - num_prompt}"
        in (long.headers["Warning"])
    )
    short = ask(server, "42", max_tokens=64000).json()
    assert short["stop_reason"] == "end_turn"
    assert "Warning" not in ask(server, "42", max_tokens=99).headers


def test_a_thread_is_refused_in_the_words_after_which_clients_go_on_without(server):
    refused = ask(server, "42", thread={"type": "create"})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert refused.status_code == 400 and refused.json()["error"]["details"] == details
    assert ask(server, "42", thread=None).status_code == 200


def test_fields_for_bills_and_speed_change_no_answer(server):
    fields = {
        "speed": "fast",
        "billing_policy": {"type": "billing_policy", "bill_to": "self"},
        "fallbacks": [],
        "fallback_credit_token": None,
    }
    answer = ask(server, "42", **fields)
    assert answer.status_code == 200 and "Warning" not in answer.headers
    told = ask(server, "42", diagnostics={"previous_message_id": "msg_1"}).headers["Warning"]
    assert "no effect here: diagnostics" in told


def test_the_key_may_be_in_the_header_of_this_api(one_torch_thread):
    with running_server(settings_of(api_key="secret")) as running:
        url = f"{running.url}/v1/messages/count_tokens"
        for headers, status in (({"x-api-key": "secret"}, 200), ({"x-api-key": "no"}, 401)):
            answer = httpx.post(url, json={"messages": ASKS}, headers=headers)
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"


def test_every_parameter_of_the_client_is_known():
    pytest.importorskip("anthropic", reason="needs anthropic, of the extra test-clients")
    from anthropic.resources import Messages
    from anthropic.resources.beta.messages import Messages as BetaMessages

    own = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    for cls in (Messages, BetaMessages):
        for fields, method in ((FIELDS, cls.create), (COUNT_FIELDS, cls.count_tokens)):
            assert {*inspect.signature(method).parameters} - own <= {*fields}


def test_the_client_itself(server):
    anthropic = pytest.importorskip(
        "anthropic", reason="needs anthropic, of the extra test-clients"
    )
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        server.says(ANSWER)
        message = client.messages.create(**BODY, tools=[LOOK])
        server.says(ANSWER)
        with client.messages.stream(**BODY, tools=[LOOK]) as stream:
            kinds = {event.type for event in stream}
            found = stream.get_final_message()
        assert {"thinking", "text", "input_json", "message_stop"} <= kinds
        assert plain(found.model_dump()) == plain(message.model_dump())
        again = [*ASKS, {"role": "assistant", "content": found.content}]
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
                   for block in found.content if block.type == "tool_use"]  # fmt: skip
        again.append({"role": "user", "content": results})
        assert (
            client.messages.count_tokens(
                model="scripted", messages=again, tools=[LOOK]
            ).input_tokens
            > 50
        )
        server.says(CALL, "Sunny.")
        runner = client.beta.messages.tool_runner(**BODY, tools=[anthropic.beta_tool(look)])
        assert runner.until_done().content[0].text == "Sunny."
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            client.messages.create(
                **{**BODY, "messages": [{"role": "user", "content": "17 " * 5000}]}
            )
        (model,) = client.models.list()
        assert (model.type, model.display_name, model.id) == ("model", "scripted", "scripted")
        server.says("Sunny.")
        last = client.messages.create(model="scripted", max_tokens=99, messages=again)
        assert last.content[0].text == "Sunny." and last.stop_reason == "end_turn"
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            client.messages.create(**{**BODY, "max_tokens": 0})


def test_a_stream_that_fails_says_so_in_the_shape_of_this_api(server):
    events = events_of(server, "42 " * 9, deadline_s=1e-9)
    assert [one["type"] for one in events][-1:] == ["error"], events
    assert events[-1]["error"]["type"] == "timeout_error"


def test_input_that_is_nested_too_deeply_is_refused(server):
    deep = functools.reduce(lambda inner, _: [inner], range(900), 0)
    use = {"type": "tool_use", "id": "1", "name": "a", "input": {"a": deep}}
    messages = [*ASKS, {"role": "assistant", "content": [use]}]
    for field in ({"messages": messages}, {"thinking": {"type": deep}}, {"system": deep},
                  {"tools": [{**LOOK, "input_schema": {"a": deep}}]}):  # fmt: skip
        assert ask(server, "42", **field).status_code in (200, 400)


@pytest.mark.parametrize(
    ("text", "renamed"),
    [
        ("messages[1].content[0] and messages[1].content[1]", "messages[0].content[3] and"),
        ("messages[1].content[7]", "messages[0].content[7]"),
    ],
)
def test_an_error_of_a_template_may_name_what_is_not_there(text, renamed):
    with pytest.raises(ApiError) as refused, fields_renamed((), {1: ("messages[0]", [3])}):
        raise ApiError(400, text)
    assert refused.value.message.startswith(renamed)
