"""Messages of a chat: what clients send, as templates want it; and what is refused by name."""

import jsonschema
import orjson
import pytest
from fuzz import FUZZ
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage

from gptmanager.server.chat.messages import (
    MESSAGES_SCHEMA,
    ROLES,
    one_call_each,
    read_messages,
)
from gptmanager.server.errors import ApiError

ROLE = st.sampled_from(ROLES)
KEYS = st.sampled_from(
    [
        *("content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "reasoning"),
        *("function", "arguments", "type", "text", "id", "odd"),
    ]
)


def user(content="Hi", **more):
    return {"role": "user", "content": content, **more}


def assistant(*calls, **more):
    return {"role": "assistant", "tool_calls": list(calls), **more}


def call(arguments, name="add", **more):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_contents_become_texts():
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]
    assert read_messages([user(), user(parts), user([])]) == [user(), user("One\ntwo"), user("")]
    assert read_messages([user(name="Ann", tool_calls=None)]) == [user(name="Ann")]


def test_arguments_of_calls_become_objects():
    for sent, arguments in (
        ('{"a": [1]}', {"a": [1]}),
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
    ):
        (read,) = read_messages([assistant(call(sent), content=None)])
        assert read == assistant(call(arguments), content="")
    tool = {"role": "tool", "content": "3", "tool_call_id": "c1"}
    assert read_messages([user(), tool]) == [user(), tool]


@pytest.mark.parametrize(
    "text",
    ["{", '{"city": "Ro', "[1]", "5", "[" * 10**5, '{"a": NaN}', '{"a": "\\ud800"}',
     f'{{"a": {10**30}}}', '{"a": ' + "[" * 300 + "]" * 300 + "}", "9" * 5000],
)  # fmt: skip
def test_arguments_that_are_not_an_object_stay_texts(text):
    """A call that was cut off, or that a model got wrong, must not make later turns a 400."""
    (read,) = read_messages([assistant(call(text))])
    assert read["tool_calls"][0]["function"] == {"name": "add", "arguments": text}
    orjson.dumps(read)  # so it reaches the template's process


def test_a_content_may_be_null_where_a_model_or_a_tool_said_nothing():
    for role in ("assistant", "tool"):
        for message in ({"role": role}, {"role": role, "content": None}):
            assert read_messages([message]) == [{"role": role, "content": ""}]
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    assert read_messages([refused]) == [{"role": "assistant", "content": "No."}]


def test_keys_that_other_servers_and_clients_add_are_ignored():
    odd = {
        "parsed": {"a": 1},
        "thinking_blocks": [{"type": "thinking", "thinking": "Hm."}],
        "provider_specific_fields": {"a": None},
        "reasoning_details": [{"type": "reasoning.text"}],
        "cache_control": {"type": "ephemeral"},
        "id": "m1",
        "type": "text",
        "opts": {},
        "audio": {"id": "a1"},
        "annotations": [{"type": "url_citation"}],
        "reasoning": {"effort": "low"},
        "x" * 1000: None,
    }
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}, "id": 1}
    assert read_messages([{**odd, **user()}]) == [user()] == read_messages([user([part])])
    one = {**call("{}"), "index": 0, "provider_specific_fields": {}, "extra_content": {}}
    one["function"]["parsed_arguments"] = {}
    assert read_messages([{**odd, **assistant(one)}]) == [assistant(call({}), content="")]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "text", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=30 * FUZZ)
@given(st.lists(st.dictionaries(KEYS | st.just("role"), JSON, max_size=6), max_size=3), ROLE)
def test_whatever_a_message_holds_is_read_or_refused_by_name(messages, role):
    sent = [{"role": role, **message} for message in messages]
    try:
        read = read_messages(sent)
    except ApiError as error:
        assert error.status == 400 and error.param.startswith("messages")
        return
    assert len(read) == len(sent)
    for one in read:
        assert isinstance(one["content"], str) and one["role"] in ROLES
        assert one.keys() <= {
            *("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"),
        }  # fmt: skip
    orjson.dumps(one_call_each(read))


@settings(max_examples=20 * FUZZ)
@given(st.dictionaries(st.text(max_size=9), JSON, max_size=4))
def test_no_unknown_key_changes_what_is_read(odd):
    known = {"role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal"}
    odd = {key: value for key, value in odd.items() if key not in known | {"reasoning_content"}}
    odd.pop("reasoning", None)
    messages = [user(), assistant(call("{}"), content=None), {"role": "tool", "content": "x"}]
    assert read_messages([{**odd, **one} for one in messages]) == read_messages(messages)


