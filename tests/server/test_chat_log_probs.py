"""Log probabilities of chats, beside a plain forward pass of transformers' Llama."""

import threading

import pytest
import torch
from http_answers import choices_of, frames, same
from transformers import LlamaForCausalLM

from gptmanager.callbacks import load_tokenizer
from gptmanager.server.openai import chat, completions
from gptmanager.server.text import answer
from gptmanager.server.text.log_probs import prompt_shape

MODEL = "examples/tiny_llama"
TOKENIZER = load_tokenizer(MODEL)
CHAT = {"messages": [{"role": "user", "content": "Tom had a"}], "logprobs": True,
        "return_token_ids": True}  # fmt: skip


@pytest.fixture(scope="module")
def log_softmax():
    """Return a function for the log softmax behind each token, with a temperature and a bias."""
    model = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    @torch.inference_mode()
    def rows(tokens, temperature=1.0, bias=None):
        logits = model(torch.tensor([tokens])).logits[0].double()
        for token, value in (bias or {}).items():
            logits[:, int(token)] += value
        return torch.log_softmax(logits / temperature, -1)

    return rows


def ask(client, **fields):
    response = client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def shape(token, value):
    """Return a token in the form of a chat's log probabilities."""
    text = TOKENIZER.decode([token], skip_special_tokens=False)
    return {"token": text, "logprob": value.item(), "bytes": list(text.encode())}


def check(choice, rows, num_top):
    """Each listed token, and the best ones in its place."""
    listed = choice["logprobs"]["content"]
    for one, token, row in zip(listed, choice["token_ids"], rows, strict=False):
        best = one.pop("top_logprobs")
        same(one, shape(token, row[token]))
        values = row.topk(num_top).values.tolist() if num_top else []
        assert [it["logprob"] for it in best] == pytest.approx(values, abs=1e-4)
        of_id = {TOKENIZER.decode([i], skip_special_tokens=False): i for i in range(len(row))}
        for it in best:
            if "\ufffd" not in it["token"]:
                same(it, shape(of_id[it["token"]], row[of_id[it["token"]]]))


@pytest.mark.parametrize("num_top", [0, 20])
def test_those_of_all_choices_and_of_the_prompt(client, log_softmax, num_top):
    bias = {str(TOKENIZER.encode("7").ids[0]): 3.5, "300": -2}
    fields = {"top_logprobs": num_top, "n": 3, "seed": 5, "temperature": 1.6, "max_tokens": 9}
    answer = ask(client, prompt_logprobs=2, logit_bias=bias, **fields)
    prompt = answer["prompt_token_ids"]
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) > 1
    for choice in answer["choices"]:
        rows = log_softmax(prompt + choice["token_ids"], 1.6, bias)[len(prompt) - 1 :]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == 9
        check(choice, rows, num_top)
    first, *scored = answer["prompt_logprobs"]
    assert first is None and len(scored) == len(prompt) - 1
    for told, token, row in zip(scored, prompt[1:], log_softmax(prompt), strict=False):
        for rank, best in enumerate(row.topk(2).indices.tolist(), 1):
            assert told[str(best)]["rank"] == rank
        assert set(told) == {str(token), *map(str, row.topk(2).indices.tolist())}
        for index, it in told.items():
            assert it["logprob"] == pytest.approx(row[int(index)].item(), abs=1e-4)


def test_those_of_beams(client, log_softmax):
    fields = {"use_beam_search": True, "n": 2, "beam_width": 4, "top_logprobs": 3, "max_tokens": 6}
    answer = ask(client, **fields)
    prompt = answer["prompt_token_ids"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        rows = log_softmax(prompt + choice["token_ids"])[len(prompt) - 1 :]
        check(choice, rows, 3)
    assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(("stop", "keeps"), [("all ", False), ("ll ", True)])
def test_a_stop_string_that_cuts_inside_a_token(client, stop, keeps):
    """Tokens are listed whose text begins in the answer; the ids say all that was generated."""
    ball = {"guided_regex": "(r|b)all (b|g)all", "seed": 0, "temperature": 0}
    fields = {"stop": [stop], "include_stop_str_in_output": keeps, "top_logprobs": 0, **ball}
    (choice,) = ask(client, **fields)["choices"]
    content = choice["message"]["content"]
    assert content == ("ball " if keeps else "b") and choice["stop_reason"] == stop
    listed = "".join(it["token"] for it in choice["logprobs"]["content"])
    assert listed.startswith(content)
    assert len(listed) - len(choice["logprobs"]["content"][-1]["token"]) < len(content)
    assert TOKENIZER.decode(choice["token_ids"]).startswith("ball")


def test_bytes_are_each_tokens_own(client):
    form = {"guided_regex": "ü€🙂", "temperature": 0}
    response = client.post("/v1/chat/completions", json={**CHAT, **form, "stream": True})
    (streamed,) = choices_of(frames(response))
    (choice,) = ask(client, **form)["choices"]
    for content, logprobs in (
        (choice["message"]["content"], choice["logprobs"]),
        (streamed["delta"]["content"], streamed["logprobs"]),
    ):
        listed = logprobs["content"]
        assert content == "ü€🙂" and len(listed) > 3
        assert bytes(byte for it in listed for byte in it["bytes"]).decode() == content


def test_tokens_by_their_ids(client):
    fields = {"return_tokens_as_token_ids": True, "top_logprobs": 1, "max_tokens": 3}
    (choice,) = ask(client, temperature=0, **fields)["choices"]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert [it["token"] for it in choice["logprobs"]["content"]] == names
    assert [it["top_logprobs"][0]["token"] for it in choice["logprobs"]["content"]] == names


def test_an_answer_without_text_has_an_empty_list(client):
    (choice,) = ask(client, guided_regex="ab", stop="a")["choices"]
    assert choice["message"]["content"] == "" and choice["logprobs"]["content"] == []


def test_many_log_probabilities_are_written_outside_the_event_loop(client, monkeypatch):
    """Those of 8,192 tokens take a quarter of a second."""
    threads = []

    def shape(*given):
        threads.append(threading.current_thread().name)
        return prompt_shape(*given)

    for module in (chat, completions):
        monkeypatch.setattr(module, "prompt_shape", shape)
    monkeypatch.setattr(answer, "MANY_LISTED", 100)
    for is_long in (False, True):
        text = "a b " * 60 if is_long else "a b"
        for path, given in (
            ("/v1/completions", {"prompt": text}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ):
            for stream in (False, True):
                body = {**given, "max_tokens": 2, "prompt_logprobs": 1, "stream": stream}
                reply = client.post(path, json=body)
                assert reply.status_code == 200 and "decoded_token" in reply.text
                is_beside = threads.pop().startswith("asyncio_")
                assert not threads and is_beside == is_long, (path, stream, is_long)
