"""Control tokens in texts of clients: tokens by default, plain text with the option."""

from dataclasses import replace

import httpx
import pytest
from running_server import MODEL, running_server, settings_of
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel

from gptmanager.callbacks import load_tokenizer
from gptmanager.callbacks.text.control_tokens import ControlTokens
from gptmanager.callbacks.text.text_encoder import TextEncoder
from gptmanager.server.chat.chat_prompt import ChatPrompts
from gptmanager.server.http.warning_header import Warnings

END, PAD = "<|endoftext|>", "<|pad|>"
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- message.role + ': ' + (message.content | trim) + '<|endoftext|>' -}}"
    "{%- endfor -%}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODEL)


@pytest.fixture(scope="module")
def tokens_of(tmp_path_factory):
    """The tokens of prompts and chats, by a server with the option."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    settings = settings_of(no_special_tokens_in_text=True, chat_template=template)
    with running_server(settings) as server:

        def ask(**body):
            answer = httpx.post(f"{server.url}/tokenize", json=body, timeout=30)
            assert answer.status_code == 200, answer.text
            return answer.json()["tokens"]

        yield ask


def says(*texts):
    return [{"role": "user", "content": text} for text in texts]


def test_by_default_the_text_of_a_control_token_is_the_token(client):
    found = client.post("/tokenize", json={"prompt": f"a{END}"}).json()["tokens"]
    assert found[-1] == 0


def test_a_prompt_has_none(tokens_of, tokenizer):
    tokens = tokens_of(prompt=f"a{END}b{PAD}")
    assert not {0, 1} & set(tokens)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == f"a{END}b{PAD}"


def test_a_chat_has_those_of_its_template(tokens_of, tokenizer):
    chat = says("Hi", "there")
    text = f"user: Hi{END}user: there{END}"
    assert tokens_of(messages=chat) == tokenizer.encode(text).ids


@pytest.mark.parametrize(
    "texts", [[f"a{END}b"], [END], [f"{PAD}{END}", "x"], ["<|endof", "text|>"], ["<|", "<"]]
)
def test_and_no_others(tokens_of, tokenizer, texts):
    tokens = tokens_of(messages=says(*texts))
    assert [token for token in tokens if token < 2] == [0] * len(texts)
    text = "".join(f"user: {one}{END}" for one in texts)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text


@pytest.mark.parametrize("is_sequence", [False, True])
def test_the_tokens_that_a_tokenizer_adds_surround_the_whole_chat(server, monkeypatch, is_sequence):
    """The chat begins with a control token, and is encoded in pieces."""
    tokenizer = load_tokenizer(MODEL)
    ids = [(END, 0), (PAD, 1)]
    adds = processors.TemplateProcessing(single=f"{PAD} {PAD} $A {END}", special_tokens=ids)
    byte_level = processors.ByteLevel(trim_offsets=False)
    tokenizer.post_processor = processors.Sequence([byte_level, adds]) if is_sequence else adds
    monkeypatch.setattr(server.engine, "card", replace(server.engine.card, tokenizer=tokenizer))
    monkeypatch.setattr(server.engine, "_encoder", TextEncoder(tokenizer, special_in_text=False))
    settings = replace(server.settings, no_special_tokens_in_text=True)
    prompts = ChatPrompts(server.engine, settings)

    async def rendered(*_):
        return f"{END}user: Hi{END}x"

    monkeypatch.setattr(prompts, "_render", rendered)
    body = {"messages": says("Hi"), "add_special_tokens": True}
    found = server.run(prompts.read(body, None, Warnings()))
    assert found.tokens == tokenizer.encode(f"{END}user: Hi{END}x").ids
    assert found.tokens[:3] == [1, 1, 0] and found.tokens[-1] == 0


def test_texts_that_could_only_begin_a_token_are_marked_too(tokenizer):
    control = ControlTokens(tokenizer)
    marked = control.marked({"a": ["x <|endoft", "y"], "b": (END, 3), "<|pad|>": None})
    assert "<" not in str(marked) and marked["a"][1] == "y" and marked["b"][1] == 3
    assert control.marked("</think> 1 < 2") == "</think> 1 < 2"
    together = marked["a"][0] + "ext|>" + END
    assert [*control.pieces(together)] == [f"x {END}", 0]


def test_tokens_that_overlap_or_are_parts_of_others_are_all_marked():
    tokenizer = Tokenizer(WordLevel({"?": 0}, "?"))
    tokenizer.add_special_tokens(["<a><b>", "<b>", "<b><c>", "<<a>"])
    control = ControlTokens(tokenizer)
    for text in ("<a><b>", "<a><b><c>", "<<a><b>", "<<a>"):
        for after in ("", " "):
            marked = control.marked(text + after)
            assert [*control.pieces(f"{marked}<b>")] == [text + after, 2]
