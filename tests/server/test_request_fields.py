"""Fields that ordinary clients send: each works, is reported, or changes nothing."""

import inspect
import re
from dataclasses import replace
from pathlib import Path

import openai
import pytest
from http_answers import texts_of
from openai.resources.responses import InputTokens, Responses

from gptmanager.server.anthropic import messages
from gptmanager.server.chat.chat_prompt import _VARIABLES
from gptmanager.server.openai import chat, completions, responses
from gptmanager.server.text.generation_fields import IGNORED, NOT_SUPPORTED
from gptmanager.server.text.sampling import GenerationOptions, requests_of

DOCS = Path(__file__).parents[2] / "docs" / "http_api.md"
ROUTES = {
    "/v1/completions": {"prompt": "17 + 25 =", "max_tokens": 2},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "17 + 25 ="}],
        "max_tokens": 2,
    },
}
EFFECT = "fields that have no effect here: "


def ask(client, route, **fields):
    response = client.post(route, json={**ROUTES[route], **fields})
    assert response.status_code == 200, response.text
    return response


def names_of(fields):
    return {field.name for field in fields}


def test_docs_list_what_has_no_effect():
    section = DOCS.read_text(encoding="utf-8").split("\n## Fields without effect\n")[1]
    warned, accepted = re.findall(r"^\| `audio`.*|^\| `cache_prompt`.*", section, re.M)
    found = [
        set(re.findall(r"`([a-z_]+)`(?! \|)", row.split(" | ")[0])) for row in (warned, accepted)
    ]
    assert found[0] - {"medium"} == names_of(NOT_SUPPORTED)
    assert found[1] == names_of(IGNORED)
    text = DOCS.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in _VARIABLES)
    for title, names in (
        ("Responses", {*responses._IGNORED, *responses._NOT_SUPPORTED}),
        ("Messages", names_of(messages._IGNORED) | names_of(messages._NOT_SUPPORTED)),
    ):
        section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
        assert names <= set(re.findall(r"`([a-z_]+)`", section))


def test_every_parameter_of_the_client_library_is_known():
    own = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    own |= {"conversation", "prompt"}  # the answer needs what the server does not have
    for fields, create in (
        (chat.FIELDS, openai.resources.chat.Completions.create),
        (completions.FIELDS, openai.resources.Completions.create),
        (responses.FIELDS, Responses.create),
        (responses.FIELDS, InputTokens.count),
    ):
        assert set(inspect.signature(create).parameters) - own <= set(fields)


def test_what_changes_responses_elsewhere_is_reported(client):
    fields = {"context_management": [{"type": "compaction"}], "moderation": {"model": "m"}}
    body = {"input": "17 + 25 =", "max_output_tokens": 2, "personality": "friendly", **fields}
    answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert texts_of(answer.headers) == [EFFECT + "context_management, moderation, personality"]


@pytest.mark.parametrize("route", ROUTES)
def test_what_changes_answers_elsewhere_is_reported(client, route):
    plain = ask(client, route)
    odd = {name: {"x": "y"} for name in sorted(names_of(NOT_SUPPORTED))}
    first, second = dict(list(odd.items())[:6]), dict(list(odd.items())[6:])
    for fields in (first, second):
        answer = ask(client, route, **fields)
        assert texts_of(answer.headers) == [EFFECT + ", ".join(fields)]
        assert answer.json()["choices"] == plain.json()["choices"]
    assert texts_of(ask(client, route, stream=True, verbosity="low").headers) == [
        f"{EFFECT}verbosity"
    ]


@pytest.mark.parametrize("route", ROUTES)
def test_what_changes_nothing_is_not_reported(client, route):
    neutral = {field.name: one for field in NOT_SUPPORTED for one in field.kind.neutral}
    assert neutral["modalities"] == ["text"]
    fields = {**neutral, **{name: {"x": 1} for name in names_of(IGNORED)}}
    assert "Warning" not in ask(client, route, **fields).headers


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_field_is_refused_by_name_and_says_what_helps(client, route, stream):
    given = {**ROUTES[route], "stream": stream, "colour": "red", "y" * 10**5: 1}
    for name in ("colour", "y" * 10**5):
        body = {
            key: value for key, value in given.items() if key in (*ROUTES[route], "stream", name)
        }
        response = client.post(route, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "unknown_field")
        assert "--lenient" in error["message"] and len(response.content) < 3000


def test_keys_of_stream_options_may_be_unknown(client):
    options = {"include_usage": True, "chunk_include_usage": 5, "z" * 10**4: None}
    answer = ask(client, "/v1/completions", stream=True, stream_options=options)
    assert '"usage":{"prompt_tokens"' in answer.text and "Warning" not in answer.headers


