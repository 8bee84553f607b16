"""/v1/completions, over a socket, with plain HTTP and with OpenAI's own client."""

import json

import openai
import pytest
import torch
from http_answers import refusal

from gptmanager import GptManager, InferenceRequest, ModelType
from gptmanager.callbacks import generate, load_tokenizer
from gptmanager.server.text.sampling import GenerationOptions, check, mixed_seed, requests_of
from gptmanager.testing import RecordingCallbacks

MODEL = "examples/tiny_llama"
TOKENIZER = load_tokenizer(MODEL)
COUNT = "Count from 1 to 12:"


@pytest.fixture(scope="module")
def api(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client, **body):
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def chunks(client, **body):
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        text = response.read().decode()
    frames = text.removesuffix("\n\n").split("\n\n")
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]


def joined(found):
    """Chunks as one answer."""
    choices = {}
    for chunk in found:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {**part, "text": "", "token_ids": []})
            choice["text"] += part["text"]
            choice["token_ids"] += part.get("token_ids") or []
            choice["finish_reason"] = part["finish_reason"]
            choice["stop_reason"] = part["stop_reason"]
            if part["logprobs"] and part is not choice and choice["logprobs"] is not None:
                if choice["logprobs"] is part["logprobs"]:
                    continue
                for name, values in part["logprobs"].items():
                    choice["logprobs"][name] = choice["logprobs"][name] + values
    return [choices[index] for index in sorted(choices)]


def test_a_greedy_text_is_what_the_library_generates(api):
    completion = api.completions.create(model="tiny_llama", prompt=COUNT, temperature=0)
    (choice,) = completion.choices
    assert choice.text == generate(MODEL, COUNT, 16)
    assert choice.finish_reason == "length"
    assert completion.usage.completion_tokens == 16  # by default
    assert completion.usage.prompt_tokens == len(TOKENIZER.encode(COUNT).ids)


def test_the_end_token_counts(client):
    answer = complete(client, prompt="17 + 25 =", temperature=0, return_token_ids=True)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" 42", "stop", None)
    assert choice["token_ids"][-1] == 0
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == 4
    assert choice["prompt_token_ids"] == TOKENIZER.encode("17 + 25 =").ids


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop": ["7,", "ball", "no"]},
        {"stop": "a", "include_stop_str_in_output": True},
        {"n": 3, "logprobs": 0},
        {"echo": True, "n": 2},
        {"stop": [" 6, 7"], "logprobs": 0, "n": 2},
        {"stop_token_ids": [TOKENIZER.encode("7").ids[0]], "ignore_eos": True},
        {"min_tokens": 20, "bad_words": ["ball", "1"]},
        {"structured_outputs": {"regex": "[a-f]{3,9}"}},
    ],
    ids=str,
)
def test_a_stream_says_what_the_whole_answer_says(client, options):
    body = {
        **{"prompt": [COUNT, "Tom had a", "Cost: 5 €"], "max_tokens": 24, "seed": 7},
        **{"temperature": 1.0, "return_token_ids": True},
        **options,
    }
    whole = complete(client, **body)
    *parts, last = chunks(client, stream_options={"include_usage": True}, **body)
    assert joined(parts) == whole["choices"]
    # strict clients reject a usage of null in the other chunks, though OpenAI sends it
    assert last["choices"] == [] and not any("usage" in part for part in parts)
    counted = ("prompt_tokens", "completion_tokens")
    assert [last["usage"][name] for name in counted] == [whole["usage"][name] for name in counted]


def test_choices_of_one_seed_differ_repeat_and_belong_to_that_seed(client):
    def texts(seed, n=6):
        body = {"prompt": ["Tom had", "Tom had"], "n": n, "seed": seed, "temperature": 1.5}
        return [choice["text"] for choice in complete(client, **body)["choices"]]

    first, again, next_one = texts(1), texts(1), texts(2)
    assert first == again and len(set(first)) == 12
    assert not set(first) & set(next_one)
    assert texts(1, n=2)[:2] == first[:2]
    assert not set(texts(-1)) & set(texts(-1))  # -1: a random seed
    assert len({mixed_seed(s, p, k) for s in range(9) for p in range(9) for k in range(9)}) == 729
    assert mixed_seed(-1, 0, 0) != mixed_seed(1, 0, 0)


