"""The endpoints beside those that generate: health, version, models, tokens; and refusals."""

from dataclasses import replace
from datetime import datetime

import httpx
import pytest
from http_answers import refusal
from running_server import MODEL, settings_of
from starlette.testclient import TestClient

import gptmanager
from gptmanager.server.app import create_app


@pytest.fixture(scope="module")
def plain(server):
    """A client of the same engine behind the options that nobody has changed."""
    app = create_app(server.engine, settings_of(triton=False))
    with TestClient(app, base_url="http://localhost") as client:
        yield client


@pytest.mark.parametrize(
    ("path", "status"), [("/health", "ready"), ("/health/live", "live"), ("/health/ready", "ready")]
)
def test_a_server_that_runs_is_healthy(client, path, status):
    response = client.get(path)
    assert response.status_code == 200 and response.json() == {"status": status}


def test_version(client):
    assert client.get("/version").json()["version"] == gptmanager.__version__


def test_the_model_is_listed_with_its_length(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny_llama" and model["max_model_len"] == 512
    assert client.get("/v1/models/tiny_llama").json() == model


def test_models_are_listed_in_the_shape_of_anthropics_api_too(client):
    listed = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    (model,) = listed["data"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (
        *["tiny_llama"] * 2,
        False,
    )
    assert (model["type"], model["display_name"]) == ("model", "tiny_llama")
    assert model["max_input_tokens"] == 512
    at = datetime.fromisoformat(model["created_at"].replace("Z", "+00:00"))
    assert at.timestamp() == model["created"]


def test_an_unknown_model_is_a_404(client):
    error = refusal(client.get("/v1/models/other/one"), 404)
    assert error["param"] == "model" and "'other/one'" in error["message"]


def test_json_may_begin_with_a_byte_order_mark(client):
    """As files have it that Windows writes, whose text curl sends as it is."""
    answer = client.post("/tokenize", content='\ufeff{"prompt": "é"}'.encode())
    assert answer.json()["count"] == client.post("/tokenize", json={"prompt": "é"}).json()["count"]


@pytest.mark.parametrize(
    ("encoding", "reason"),
    [
        ("latin-1", "byte 12 (0xe9) is not"),
        *((name, f"begins like {name}") for name in ("utf-16", "utf-16-le", "utf-16-be", "utf-32")),
    ],
)
def test_a_body_that_is_not_utf_8_is_refused_with_the_reason(client, encoding, reason):
    answer = client.post("/tokenize", content='{"prompt": "é"}'.encode(encoding))
    message = refusal(answer, 400)["message"]
    assert message == f"the body is not JSON: it must be UTF-8, but {reason}"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/rerank", "/v1/audio/speech"])
def test_a_path_for_models_of_another_kind_is_a_404_that_says_so(client, path):
    message = refusal(client.post(path, json={"model": "tiny_llama", "input": "a"}), 404)["message"]
    assert message.endswith(f"{path}: the model of this server generates text and has no other use")


@pytest.mark.parametrize("path", ["/nothing", "/scores", "/v1/scores", "/v1score"])
def test_an_unknown_path_is_a_404(client, path):
    assert refusal(client.get(path), 404)["message"] == f"there is nothing at {path}"


@pytest.mark.parametrize(
    "path, option",
    [
        ("/v2", "--triton"),
        ("/v2/health/live", "--triton"),
        ("/v2/models/ensemble/infer", "--triton"),
        ("/v1/load_lora_adapter", "--adapter-dir"),
        ("/v1/unload_lora_adapter", "--adapter-dir"),
    ],
)
def test_what_the_operator_did_not_ask_for_is_a_404_that_names_the_option(plain, path, option):
    for ask in (plain.get, plain.post):
        assert f"without {option}" in ask(path).text
        assert ask(path).status_code == 404
    assert path not in plain.get("/openapi.json").json()["paths"]


def test_grpc_implies_the_same_protocol_over_http():
    assert settings_of(triton=False, grpc_port=0).serves_triton
    assert not settings_of(triton=False).serves_triton


@pytest.mark.parametrize("path", ["/v1/completions/", "/health/", "/%00"])
def test_a_path_with_a_slash_too_many_is_a_404(client, path):
    refusal(client.post(path, json={"prompt": "a"}), 404)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions/",
        "//v1/completions",
        "/v1/v1/completions",
        "/completions",
        "/api/v1/completions",
        "/api/completions",
        "/openai/deployments/tiny_llama/completions",
        "/a" * 100 + "/v1/completions",
    ],
)
def test_a_wrong_base_url_is_explained(client, path):
    url = client.base_url.join("/").copy_with(raw_path=path.encode())
    message = refusal(client.post(url, json={"prompt": "a"}), 404)["message"]
    assert ": /v1/completions was probably meant" in message


