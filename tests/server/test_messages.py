"""Messages of a chat: what clients send, as templates want it; and what is refused by name."""

import jsonschema
import pytest
from openai.types.chat import ChatCompletionMessage

from gptmanager.server.errors import ApiError
from gptmanager.server.openai.messages import MESSAGES_SCHEMA, read_messages


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
    for given, arguments in (
        ('{"a": [1]}', {"a": [1]}),
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
    ):
        (read,) = read_messages([assistant(call(given), content=None)])
        assert read == assistant(call(arguments), content="")
    tool = {"role": "tool", "content": "3", "tool_call_id": "c1"}
    assert read_messages([user(), tool]) == [user(), tool]


def test_an_answer_of_the_client_library_can_be_sent_back():
    answer = ChatCompletionMessage(role="assistant", content="Hi", annotations=[], tool_calls=None)
    assert read_messages([answer.model_dump()]) == [{"role": "assistant", "content": "Hi"}]


def test_the_document_tells_what_messages_are():
    is_described = jsonschema.Draft202012Validator(MESSAGES_SCHEMA).is_valid
    taken = [user(), user([{"type": "text", "text": "a"}]), assistant(call("{}"), content=None)]
    assert is_described(taken)
    for one in ([], ["Hi"], [{"content": "Hi"}], [user(5)], [user(["Hi"])], [user(name=5)]):
        assert not is_described(one)


@pytest.mark.parametrize(
    ("messages", "param", "told"),
    [
        (None, "messages", "no list"),
        ([], "messages", "no list"),
        (["Hi"], "messages[0]", "no object"),
        ([user(), {"role": "robot", "content": ""}], "messages[1].role", "'robot' is none of"),
        ([{"content": "Hi"}], "messages[0].role", "None is none of"),
        ([{"role": "user"}], "messages[0].content", "is missing"),
        ([{"role": "assistant", "content": None}], "messages[0].content", "is missing"),
        ([user(5)], "messages[0].content", "5 is neither"),
        ([user(["Hi"])], "messages[0].content[0]", "no part"),
        ([user([{"type": "text"}])], "messages[0].content[0].text", "None is no text"),
        (
            [user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}])],
            "messages[0].content[1].type",
            "reads text only",
        ),
        ([user(name=5)], "messages[0].name", "5 is no text"),
        ([user(contents="x")], "messages[0].contents", "is unknown"),
        ([user(audio={"id": "a"})], "messages[0].audio", "not supported"),
        ([user(tool_calls=[call("{}")])], "messages[0].tool_calls", "role user"),
        ([assistant("add")], "messages[0].tool_calls[0].function", "no object"),
        ([assistant(call("{"))], "messages[0].tool_calls[0].function.arguments", "is no JSON"),
        (
            [assistant(call("[" * 10**5))],
            "messages[0].tool_calls[0].function.arguments",
            "is no JSON",
        ),
        ([assistant(call("[]"))], "messages[0].tool_calls[0].function.arguments", "[] is no"),
        ([assistant(call("{}", name=1))], "messages[0].tool_calls[0].function", "no object"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(messages, param, told):
    with pytest.raises(ApiError) as refused:
        read_messages(messages)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(f"{param}: ") and told in refused.value.message


def test_unknown_keys_may_be_left_out():
    assert read_messages([user(contents="x")], lenient=True) == [user()]
