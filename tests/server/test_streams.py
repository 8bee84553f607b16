"""A stream says what the whole answer says, field by field, whatever a request asks for."""

from fuzz import FUZZ
from http_answers import choices_of, frames, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

COUNT = "Count from 1 to 12:"
PROMPTS = [COUNT, COUNT, "Tom had a red ball. ", "17 + 25 =", "Cost: 5 €", [66, 67, 300]]
STOPS = ["2, 3", "3, 4, 5", "had a ", "42", "o", " a", "\n", "€", "zzz"]
FORMS = [
    {"structured_outputs": {"regex": "([a-fü€ ]{1,3},){2,4}x"}},
    {"response_format": {"type": "json_object"}},
    {"guided_choice": ["red ball", "red car", "blue"]},
]
STOP = st.lists(st.sampled_from(STOPS), max_size=3)
SEED = st.integers(-(2**63), 2**64 - 1)
SHARED = {
    "n": st.integers(1, 3),
    "temperature": st.sampled_from([0, 0.7, 1.5, 4]),
    "max_tokens": st.integers(4, 24),
    "include_stop_str_in_output": st.booleans(),
    "stop_token_ids": st.lists(st.integers(0, 639), max_size=3),
    "min_tokens": st.integers(0, 8),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "bad_words": st.lists(st.sampled_from(["e", " 4", "ball"]), min_size=1),
    "prompt_logprobs": st.integers(0, 3),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
}
OPTIONS = st.fixed_dictionaries(
    {},
    optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()},
)
COMPLETIONS = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=2),
        "seed": SEED,
        "stop": STOP,
    },
    optional={**SHARED, "logprobs": st.integers(0, 4), "echo": st.booleans()},
)
CHATS = st.fixed_dictionaries(
    {
        "content": st.sampled_from(PROMPTS[:5]),
        "seed": SEED,
        "stop": STOP,
        "logprobs": st.booleans(),
    },
    optional={
        **SHARED,
        "top_logprobs": st.integers(0, 20),
        "prefill": st.sampled_from([" 4", "€"]),
    },
)
FORM = st.sampled_from([{}, {}, {}, *FORMS])
BOUNDED = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}


def both(client, path, body, options):
    """The whole answer, and the chunks of the stream; None for what is refused both ways."""
    whole = client.post(path, json=body)
    streamed = client.post(path, json={**body, "stream": True, "stream_options": options})
    if whole.status_code != 200:
        error = whole.json()["error"]
        assert whole.status_code == 400, error
        told = streamed.json() if streamed.status_code != 200 else frames(streamed)[-1]
        kinds = [it["code"] for it in (error, told["error"])]
        assert kinds[0] == kinds[1]
        return None
    assert streamed.status_code == 200, streamed.text
    return whole.json(), frames(streamed)


def check_usage(whole, chunks, options):
    """Returns the chunks that have choices."""
    usage = whole["usage"]
    counts = [chunk.get("usage", "absent") for chunk in chunks]
    if options.get("include_usage"):
        *chunks, last = chunks
        assert last["choices"] == []
        counts.pop()
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert last["usage"][name] == usage[name]
    if options.get("continuous_usage_stats"):
        told = [it["completion_tokens"] for it in counts]
        assert told == sorted(told) and told[-1] == usage["completion_tokens"]
        assert {it["prompt_tokens"] for it in counts} == {usage["prompt_tokens"]}
    else:
        assert set(counts) == {"absent"}
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    return chunks


def cut(text, stops):
    """Before the stop string that is complete first; the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


def check_stops(client, body, whole):
    """The texts are those without stop strings, up to the first one."""
    if not body["stop"] or {"echo", "min_tokens", "include_stop_str_in_output"} & body.keys():
        return
    free = client.post("/v1/completions", json={**body, "stop": []}).json()
    for one, other in zip(free["choices"], whole["choices"], strict=True):
        assert other["text"] == cut(one["text"], body["stop"])


@settings(max_examples=8 * FUZZ, **BOUNDED)
@given(body=COMPLETIONS, form=FORM, options=OPTIONS)
def test_completions(client, body, form, options):
    found = both(client, "/v1/completions", {**body, **form}, options)
    if found is not None:
        whole, chunks = found
        check_stops(client, {**body, **form}, whole)
        chunks = check_usage(whole, chunks, options)
        same(choices_of(chunks), whole["choices"])


@settings(max_examples=6 * FUZZ, **BOUNDED)
@given(given_body=CHATS, form=FORM, options=OPTIONS)
def test_chats(client, given_body, form, options):
    body = {**given_body, **form, "max_tokens": given_body.get("max_tokens", 20)}
    body["messages"] = [{"role": "user", "content": body.pop("content")}]
    if not body["logprobs"]:
        body.pop("top_logprobs", None)
    if "prefill" in body:
        body["messages"].append({"role": "assistant", "content": body.pop("prefill")})
        body["continue_final_message"] = True
    found = both(client, "/v1/chat/completions", body, options)
    if found is not None:
        whole, chunks = found
        chunks = check_usage(whole, chunks, options)
        for key in ("prompt_token_ids", "prompt_logprobs"):
            assert [key in chunk for chunk in chunks[1:]] == [False] * (len(chunks) - 1)
            same(chunks[0].get(key), whole.get(key))
        told = choices_of(chunks)
        for choice in told:
            choice["message"] = {**choice.pop("delta"), "refusal": None}
            if choice["logprobs"] is None and body["logprobs"]:
                choice["logprobs"] = {"content": [], "refusal": None}
        same(told, whole["choices"])