def test_other_names_of_fields(client):
    route = "/v1/completions"
    given = {"prompt": "0 1 2", "temperature": 0, "max_tokens": None}
    long = ask(client, route, **given, max_completion_tokens=5).json()
    assert long["usage"]["completion_tokens"] == 5
    both = ask(client, route, **{**given, "max_tokens": 9}, max_completion_tokens=3).json()
    assert both["usage"]["completion_tokens"] == 3
    given["max_tokens"] = 20
    punished = [
        ask(client, route, **given, **{name: 1.9}).json()["choices"][0]["text"]
        for name in ("repeat_penalty", "repetition_penalty")
    ]
    free = ask(client, route, **given).json()["choices"][0]["text"]
    assert punished[0] == punished[1] != free
    given.update(prompt="Tom had", temperature=1.5)
    drawn = [
        ask(client, route, **given, **{name: seed}).json()["choices"][0]["text"]
        for name, seed in (("seed", 7), ("random_seed", 7), ("random_seed", 8))
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_variables_that_the_template_does_not_know_are_reported(client):
    fields = {
        "reasoning_effort": "low",
        "enable_thinking": False,
        "documents": [{"text": "x"}],
        "chat_template_kwargs": {"message": 1, "date": "now", 'a"\r\nb': 1},
    }
    answer = ask(client, "/v1/chat/completions", **fields)
    (text,) = texts_of(answer.headers)
    assert text.startswith("unknown to the chat template: documents, reasoning_effort, enable_th")
    assert "date" in text and "message" not in text.split(": ")[1]
    many = {f"variable_{index}": 1 for index in range(10**4)}
    answer = ask(client, "/v1/chat/completions", chat_template_kwargs=many)
    assert len(answer.headers["Warning"]) < 500
    tokenized = client.post(
        "/tokenize", json={**fields, "messages": [{"role": "user", "content": "a"}]}
    )
    assert texts_of(tokenized.headers) == [text]


@pytest.mark.parametrize("fields", [{"n": 2}, {"beam_width": 3}, {"beam_width": 3, "top_p": 1}])
def test_beams_of_a_greedy_request_are_those_of_any_other(client, fields):
    route = "/v1/completions"
    given = {"use_beam_search": True, "max_tokens": 6, "logprobs": 0, **fields}
    texts = [
        ask(client, route, **given, **own).json()["choices"] for own in ({"temperature": 0}, {})
    ]
    assert texts[0] == texts[1]
    chats = [
        ask(client, "/v1/chat/completions", **{**given, "logprobs": True}, **own).json()["choices"]
        for own in ({"temperature": 0}, {"temperature": 1})
    ]
    assert chats[0] == chats[1]


@pytest.mark.parametrize("route", [*ROUTES, "/tokenize"])
def test_an_empty_name_means_the_model(client, route):
    body = {**ROUTES.get(route, {"prompt": "a"}), "model": ""}
    answer = client.post(route, json=body)
    assert answer.status_code == 200 and answer.json().get("model", "tiny_llama") == "tiny_llama"


@pytest.mark.parametrize("route", ROUTES)
def test_a_temperature_that_is_nearly_0_is_0(client, route):
    """Clients in Go leave a 0 out, and send the smallest number of 32 bits in place of it."""
    plain = ask(client, route, temperature=0, n=8).json()["choices"]
    for nearly in (1e-45, 9e-31, -0.0):
        assert ask(client, route, temperature=nearly, n=8).json()["choices"] == plain


def test_a_beam_search_takes_no_sampling_from_the_checkpoint(engine):
    """Else every search of a checkpoint such as Qwen's, which has a top_k, would be refused."""
    defaults = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    card = replace(engine.card, sampling_defaults=defaults)
    fields = {"use_beam_search": True, "n": 2, "temperature": 0.0, "length_penalty": 0.5}
    ((request,),) = requests_of(GenerationOptions(fields), card, [[5]], [1], 7)
    sampled = request.by_name.keys() & {"runtime_top_k", "runtime_top_p", "runtime_min_p"}
    assert not sampled and request.by_name["temperature"] == 1.0
    assert request.by_name["repetition_penalty"] == 1.05
    assert request.by_name["len_penalty"] == 0.5
    ((request,),) = requests_of(GenerationOptions({"temperature": 0.0}), card, [[5]], [1], 7)
    assert request.by_name["runtime_top_k"] == 20 and request.by_name["temperature"] == 0.0


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "most", [{"max_tokens": 10**12}, {"max_tokens": 506}, {"max_completion_tokens": 2**64 - 1}]
)
def test_overflow_in_the_words_that_clients_match(client, route, stream, most):
    response = client.post(route, json={**ROUTES[route], "stream": stream, **most})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].startswith("This model's maximum context length is 512 tokens. However")
    [(name, value)] = most.items()
    assert error["param"] == name and f"or lower {name} to at most" in error["message"]
    assert str(value) in error["message"]


@pytest.mark.parametrize("length", [600, 10**5])
def test_a_prompt_that_is_too_long_in_the_same_words(client, length):
    texts = {
        "/v1/completions": {"prompt": "a " * length},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a " * length}]},
    }
    ids = {"prompt": [5] * length, "max_tokens": None}
    scored = {**ids, "max_tokens": 0, "echo": True, "logprobs": 1}
    cases = [*texts.items(), ("/v1/completions", ids), ("/v1/completions", scored)]
    for route, body in cases:
        response = client.post(route, json={**ROUTES[route], **body})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded"), error
        assert error["message"].startswith("This model's maximum context length is 512 tokens. How")
        assert error["param"] == ("prompt" if "prompt" in body else "messages")
