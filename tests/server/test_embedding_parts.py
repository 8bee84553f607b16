"""Parts of messages that are embeddings: as the tokens that they stand for, or refused."""

import base64

import pytest
import torch
from running_server import MODEL
from safetensors.torch import load_file

from gptmanager.server.chat.embedding_parts import EmbeddingParts

QUESTION = "17 + 25 ="


@pytest.fixture(scope="module")
def embeddings():
    return load_file(MODEL / "model.safetensors")["model.embed_tokens.weight"].float()


def encoded(rows):
    return base64.b64encode(rows.contiguous().view(torch.uint8).numpy().tobytes()).decode()


def part(rows, kind="prompt_embeds", **fields):
    return {"type": kind, kind: encoded(rows), **fields}


def ask(client, *parts, status=200, **fields):
    message = {"role": "user", "content": list(parts)}
    body = {"messages": [message], "max_tokens": 4, "temperature": 0, **fields}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["prompt_embeds", "image_embeds"])
def test_rows_answer_as_the_tokens_that_they_are_of(client, engine, embeddings, kind, dtype):
    text = {"type": "text", "text": QUESTION}
    said = ask(client, text, return_token_ids=True)
    tokens = said["prompt_token_ids"]
    own = engine.card.tokenizer.encode(QUESTION, add_special_tokens=False).ids
    at = next(i for i in range(len(tokens)) if tokens[i : i + len(own)] == own)
    rows = embeddings[own].to(getattr(torch, dtype))
    found = ask(client, part(rows, kind, dtype=dtype), return_token_ids=True)
    first = engine.card.vocab_size
    assert found["prompt_token_ids"] == [
        *tokens[:at], *range(first, first + len(own)), *tokens[at + len(own) :]
    ]  # fmt: skip
    if dtype == "float32":
        assert found["choices"][0]["message"] == said["choices"][0]["message"]
        assert found["usage"]["prompt_tokens"] == said["usage"]["prompt_tokens"]


def test_two_parts_and_a_stream(client, embeddings):
    parts = [part(embeddings[3:5]), {"type": "text", "text": "and"}, part(embeddings[7:8])]
    ids = ask(client, *parts, return_token_ids=True)["prompt_token_ids"]
    assert sum(token >= len(embeddings) for token in ids) == 3
    messages = [{"role": "user", "content": parts}]
    body = {"messages": messages, "stream": True, "max_tokens": 2, "n": 2}
    assert client.post("/v1/chat/completions", json=body).text.endswith("data: [DONE]\n\n")


def test_other_protocols_have_the_same_parts(client, embeddings):
    parts = [part(embeddings[3:5]), {"type": "text", "text": "and"}]
    message = {"role": "user", "content": parts}
    num_tokens = ask(client, *parts)["usage"]["prompt_tokens"]
    messages = {"messages": [message], "max_tokens": 2}
    assert client.post("/v1/messages/count_tokens", json={"messages": [message]}).json() == {
        "input_tokens": num_tokens
    }
    assert client.post("/v1/messages", json=messages).status_code == 200
    answer = client.post("/v1/responses", json={"input": [message], "max_output_tokens": 2}).json()
    assert answer["usage"]["input_tokens"] == num_tokens


WRONG = [
    ({"prompt_embeds": 7}, "must be rows in base64"),
    ({}, "must be rows in base64"),
    ({"prompt_embeds": "%%%%"}, "must be rows in base64"),
    ({"prompt_embeds": "QUJD"}, "a row of 128 values of float32 has 512"),
    ({"prompt_embeds": ""}, "has 0 bytes"),
    ({"prompt_embeds": "A" * 1_000_000}, "has more rows than the"),
    ({"prompt_embeds": "AAAA", "dtype": "int8"}, "must be one of float32, float16, bfloat16"),
    ({"prompt_embeds": "AAAA", "dtype": ["float32"]}, "must be one of"),
    ({"prompt_embeds": encoded(torch.full((1, 128), torch.nan))}, "finite values only"),
    ({"prompt_embeds": encoded(torch.full((1, 128), torch.inf))}, "finite values only"),
]


@pytest.mark.parametrize(("fields", "reason"), WRONG)
def test_a_wrong_part_is_a_400(client, fields, reason):
    error = ask(client, {"type": "prompt_embeds", **fields}, status=400)["error"]
    assert error["param"].startswith("messages[0].content[0].") and reason in error["message"]


def test_log_probabilities_of_such_a_prompt_are_refused(client, embeddings):
    ask(client, part(embeddings[:1]), status=400, prompt_logprobs=1)


def test_a_text_cannot_forge_a_mark(engine):
    parts, other = EmbeddingParts(engine.card), EmbeddingParts(engine.card)
    assert parts._mark != other._mark
    assert list(parts.pieces(f"a {other._mark}_0_ b")) == [f"a {other._mark}_0_ b"]
    assert parts.table is None and parts.marked("x") == "x" and parts.marked([1]) == [1]
