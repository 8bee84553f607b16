"""Answers of a chat: deltas that, joined as clients join them, are the whole message."""

import pytest

from gptmanager.callbacks.answers.tool_formats.hermes import HermesParser
from gptmanager.server.chat.chat_answer import ChatAnswer

TEXT = (
    "I look.\n<tool_call>\n"
    '{"name": "add", "arguments": {"a": "}é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)


def answer_of(**options):
    return ChatAnswer(HermesParser({"add", "stop"}), **options)


def joined(deltas):
    """Return the content and the calls of deltas, joined as a client joins them."""
    content, calls = "", []
    for delta in deltas:
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call.pop("index") == len(calls)
                calls.append({**call, "function": dict(call["function"])})
            else:
                assert call.keys() == {"index", "function"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return content, calls


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_deltas_joined_are_the_message(size):
    answer = answer_of()
    pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
    deltas = [delta for piece in pieces for delta in answer.push(piece)] + answer.flush()
    message = answer.message()
    assert joined(deltas) == (message["content"], message["tool_calls"])
    assert message["content"] == "I look." and message["role"] == "assistant"
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [
        {"name": "add", "arguments": '{"a": "}é"}'},
        {"name": "stop", "arguments": "{}"},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert [answer.finish_reason(reason) for reason in ("stop", "length")] == [
        "tool_calls",
        "length",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": "St', "stop"),
        (f'{TEXT}\n<tool_call>\n{{"name": "add", "arguments": {{"a"', "stop"),
        ('<tool_call>\n{"name": "ad', "stop"),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}', "tool_calls"),
        (TEXT, "tool_calls"),
    ],
)
def test_a_call_that_was_cut_off_does_not_finish_as_tool_calls(text, reason):
    answer = answer_of()
    answer.push(text)
    answer.flush()
    assert answer.finish_reason("stop") == reason
    assert answer.finish_reason("length") == "length"


def test_a_call_that_is_left_out_does_not_count_as_cut_off():
    answer = answer_of(is_alone=True)
    answer.push(f'{TEXT}\n<tool_call>\n{{"name": "add", "arguments": {{"a"')
    answer.flush()
    assert answer.finish_reason("stop") == "tool_calls"


def test_one_call_where_one_is_wanted():
    answer = answer_of(is_alone=True)
    answer.push(TEXT)
    answer.flush()
    assert [call["function"]["name"] for call in answer.message()["tool_calls"]] == ["add"]


def test_without_tools_all_is_content():
    answer = ChatAnswer()
    assert answer.push("") == [] and answer.push(TEXT) == [{"content": TEXT}]
    assert answer.flush() == [] and answer.finish_reason("stop") == "stop"
    assert answer.message() == {"role": "assistant", "content": TEXT, "refusal": None}


def test_a_message_of_calls_alone_has_no_content():
    answer = answer_of()
    answer.push(TEXT.removeprefix("I look.\n"))
    assert answer.message()["content"] is None