@pytest.mark.parametrize("method, path", [("GET", "/api/tags"), ("POST", "/api/chat")])
def test_a_client_of_ollama_reads_that_its_api_is_missing(client, method, path):
    """Its clients show an `error` that is a text, and nothing of an object."""
    response = client.request(method, path, json={"model": "tiny_llama"})
    assert response.status_code == 404
    assert f"{path}: this server does not have Ollama's API" in response.json()["error"]


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/healthz", ": /health was probably meant"),
        ("/v1/chat/completion", ": /v1/chat/completions was probably meant"),
        ("/slots", ": this server does not have llama.cpp's own API"),
    ],
)
def test_a_path_of_another_server_or_a_misspelled_one_is_explained(client, path, hint):
    assert f"{path}{hint}" in refusal(client.get(path), 404)["message"]


def test_the_list_of_models_with_a_slash_at_its_end(client):
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()


@pytest.mark.parametrize(
    ("path", "allowed"), [("/health", "GET, HEAD"), ("/v1/responses/a", "DELETE, GET, HEAD")]
)
def test_a_wrong_method_is_a_405(client, path, allowed):
    response = client.put(path)
    message = f"PUT is not allowed at {path}: use {allowed}"
    assert refusal(response, 405)["message"] == message
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff"])
def test_a_body_must_be_a_json_object(client, body):
    refusal(client.post("/tokenize", content=body), 400)


def test_text_to_tokens_and_back(client, tokenizer):
    text = "Tom had 3 apples."
    found = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    encoded = tokenizer.encode(text)
    assert found["tokens"] == encoded.ids and found["count"] == len(encoded.ids)
    assert found["token_strs"] == encoded.tokens and found["max_model_len"] == 512
    back = client.post("/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": text}


def test_the_tokenizer_is_described_for_clients_that_have_none(client, server, monkeypatch):
    template = (MODEL / "chat_template.jinja").read_text()
    assert client.get("/tokenizer_info").json() == {
        **{"bos_token": None, "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"},
        **{"model_max_length": 512, "chat_template": template},
    }
    monkeypatch.setattr(server.engine, "card", replace(server.engine.card, tokenizer=None))
    assert refusal(client.get("/tokenizer_info"), 404)["message"] == "the model has no tokenizer"


def test_a_long_text_has_the_same_tokens(client, tokenizer):
    text = "Tom had 3 apples. " * 200
    found = client.post("/tokenize", json={"prompt": text}).json()
    ids = tokenizer.encode(text).ids
    assert found == {"count": len(ids), "max_model_len": 512, "tokens": ids}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1, 640]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ],
)
def test_wrong_fields_are_named(client, path, body, param):
    assert refusal(client.post(path, json=body), 400)["param"] == param


def test_another_model_is_a_404(client):
    refusal(client.post("/tokenize", json={"prompt": "x", "model": "other"}), 404)
    assert (
        httpx.codes.OK
        == client.post("/tokenize", json={"prompt": "x", "model": "tiny_llama"}).status_code
    )


MESSAGES = [{"role": "user", "content": "17 + 25 ="}]


def test_a_chat_as_tokens_is_the_prompt_that_the_model_gets(client):
    found = client.post("/tokenize", json={"messages": MESSAGES}).json()
    chat = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    answer = client.post("/v1/chat/completions", json=chat).json()
    assert found["tokens"] == answer["prompt_token_ids"] and found["count"] == len(found["tokens"])
    text = client.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
    assert "17 + 25 =" in text
    bare = {"messages": MESSAGES, "add_generation_prompt": False}
    shorter = client.post("/tokenize", json=bare).json()["tokens"]
    assert shorter == found["tokens"][: len(shorter)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": MESSAGES, "prompt": "x"}, "prompt"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": []}, "messages"),
        ({"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
    ],
)
def test_only_valid_chats_are_tokenized(client, body, param):
    assert refusal(client.post("/tokenize", json=body), 400)["param"] == param