def test_many_choices_of_many_prompts_are_in_order(client):
    prompts = [COUNT, "17 + 25 =", [66, 67]]
    choices = complete(client, prompt=prompts, n=128, max_tokens=2, temperature=0)["choices"]
    assert [choice["index"] for choice in choices] == list(range(3 * 128))
    for index, prompt in enumerate(prompts):
        texts = {choice["text"] for choice in choices[index * 128 : (index + 1) * 128]}
        assert len(texts) == 1
        if index < 2:
            assert texts == {generate(MODEL, prompt, 2)}


def test_stop_reasons(client):
    def ended(**options):
        answer = complete(client, prompt=COUNT, temperature=0, max_tokens=60, **options)
        (choice,) = answer["choices"]
        return choice["text"], choice["finish_reason"], choice["stop_reason"]

    assert ended(stop=["x", "4, 5"]) == (" 1, 2, 3, ", "stop", "4, 5")
    assert ended(stop="4, 5", include_stop_str_in_output=True)[0] == " 1, 2, 3, 4, 5"
    four = TOKENIZER.encode("4").ids[0]
    assert ended(stop_token_ids=[four]) == (" 1, 2, 3, ", "stop", four)
    text, reason, why = ended()
    assert (reason, why) == ("stop", None) and text.endswith("12.")
    assert ended(stop="3", min_tokens=18)[0] != " 1, 2, "


@pytest.mark.parametrize(
    ("given", "streams"),
    [
        ({"stop": ["a"]}, True),
        ({"min_tokens": 2, "stop_token_ids": [5]}, True),
        ({"min_tokens": 2}, False),
        ({"stop_token_ids": [5]}, False),
        ({"stop": []}, False),
        ({"stop": [], "use_beam_search": True, "n": 2}, False),
    ],
    ids=str,
)
def test_an_end_that_only_the_server_finds_is_looked_for_during_generation(engine, given, streams):
    options = GenerationOptions(given)
    check(options, engine.card)
    ((request,),) = requests_of(options, engine.card, [[1]], [5], 7)
    assert request.by_name["is_streaming"] is streams


def test_echo_precedes_the_output(client):
    body = {"prompt": ["Tom had", [66, 67]], "temperature": 0, "max_tokens": 4}
    plain = complete(client, **body)["choices"]
    echoed = complete(client, echo=True, **body)["choices"]
    assert echoed[0]["text"] == "Tom had" + plain[0]["text"]
    assert echoed[1]["text"] == TOKENIZER.decode([66, 67]) + plain[1]["text"]
    nothing = complete(client, **{**body, "max_tokens": 0}, echo=True)
    assert [choice["text"] for choice in nothing["choices"]] == ["Tom had", echoed[1]["text"][:2]]
    assert nothing["usage"]["completion_tokens"] == 0


def test_log_probs_are_those_of_the_tokens(client):
    answer = complete(client, prompt=COUNT, temperature=0, max_tokens=6, logprobs=0)
    shape = answer["choices"][0]["logprobs"]
    assert "".join(shape["tokens"]) == answer["choices"][0]["text"]
    assert shape["text_offset"] == [sum(map(len, shape["tokens"][:i])) for i in range(6)]
    assert all(-0.7 < value < 0 for value in shape["token_logprobs"])  # greedy and sure
    assert shape["top_logprobs"][0] == {shape["tokens"][0]: shape["token_logprobs"][0]}


@pytest.mark.parametrize("ends", [{}, {"stop_token_ids": [0], "ignore_eos": True}])
@pytest.mark.parametrize("stream", [False, True])
def test_the_token_that_ends_an_output_is_scored(client, ends, stream):
    """lm-eval asks for one token behind a text, and leaves its score out, whatever it is."""
    text = "9 + 37 = 46"
    body = {"prompt": text, "echo": True, "max_tokens": 1, "temperature": 0, "logprobs": 1, **ends}
    if stream:
        choices = [chunk["choices"][0] for chunk in chunks(client, **body)]
    else:
        choices = complete(client, **body)["choices"]
    assert "".join(choice["text"] for choice in choices) == text
    assert choices[-1]["finish_reason"] == "stop"
    lists = [choice["logprobs"] for choice in choices]
    assert len([one for each in lists for one in each["token_logprobs"]]) == (
        len(TOKENIZER.encode(text).ids) + 1
    )
    assert lists[-1]["tokens"][-1] == TOKENIZER.decode([0], skip_special_tokens=False)
    assert lists[-1]["text_offset"][-1] == len(text)


