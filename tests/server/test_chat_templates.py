"""Chat templates: texts as transformers makes them, from any file of a checkpoint, bounded."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from bounded import bounded
from running_server import settings_of
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from gptmanager.callbacks.text.template_process import (
    TemplateProcess,
    pick,
    read_chat_templates,
    read_template_file,
)
from gptmanager.callbacks.text.template_rendering import TemplateError, fill_in
from gptmanager.errors import ConfigError
from gptmanager.lifecycle.child_process import NotStartedError
from gptmanager.server.chat.chat_prompt import ChatPrompts
from gptmanager.server.chat.tools import read_tools
from gptmanager.server.errors import ApiError
from gptmanager.server.http.warning_header import Warnings

FOLDER = Path(__file__).parent / "chat_templates"
TEMPLATES = {path.stem: path.read_text() for path in FOLDER.glob("*.jinja")}
SPECIAL = {"bos_token": "<|begin|>", "eos_token": "</s>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather of a place, "now"',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["°C", "°F"]}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "unit": "°C"}},
}


def says(role, content, **more):
    return {"role": role, "content": content, **more}


SHORT = [says("user", "  Hi <b>there</b> & 'all' \n")]
LONG = [
    says("system", "Be brief."),
    says("user", "One?"),
    says("assistant", "<think>\nhm\n</think>\n\n Two. "),
    says("user", "日本 three?"),
]
WITH_CALL = [
    says("user", "Weather?"),
    says("assistant", "", tool_calls=[CALL]),
    says("tool", "12 degrees", tool_call_id="call00001", name="get_weather"),
    says("assistant", "It is cold."),
    says("user", "Thanks"),
]
TWO_CALLS = [says("user", "Weather?"), says("assistant", "I look.", tool_calls=[CALL, CALL])]
CONVERSATIONS = {
    "short": SHORT,
    "long": LONG,
    "with call": WITH_CALL,
    "two calls": TWO_CALLS,
    "two users": [*SHORT, *SHORT],
    "developer": [says("developer", "Be brief."), *SHORT],
}


def of_transformers(template, messages, **variables):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)
    try:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, **variables
        )
    except Exception as error:  # jinja2's, and Python's
        return f"refused: {error}"


def ours(template, messages, **variables):
    given = {"tools": None, "documents": None, "add_generation_prompt": False, **variables}
    continues = given.pop("continue_final_message", False)
    try:
        return fill_in(template, messages, {**SPECIAL, **given}, continue_final_message=continues)
    except TemplateError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_texts_are_those_of_transformers(name, conversation):
    template, messages = TEMPLATES[name], CONVERSATIONS[conversation]
    for tools in (None, [WEATHER], [WEATHER, WEATHER]):
        for add_generation_prompt in (False, True):
            variables = {"tools": tools, "add_generation_prompt": add_generation_prompt}
            for more in ({}, {"enable_thinking": False, "date_string": "1 Jan 2030"}):
                expected = of_transformers(template, messages, **variables, **more)
                assert ours(template, messages, **variables, **more) == expected


@pytest.mark.parametrize("name", ["llama3", "qwen", "gemma"])
@pytest.mark.parametrize("last", ["It is", "It is ", "  It is\n\n"])
def test_a_continued_message_is_that_of_transformers(name, last):
    messages = [*SHORT, says("assistant", last)]
    expected = of_transformers(TEMPLATES[name], messages, continue_final_message=True)
    assert ours(TEMPLATES[name], messages, continue_final_message=True) == expected
    assert expected.rstrip().endswith("It is")


def test_a_message_that_the_template_leaves_out_cannot_be_continued():
    with pytest.raises(TemplateError, match="does not write the last message"):
        messages = [*SHORT, says("user", "x")]
        fill_in("{{ messages[0].content }}", messages, {}, continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Only cats!') }}", "Only cats!"),
        ("\n\n{% if %}", "line 3: Expected an expression"),
        ("{{ messages.nothing.at_all }}", "has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_errors_of_templates_are_reported(template, message):
    with pytest.raises(TemplateError, match=message):
        fill_in(template, SHORT, {})


# Where a checkpoint keeps them


def test_templates_are_found_where_transformers_finds_them(tmp_path):
    assert read_chat_templates(tmp_path) == {}
    processor = tmp_path / "chat_template.json"
    processor.write_text(json.dumps({"chat_template": "of the processor"}))
    assert read_chat_templates(tmp_path) == {"default": "of the processor"}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"model_max_length": 512}))
    assert read_chat_templates(tmp_path) == {"default": "of the processor"}
    config.write_text(json.dumps({"chat_template": "a text"}))
    assert read_chat_templates(tmp_path) == {"default": "a text"}
    listed = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    config.write_text(json.dumps({"chat_template": listed}))
    named = read_chat_templates(tmp_path)
    assert (pick(named, False), pick(named, True)) == ("plain", "tools")
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert read_chat_templates(tmp_path) == {"default": "own file"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("own tools")
    named = read_chat_templates(tmp_path)
    assert (pick(named, False), pick(named, True)) == ("own file", "own tools")
    assert pick({}, True) is None and pick({"default": "a"}, True) == "a"


def test_template_files_that_cannot_be_read_are_named(tmp_path):
    config = tmp_path / "tokenizer_config.json"
    for text in ("{", '{"chat_template": [{"name": "x"}]}', '{"chat_template": 5}'):
        config.write_text(text)
        with pytest.raises(ConfigError, match="tokenizer_config.json"):
            read_chat_templates(tmp_path)
    with pytest.raises(ConfigError, match="nowhere.jinja"):
        read_template_file(tmp_path / "nowhere.jinja")
    (tmp_path / "own.jinja").write_text("é")
    assert read_template_file(tmp_path / "own.jinja") == {"default": "é"}


def test_template_files_that_are_too_large_or_too_deep_are_refused(tmp_path):
    processor = tmp_path / "chat_template.json"
    for text in ("[" * 100_000, '{"a":' * 10_000 + "1" + "}" * 10_000):
        processor.write_text(text)
        with pytest.raises(ConfigError, match=r"chat_template.json: .* nested deeper than 64"):
            read_chat_templates(tmp_path)
    own = tmp_path / "chat_template.jinja"
    with own.open("wb") as file:
        file.truncate(1 << 36)  # a file without content, which takes no space
    for read in (lambda: read_chat_templates(tmp_path), lambda: read_template_file(own)):
        with bounded(), pytest.raises(ConfigError, match="jinja: .* has more than 16777216 char"):
            read()


# The process


@pytest.fixture(scope="module")
def process():
    process = TemplateProcess(max_seconds=0.6, max_bytes=1 << 27)
    yield process
    process.close()


def test_the_process_answers_as_the_function(process):
    async def both():
        texts = await asyncio.gather(
            *(process.fill_in(TEMPLATES["gemma"], SHORT, {"bos_token": str(i)}) for i in range(20))
        )
        assert texts == [
            fill_in(TEMPLATES["gemma"], SHORT, {"bos_token": str(i)}) for i in range(20)
        ]
        large = [says("user", "é" * 400_000)]
        assert len(await process.fill_in("{{ messages[0].content }}", large, {})) == 400_000
        with pytest.raises(TemplateError, match="Only cats"):
            await process.fill_in("{{ raise_exception('Only cats!') }}", SHORT, {})

    asyncio.run(both())


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "0.6 s"),
        ("{{ 'x' * 10**10 }}", "too much memory"),
        ("{{ '%999999999d' % 1 }}", "too much memory"),
    ],
)
def test_a_template_is_bounded_and_the_next_request_does_not_notice(process, template, message):
    async def both():
        with pytest.raises(TemplateError, match=message):
            await process.fill_in(template, SHORT, {})
        assert await process.fill_in("{{ messages[0].role }}", SHORT, {}) == "user"

    asyncio.run(both())


def test_a_stopped_process_does_not_hang_the_chats(process):
    """Also with a prompt that is longer than the buffer of a pipe."""
    large = [says("user", "x" * 400_000)]

    async def both():
        for messages in (SHORT, large):
            assert await process.fill_in("{{ messages[0].role }}", SHORT, {}) == "user"
            os.kill(process._child._process.pid, signal.SIGSTOP)
            with pytest.raises(TemplateError, match=r"it takes more than 0\.6 s"):
                await process.fill_in("{{ messages[0].role }}", messages, {})

    asyncio.run(both())


@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_without_a_process_a_chat_may_be_sent_again(engine, monkeypatch, tools):
    def ask(self, given):
        raise NotStartedError("no process can be started")

    monkeypatch.setattr(TemplateProcess, "ask", ask)
    prompts = ChatPrompts(engine, settings_of(chat_template=FOLDER / "qwen.jinja"))
    with pytest.raises(ApiError, match="no process can be started") as refused:
        asyncio.run(prompts.read({"messages": SHORT}, read_tools(tools, None), Warnings()))
    assert (refused.value.status, refused.value.code) == (503, "no_process")
