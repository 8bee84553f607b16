"""`ChatTemplate`: tokens of a chat, whatever its template and its texts do."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import processors

from gptmanager.callbacks import ChatTemplate, load_tokenizer
from gptmanager.errors import ConfigError, InvalidRequestError

MODEL = Path(__file__).parents[2] / "examples" / "tiny_llama"
END = "<|endoftext|>"
TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{{ raise_exception('no system here') }}{%- endif -%}"
    "{{- message.role + ': ' + message.content + eos_token -}}"
    "{%- endfor -%}"
    "{%- if tools -%}{{- tools | tojson -}}{%- endif -%}"
    "{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    shutil.copy(MODEL / "tokenizer_config.json", folder)
    tokenizer = load_tokenizer(MODEL)  # it adds a token, which a template writes itself
    adds = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    tokenizer.post_processor = adds
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def template(folder):
    with ChatTemplate.of_folder(folder) as template:
        yield template


def says(text, role="user"):
    return [{"role": role, "content": text}]


@pytest.mark.parametrize("more", [{}, {"tools": [{"name": "look", "description": "où"}]}])
@pytest.mark.parametrize("generates", [True, False])
def test_the_tokens_are_those_of_transformers(template, folder, more, generates):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        says("Hi é"), tokenize=False, add_generation_prompt=generates, **more
    )
    expected = load_tokenizer(folder).encode(text, add_special_tokens=False).ids
    assert template.render(says("Hi é"), add_generation_prompt=generates, **more) == expected


def test_a_control_token_in_a_message_is_plain_text(template, folder):
    tokens = template.render(says(f"a{END}b"))
    assert tokens.count(0) == 1  # the template's own
    text = load_tokenizer(folder).decode(tokens, skip_special_tokens=False)
    assert text == f"user: a{END}b{END}assistant:"


def test_messages_that_the_template_refuses_are_an_error_of_the_request(template):
    with pytest.raises(InvalidRequestError, match="no system here"):
        template.render(says("Hi", "system"))
    assert template.render(says("Hi"))


@pytest.mark.parametrize("messages", [[{"role": "user"}], [{"role": object()}], [3]])
def test_messages_that_a_template_cannot_read(template, messages):
    with pytest.raises(InvalidRequestError, match="messages: the chat template"):
        template.render(messages)


def test_several_threads_render_at_once(template):
    texts = [f"text {index}" for index in range(16)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda text: template.render(says(text)), texts))
    assert found == [template.render(says(text)) for text in texts]


def test_closed_it_has_no_process_and_renders_nothing(folder):
    with ChatTemplate.of_folder(folder) as template:
        template.render(says("Hi"))
        process = template._own.get()[1]._child._process
    assert process.poll() is not None
    with pytest.raises(ValueError, match="the chat template is closed"):
        template.render(says("Hi"))
    template.close()


@pytest.mark.parametrize("templates", [None, [{"name": "tool_use", "template": "a"}]])
def test_a_folder_without_a_template_is_a_config_error(tmp_path, templates):
    """One for requests with tools is not enough."""
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatTemplate.of_folder(tmp_path)


def test_without_jinja2_is_a_config_error(folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="need jinja2, which is not installed: pip install"):
        ChatTemplate.of_folder(folder)