@pytest.fixture(scope="module")
def logits_of():
    """The logits behind each of the tokens, from another manager that keeps them all."""

    def logits(tokens):
        requests = [
            InferenceRequest.from_tokens(0, tokens, 1, return_context_logits=True, end_id=-1)
        ]
        host = RecordingCallbacks(requests)
        with GptManager(MODEL, ModelType.INFLIGHT_FUSED_BATCHING, **host.keywords()) as manager:
            assert manager.wait_idle(30)
        return dict(host.of(0)[-1].tensors)["context_logits"][0].double()

    return logits


def test_top_log_probs_are_those_of_the_logits(client, logits_of):
    prompt = TOKENIZER.encode(COUNT).ids
    body = {"prompt": prompt, "temperature": 0.5, "seed": 3, "max_tokens": 6, "ignore_eos": True}
    (choice,) = complete(client, **body, logprobs=3, return_token_ids=True)["choices"]
    rows = torch.log_softmax(logits_of(prompt + choice["token_ids"]) / 0.5, -1)[len(prompt) - 1 :]
    shape = choice["logprobs"]
    for index, token in enumerate(choice["token_ids"]):
        values, ids = rows[index].topk(3)
        expected = {
            TOKENIZER.decode([i], skip_special_tokens=False): value
            for i, value in zip(ids.tolist(), values.tolist(), strict=True)
        }
        expected[TOKENIZER.decode([token])] = rows[index, token].item()
        assert shape["top_logprobs"][index] == pytest.approx(expected, abs=1e-4)
        assert shape["token_logprobs"][index] == pytest.approx(rows[index, token].item(), abs=1e-4)


@pytest.mark.parametrize("most", [0, 1])
def test_a_prompt_is_scored_by_echo(client, logits_of, most):
    """lm-eval scores prompts with such requests."""
    text = "Tom had a red ball. €"
    prompt = TOKENIZER.encode(text).ids
    body = {"prompt": [text, prompt], "max_tokens": most, "temperature": 0, "echo": True, "n": 2}
    choices = complete(client, **body, logprobs=1)["choices"]
    rows = torch.log_softmax(logits_of(prompt), -1)
    for choice in choices:
        shape = choice["logprobs"]
        assert len(shape["tokens"]) == len(prompt) + most
        scores = [rows[i, token].item() for i, token in enumerate(prompt[1:])]
        assert shape["token_logprobs"][0] is shape["top_logprobs"][0] is None
        assert shape["token_logprobs"][1 : len(prompt)] == pytest.approx(scores, abs=1e-4)
        best = [max(top, key=top.get) for top in shape["top_logprobs"][1:]]
        assert best[0] == TOKENIZER.decode([rows[0].argmax().item()])
        starts = [
            len(TOKENIZER.decode(prompt[:i]))
            for i in range(len(TOKENIZER.encode("Tom had a red ball. ").ids))
        ]
        assert shape["text_offset"][: len(starts)] == starts
        assert choice["text"].startswith(text)


def test_a_stream_has_the_prompts_scores_before_each_choice(client):
    body = {"prompt": [COUNT, "Tom had"], "echo": True, "logprobs": 2, "n": 3, "max_tokens": 5}
    body |= {"seed": 1, "prompt_logprobs": 1}
    whole = complete(client, **body)["choices"]
    found = chunks(client, **body)
    first = {}
    for chunk in found:
        (part,) = chunk["choices"]
        first.setdefault(part["index"], part)
    for mine, theirs in zip(joined(found), whole, strict=True):
        for key in theirs:
            assert mine[key] == theirs[key], key
    for index, part in first.items():
        assert part["prompt_logprobs"] == whole[index]["prompt_logprobs"]
        assert part["logprobs"]["token_logprobs"][0] is None


