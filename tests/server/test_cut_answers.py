"""An answer with a thought, a text and calls, cut anywhere: each protocol's stream is the whole."""

import itertools
import json

import orjson
import pytest
from tool_answers import MADE, TOOLS, TWO

from gptmanager.callbacks.answers.parsing.thought_tags import ThoughtTags
from gptmanager.server.anthropic.message_writer import MessageWriter
from gptmanager.server.chat.chat_answer import ChatAnswer
from gptmanager.server.chat.content_tokens import ContentTokens
from gptmanager.server.openai.response_writer import ResponseWriter
from gptmanager.server.text.log_probs import TokenLogProb

USAGE = {
    "prompt_tokens": 1,
    "completion_tokens": 2,
    "total_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
THOUGHT = "I look <tool_call> up."


def answer_of(name):
    """A parser of an answer, and the answer's text."""
    parser = MADE[name].parser(TOOLS)
    if name == "harmony":
        head = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
        return ChatAnswer(parser, new_id=map(str, itertools.count()).__next__), head + TWO[name]
    text = f"<think>\n{THOUGHT}\n</think>\n\n{TWO[name]}"
    return ChatAnswer(ThoughtTags(parser), new_id=map(str, itertools.count()).__next__), text


def deltas_of(answer, pieces):
    """The deltas of a chat, and then the reason of its end."""
    found = [delta for piece in pieces for delta in answer.push(piece)]
    return [*found, *answer.flush()], answer.finish_reason("stop")


def written(writer, deltas, reason):
    """The events of a writer: each as a client gets it, in JSON."""
    events = map(json.dumps, writer.begin())
    rest = (json.dumps(event) for delta in deltas for event in writer.add(delta))
    return [
        json.loads(event) for event in (*events, *rest, *map(json.dumps, writer.end(reason, None)))
    ]


def chat(answer, pieces):
    deltas, reason = deltas_of(answer, pieces)
    thought = "".join(delta.get("reasoning", "") for delta in deltas)
    content = "".join(delta.get("content", "") for delta in deltas)
    calls = []
    for call in (one for delta in deltas for one in delta.get("tool_calls", ())):
        if "id" in call:
            calls.append({"id": call["id"], **call["function"]})
        else:
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    message = answer.message()
    whole = [{"id": one["id"], **one["function"]} for one in message["tool_calls"]]
    assert (message["reasoning"], message["content"] or "", whole) == (thought, content, calls)
    return thought, content, calls, reason


def responses(answer, pieces):
    writer = ResponseWriter("resp_1", {}, lambda: USAGE)
    items = []
    for event in written(writer, *deltas_of(answer, pieces)):
        kind, index = event["type"].removeprefix("response."), event.get("output_index")
        if kind == "output_item.added":
            assert index == len(items)
            items.append(event["item"])
        elif kind == "content_part.added":
            items[index]["content"] = [event["part"]]
        elif kind == "function_call_arguments.delta":
            items[index]["arguments"] += event["delta"]
        elif kind.endswith("text.delta"):
            items[index]["content"][0]["text"] += event["delta"]
        elif kind == "output_item.done":
            assert event["item"] == {**items[index], "status": "completed"}
            items[index] = event["item"]
    assert event["type"] == "response.completed" and event["response"]["output"] == items
    return items


def messages(answer, pieces):
    writer = MessageWriter("msg_1", "model", lambda: USAGE)
    blocks, texts = [], []
    for event in written(writer, *deltas_of(answer, pieces)):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            kind = event["delta"]["type"].removesuffix("_delta")
            texts[-1] += event["delta"].get({"input_json": "partial_json"}.get(kind, kind), "")
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
        else:
            block[block["type"]] = text
    whole = orjson.loads(orjson.dumps(writer.whole()))
    assert whole["content"] == blocks
    return blocks, whole["stop_reason"]


@pytest.mark.parametrize("protocol", [chat, responses, messages])
@pytest.mark.parametrize("name", MADE)
def test_a_stream_cut_at_every_letter_is_the_whole(name, protocol):
    answer, text = answer_of(name)
    whole = protocol(answer, [text])
    assert THOUGHT in json.dumps(whole) and "Rome" in json.dumps(whole)
    step = 1 if protocol is chat else 4
    cuts = [[text[:at], text[at:]] for at in range(1, len(text), step)]
    for pieces in (list(text), *cuts):
        assert protocol(answer_of(name)[0], pieces) == whole, pieces[0]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", MADE)
def test_log_probabilities_of_content_are_those_of_its_letters(name, size):
    answer, text = answer_of(name)
    listed = [TokenLogProb(token, -1.0, (), token) for token in range(len(text))]
    deltas = [
        delta
        for at in range(0, len(text), size)
        for delta in answer.push(text[at : at + size], listed[at : at + size])
    ]
    for delta in (*deltas, *answer.flush()):
        tokens = delta.get("log_probs", ())
        assert "".join(text[one.token] for one in tokens) == delta.get("content", "")


def test_a_token_of_several_letters_is_with_the_first_text_that_it_is_in():
    tokens = ContentTokens()
    tokens.push([TokenLogProb(0, 0.0, (), start) for start in (0, 3, 3, 5, 9)])
    assert [one.start for one in tokens.take(4, 6)] == [3, 5]
    assert tokens.take(6, 9) == [] and [one.start for one in tokens.take(10, 12)] == [9]
    assert ContentTokens().take(0, 5) == []
