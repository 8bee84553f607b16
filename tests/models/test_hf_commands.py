"""Commands with a model that only transformers has: they read its sizes before it is loaded."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from hf_models import NOT_NATIVE, greedy, new_network
from running_server import running_server, settings_of
from text_checkpoint import END_ID, byte_tokenizer

from gptmanager import cli
from gptmanager.errors import ConfigError
from gptmanager.models.hf.sizes import read_sizes
from gptmanager.server.engine.model_card import ModelCard

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def network() -> Any:
    return new_network(NOT_NATIVE)


@pytest.fixture(scope="module")
def folder(network: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(NOT_NATIVE)
    network.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(network: Any) -> list[int]:
    (found,) = greedy(network, [PROMPT], 6)
    return [*found][-6:]


@pytest.mark.parametrize("backend", ["auto", "transformers"])
def test_run_generates_its_tokens(
    folder: Path, expected: list[int], tmp_path: Path, backend: str
) -> None:
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    line = {"input_ids": PROMPT, "max_new_tokens": 6, "end_id": -1}
    requests.write_text(json.dumps(line) + "\n")
    files = ["--requests", str(requests), "--output", str(answers)]
    options = ["--dtype", "float32", "--model-backend", backend, "--kv-cache-tokens", "1024"]
    assert cli.main(["run", "--model", str(folder), *files, *options]) == 0
    (answer,) = [json.loads(text) for text in answers.read_text().splitlines()]
    assert answer["output_ids"][-6:] == expected


def test_chat_answers_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_tokenizer()
    network = new_network(NOT_NATIVE, vocab_size=tokenizer.get_vocab_size(), eos_token_id=END_ID)
    network.save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    (answer,) = greedy(network, [tokenizer.encode("hello\n").ids], 12)
    answer = answer[: [*answer, END_ID].index(END_ID)]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello")))
    options = ["--dtype", "float32", "--temperature", "0", "--repetition-penalty", "1"]
    sizes = ["--max-new-tokens", "12", "--kv-cache-tokens", "1024"]
    assert cli.main(["chat", "--model", str(tmp_path), *options, *sizes]) == 0
    assert capsys.readouterr().out == tokenizer.decode(answer) + "\n"


def test_serve_answers_with_it(folder: Path, expected: list[int]) -> None:
    params = {"deterministic": False, "dtype": "float32"}
    with running_server(settings_of(folder, params, triton=False, served_model_name="a")) as server:
        (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert model["max_model_len"] == 256
        body = {"model": "a", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
        more = {"ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{server.url}/v1/completions", json={**body, **more}, timeout=60)
        assert answer.json()["choices"][0]["token_ids"] == expected


def test_its_card_has_no_modules_for_adapters(folder: Path, network: Any) -> None:
    card = ModelCard.of_folder(folder, (NOT_NATIVE,))
    assert (card.vocab_size, card.hidden_size) == (
        network.config.vocab_size,
        network.config.hidden_size,
    )
    assert (card.max_model_len, card.adapter_rows, card.adapter_width) == (256, 0, 0)
    assert not card.keeps_state
    assert read_sizes(folder, "auto", 100).max_seq_len == 100


@pytest.mark.parametrize(
    ("field", "value"), [("vocab_size", 0), ("hidden_size", "x"), ("model_type", "no such type")]
)
def test_a_wrong_size_is_named(folder: Path, tmp_path: Path, field: str, value: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=field):
        read_sizes(tmp_path, "auto")