def test_tokens_may_be_named_by_their_ids(client):
    body = {"prompt": COUNT, "temperature": 0, "max_tokens": 3, "return_token_ids": True}
    options = {"logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = complete(client, **body, **options)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


def test_a_full_context_may_be_echoed(client):
    answer = complete(client, prompt=[66] * 512, echo=True, max_tokens=0)
    assert answer["usage"]["completion_tokens"] == 0


def test_no_limit_is_the_rest_of_the_context(client):
    given = {"prompt": [[66] * 510, [66] * 509], "max_tokens": -1, "ignore_eos": True}
    assert complete(client, **given)["usage"]["completion_tokens"] == 2 + 3
    refused = client.post("/v1/completions", json={**given, "min_tokens": 3})
    assert "min_tokens = 3 must be at most 2" in refused.json()["error"]["message"]


def test_bias_bans_and_forces(client):
    a = TOKENIZER.encode("a").ids[0]
    forced = complete(client, prompt="Tom", logit_bias={str(a): 100}, max_tokens=4, temperature=0)
    assert forced["choices"][0]["text"] == "aaaa"


def test_words_that_no_text_contains(client):
    body = {"prompt": "Tom had a red", "temperature": 0, "max_tokens": 40}
    assert "boat" in complete(client, **body)["choices"][0]["text"]
    assert "oat" not in complete(client, bad_words=["oat"], **body)["choices"][0]["text"]


def test_an_answer_in_a_form_holds_no_bad_word(client):
    given = {"guided_choice": ["red", "blue", "brown"], "prompt": "a", "n": 4, "seed": 1}
    answer = complete(client, bad_words=["r", "x"], **given)
    assert {choice["text"] for choice in answer["choices"]} == {"blue"}
    response = client.post("/v1/completions", json={**given, "bad_words": ["e", "o"]})
    assert "without a bad word" in refusal(response, 400)["message"]
    response = client.post("/v1/completions", json={**given, "min_tokens": 9})
    assert "choice, min_length" in refusal(response, 400)["message"]


@pytest.mark.parametrize(
    "given",
    [
        {"grammar": 'root ::= color | "no " color\ncolor ::= "red" | "blue"'},
        {"ebnf": 'root ::= color\n  | "no " color\ncolor ::= "red"\n  | "blue"'},
        {"guided_grammar": 'root ::= "no "? ("red" | "blue")'},
        {"structured_outputs": {"grammar": 'root ::= "no " ("red" | "blue")'}},
        {"guided_grammar": 'start: "no "? ("red" | "blue")'},
    ],
)  # fmt: skip
def test_a_grammar_in_gbnf_or_lark(client, given):
    answer = complete(client, prompt="a", n=4, seed=1, **given)
    for choice in answer["choices"]:
        assert choice["text"] in ("red", "blue", "no red", "no blue")
        assert choice["finish_reason"] == "stop"


def test_usage_has_each_count_that_clients_with_strict_types_expect(client):
    usage = complete(client, prompt=COUNT, max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"].keys() == {"cached_tokens", "audio_tokens"}
    names = ("reasoning", "audio", "accepted_prediction", "rejected_prediction")
    assert usage["completion_tokens_details"] == {f"{name}_tokens": 0 for name in names}


def test_usage_has_cached_tokens_and_may_be_continuous(client):
    prompt = list(range(40, 200))
    first = complete(client, prompt=prompt, max_tokens=1, cache_salt="usage")
    second = complete(client, prompt=prompt, max_tokens=1, cache_salt="usage")
    cached = [it["usage"]["prompt_tokens_details"]["cached_tokens"] for it in (first, second)]
    assert cached[0] == 0 and cached[1] >= 64
    options = {"continuous_usage_stats": True}
    found = chunks(client, prompt=COUNT, max_tokens=5, temperature=0, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts) and counts[-1] == 5


def test_what_has_no_effect_is_taken(client):
    body = {"user": "a", "store": True, "metadata": {"x": 1}, "service_tier": "auto"}
    answer = complete(client, prompt="a", request_id="mine", n=None, **body)
    assert answer["id"] == "mine"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "needs echo"),
        ({"max_tokens": 512}, "max_tokens", "lower max_tokens to at most 511"),
        ({"prompt": [3] * 512}, "prompt", "This model's maximum context length is 512 tokens."),
        ({"max_tokens": 10**12}, "max_tokens", "This model's maximum context length is 512 tok"),
        ({"max_completion_tokens": 1e300}, "max_completion_tokens", "is not exact"),
        ({"prompt": [3, 640]}, "prompt", "prompt[1] = 640 is outside 0 to 639"),
        ({"prompt": [3, -1]}, "prompt", "prompt[1] = -1 is outside 0 to 639"),
        ({"prompt": [640] * 600}, "prompt", "your prompt resulted in 600 tokens"),
        ({"prompt": ""}, "prompt", "has 0 characters, and needs at least 1"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"best_of": 3}, "best_of", "best_of = 3"),
        ({"stream_options": {}}, "stream_options", "stream = true"),
        ({"beam_width": 2}, "beam_width", "use_beam_search"),
        ({"use_beam_search": True, "n": 9}, "n", "n = 9 exceeds --max-beam-width = 4"),
        ({"use_beam_search": True, "stop": "a"}, "stop", "beam search"),
        ({"logit_bias": {"640": 1}}, "logit_bias", "outside 0 to 639"),
        ({"stop_token_ids": [700]}, "stop_token_ids[0]", "outside 0 to 639"),
        ({"min_tokens": 11, "max_tokens": 10}, "min_tokens", "min_tokens = 11 must be at most 10"),
        ({"min_tokens": 17}, "min_tokens", "17 must be at most 16, the maximum number of new"),
        ({"guided_regex": "("}, "guided_regex", "guided_regex"),
        ({"guided_regex": "a", "bad_words": ["a"]}, None, "without a bad word"),
        ({"temperature": -1e-31}, "temperature", "-1e-31 is outside 0 to 100"),
        ({"seed": 2**65}, "seed", "is outside -9223372036854775808 to 18446744073709551615"),
        ({"echo": True, "max_tokens": 0, "logprobs": 1, "prompt": [3] * 512}, "prompt", "511"),
        ({"model": "other"}, "model", "does not exist: use '"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_come_before_the_first_event(client, body, param, message, stream):
    if stream and "stream_options" in body:
        return
    if stream and "use_beam_search" in body:
        param, message = "stream", "beam search"
    response = client.post("/v1/completions", json={"prompt": "a", **body, "stream": stream})
    error = refusal(response, 404 if param == "model" else 400)
    assert error["param"] == param and message in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"bad_words": "a" * 257}, "bad_words", "has 257 characters, at most 256 are allowed"),
        (
            {"bad_words": ["a" * 256] * 33},
            "bad_words",
            "8448 characters are given, at most 8192 are",
        ),
        ({"prompt": ["a"] * 1024, "n": 128}, None, "the call makes 131072 requests"),
        ({"x" * 1001: 1}, "x" * 1000 + "...", "'xx"),
        ({"x" * 1000: 1}, "x" * 1000, "'xx"),
        ({"guided_grammar": "a" * 5000}, "guided_grammar", "..."),
    ],
    ids=["long word", "long words", "many", "long name", "longest name", "long grammar"],
)
def test_what_is_too_much_is_refused_in_few_words(client, body, param, message):
    error = refusal(client.post("/v1/completions", json={"prompt": "a", **body}), 400)
    assert error["param"] == param and message in error["message"]
    assert len(error["message"]) < 1100


def test_beams_are_choices_best_first(client):
    body = {"prompt": ["Tom had", COUNT], "use_beam_search": True, "n": 2, "logprobs": 0}
    answer = complete(client, beam_width=4, max_tokens=8, ignore_eos=True, **body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]
    assert sums[0] >= sums[1] and sums[2] >= sums[3]
    assert answer["usage"]["completion_tokens"] == 32


def test_a_deadline(client):
    scored = {"prompt": COUNT, "deadline_s": 1e-9, "prompt_logprobs": 1, "n": 2}
    ended = joined(chunks(client, **scored))  # before the prompt was read
    assert [choice["finish_reason"] for choice in ended] == ["length", "length"]
    assert [choice["stop_reason"] for choice in ended] == ["timeout", "timeout"]
    body = {"prompt": COUNT, "max_tokens": 400, "ignore_eos": True, "deadline_s": 0.05}
    refusal(client.post("/v1/completions", json=body), 504)
    (late,) = joined(chunks(client, **body))
    assert (late["finish_reason"], late["stop_reason"]) == ("length", "timeout")