def test_parts_of_an_assistant():
    parts = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "output_text", "text": "One"},
        {"type": "refusal", "refusal": "No."},
    ]
    (read,) = read_messages([{"role": "assistant", "content": parts, "reasoning": "Hm."}])
    assert read == {"role": "assistant", "content": "One\nNo.", "reasoning_content": "Hm."}


def test_deprecated_calls_become_calls_of_tools():
    messages = [
        {"role": "assistant", "content": None,
         "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "add", "content": "3"},
    ]  # fmt: skip
    asked, answered = read_messages(messages)
    (one,) = asked["tool_calls"]
    assert one["function"] == {"name": "add", "arguments": {"a": 1}}
    assert answered == {
        "role": "tool", "content": "3", "name": "add", "tool_call_id": one["id"],
    }  # fmt: skip


def test_messages_with_one_call_each():
    calls = [{**call({}), "id": name} for name in "abc"]
    results = [{"role": "tool", "content": name, "tool_call_id": name} for name in "bxa"]
    messages = [user(), assistant(*calls, content="I look."), *results, user()]
    found = one_call_each(messages)
    assert found == [
        user(),
        assistant(calls[0], content="I look."),
        results[2],
        assistant(calls[1], content=""),
        results[0],
        assistant(calls[2], content=""),
        results[1],
        user(),
    ]
    assert one_call_each(found) == found


def test_an_answer_of_the_client_library_can_be_sent_back():
    answer = ChatCompletionMessage(role="assistant", content="Hi", annotations=[], tool_calls=None)
    assert read_messages([answer.model_dump()]) == [{"role": "assistant", "content": "Hi"}]


def test_the_document_describes_messages():
    is_described = jsonschema.Draft202012Validator(MESSAGES_SCHEMA).is_valid
    taken = [user(), user([{"type": "text", "text": "a"}]), assistant(call("{}"), content=None)]
    assert is_described(taken)
    for one in ([], ["Hi"], [{"content": "Hi"}], [user(5)], [user(["Hi"])], [user(name=5)]):
        assert not is_described(one)


@pytest.mark.parametrize(
    ("messages", "param", "told"),
    [
        (None, "messages", "must be a list"),
        ([], "messages", "must be a list"),
        (["Hi"], "messages[0]", "must be an object"),
        ([user(), {"role": "robot", "content": ""}], "messages[1].role", "'robot' must be one of"),
        ([{"content": "Hi"}], "messages[0].role", "is missing; it must be one of"),
        ([{"role": None, "content": "Hi"}], "messages[0].role", "is missing; it must be one of"),
        ([{"role": "user"}], "messages[0].content", "is missing"),
        ([user(None)], "messages[0].content", "is missing"),
        ([{"role": "system", "content": None}], "messages[0].content", "is missing"),
        ([user(5)], "messages[0].content", "5 must be a string or"),
        ([user(["Hi"])], "messages[0].content[0]", "'Hi' must be an object"),
        ([user([{"text": "Hi"}])], "messages[0].content[0].type", "is missing: the model reads"),
        ([user([{"type": "text"}])], "messages[0].content[0].text", "is missing; it must be a"),
        (
            [user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}])],
            "messages[0].content[1].type",
            "the model reads text, and",
        ),
        ([user(name=5)], "messages[0].name", "5 must be a string"),
        (
            [user([{"type": "thinking"}])],
            "messages[0].content[0].type",
            "the model reads text, and",
        ),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "text": "No."}]}],
            "messages[0].content[0].refusal",
            "is missing; it must be a string",
        ),
        ([user(tool_calls=[call("{}")])], "messages[0].tool_calls", "role user"),
        ([assistant("add")], "messages[0].tool_calls[0].function", "must be an object"),
        (
            [assistant(call([]))],
            "messages[0].tool_calls[0].function.arguments",
            "[] must be an object",
        ),
        (
            [assistant(call(5))],
            "messages[0].tool_calls[0].function.arguments",
            "5 must be an object",
        ),
        (
            [{"role": "assistant", "tool_calls": {}, "function_call": "f"}],
            "messages[0].function_call",
            "must be an object",
        ),
        ([{"role": "assistant", "tool_calls": "f"}], "messages[0].tool_calls", "must be a list"),
        (
            [assistant(call("{}", name=1))],
            "messages[0].tool_calls[0].function",
            "must be an object",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_place(messages, param, told):
    with pytest.raises(ApiError) as refused:
        read_messages(messages)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(f"{param}: ") and told in refused.value.message
