"""Rows from which no token can be chosen: NaN, +inf, or everything banned. They end their requests.

Every way of choosing meets every kind of such a row, beside neighbors whose tokens must be those of
a run without it. GPTMANAGER_FUZZ=n: n times as many runs.
"""

from __future__ import annotations

import functools
import json
import random

import numpy as np
import pytest
import torch
from devices import GPU, LLAMA, NO_ADAPTERS, checkpoint, finals, prompt, there_is
from fuzz import FUZZ

from gptmanager import (
    CapacitySchedulerPolicy,
    FinishReason,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    PromptLookup,
)
from gptmanager.decoding.end_rule import EndRule
from gptmanager.decoding.processors.raw_kernel import RawKernelLogitsPostProcessor
from gptmanager.decoding.search.beam_search import BeamParams, ParallelSampling
from gptmanager.step import BeamCandidates
from gptmanager.testing import RecordingCallbacks

pytestmark = pytest.mark.every(3)

NUM_RUNS = 3 * FUZZ
VOCAB_SIZE = LLAMA["vocab_size"]
from_tokens = InferenceRequest.from_tokens

WAYS = {
    "greedy": {},
    "temperature": {"temperature": 0.9},
    "top_k": {"runtime_top_k": 5},
    "wide top_k": {"runtime_top_k": 90, "runtime_top_p": 0.9},
    "top_p": {"runtime_top_p": 0.8},
    "min_p": {"runtime_min_p": 0.1, "return_log_probs": True},
    "beams": {"beam_width": 3, "return_log_probs": True},
    "texts": {"num_return_sequences": 3, "temperature": 1.0},
    "drafts": {"draft_input_ids": [3, 4, 5]},
    "drawn drafts": {
        "temperature": 1.0,
        "draft_input_ids": [3, 4],
        "draft_logits": np.zeros((2, VOCAB_SIZE), np.float32),
    },
}
FIELDS = np.dtype([("value", np.float32), ("from_length", np.int32)], align=True)
SPOIL = """
struct Params { float value; int from_length; };
extern "C" __global__ void spoil(
    float* logits, const int* rows, const int* slots, const Params* params, const int* lengths,
    const int* prompt_lengths, const int* tokens, int max_seq_len, int vocab_size) {
    const Params& mine = params[slots[blockIdx.x]];
    if (lengths[blockIdx.x] < mine.from_length) return;
    for (int i = threadIdx.x; i < vocab_size; i += blockDim.x)
        logits[size_t(rows[blockIdx.x]) * vocab_size + i] = mine.value;
}
"""


def spoil_by_numpy(logits, rows, slots, params, lengths, *others):
    for row, slot, length in zip(rows, slots, lengths, strict=True):
        if length >= params[slot]["from_length"]:
            logits[row] = params[slot]["value"]


@functools.cache
def kernel():
    return RawKernelLogitsPostProcessor(SPOIL, "spoil", FIELDS, block=32, twin=spoil_by_numpy)


def writes(value, length, token=...):
    """Into all logits, or those of a token, of histories of so many tokens or more."""

    def write(request_id, logits, tokens, stream, client_id):
        if len(tokens[0]) >= length:
            logits[..., token] = value

    return write


class Together:
    def __init__(self, value, length):
        self.write = writes(value, length)

    def process_batch(self, request_ids, logits, tokens, stream, client_ids):
        for one, history in zip(logits, tokens, strict=True):
            self.write(0, one, history, stream, None)


NOT_FINITE, NO_TOKEN = "hold NaN or +inf", "no token is possible"
VALUES = {torch.nan: NOT_FINITE, torch.inf: NOT_FINITE, -torch.inf: NO_TOKEN}
ONLY = np.where(np.arange(VOCAB_SIZE) == 7, 0, -np.inf).astype(np.float32)


def odd_row(chance, start, place):
    """What to ask for, that the `place`-th generated token cannot be chosen, and what is said."""
    value = chance.choice(list(VALUES))
    length = start + place - 1
    number = f"generated token {place} "
    asked = {
        "callable": lambda: {"logits_post_processor": writes(value, length)},
        "together": lambda: {"logits_post_processor": Together(value, length)},
        "kernel": lambda: {"logits_post_processor": kernel().bind(value=value, from_length=length)},
    }
    others = {
        "one logit": lambda: (
            {"logits_post_processor": writes(value, length, chance.randrange(VOCAB_SIZE))},
            NOT_FINITE,
            number,
        ),
        "bias": lambda: (
            {"embedding_bias": np.full(VOCAB_SIZE, -np.inf)},
            f"{NO_TOKEN} as generated token 1 ",
            "embedding_bias",
        ),
        "bad words": lambda: (
            {"bad_words_list": [[token] for token in range(VOCAB_SIZE)]},
            f"{NO_TOKEN} as generated token 1 ",
            "bad_words_list",
        ),
        "end": lambda: (
            {"embedding_bias": ONLY, "end_id": 7, "min_length": 4},
            f"{NO_TOKEN} as generated token 1 ",
            "embedding_bias, min_length",
        ),
        "n-grams": lambda: (
            {"embedding_bias": ONLY, "noRepeatNgramSize": 1},
            NO_TOKEN,
            "embedding_bias, noRepeatNgramSize",
        ),
    }
    kind = chance.choice([*asked, *others])
    if kind in asked:
        return asked[kind](), VALUES[value], number
    if kind == "one logit" and value == -torch.inf:
        value = torch.nan
    return others[kind]()


def prompt_of(chance):
    """Some repeat themselves, so that prompt lookup guesses."""
    return prompt(chance.randrange(90), chance.randint(2, 12)) * chance.randint(1, 3)


def random_requests(seed):
    """(requests, by id of those that must fail what the errors say)."""
    chance = random.Random(seed)
    requests, errors = [], {}
    for request_id in range(1, chance.randint(5, 9)):
        tokens = prompt_of(chance)
        way = dict(WAYS[chance.choice(list(WAYS))])
        streams = chance.random() < 0.3 and "beam_width" not in way
        odd = {}
        if chance.random() < 0.5:
            odd, *errors[request_id] = odd_row(chance, len(tokens), chance.randint(1, 5))
        asked = {**way, **odd, "random_seed": chance.randrange(9)}
        requests.append(
            from_tokens(request_id, tokens, chance.randint(6, 12), is_streaming=streams, **asked)
        )
    return requests, errors


def random_options(seed):
    chance = random.Random(-seed)
    policy = chance.choice(list(CapacitySchedulerPolicy))
    return {
        "policy": policy,
        "max_beam_width": 3,
        "run_ahead": chance.randint(0, 1),
        "cache": KvCacheConfig(
            max_tokens=512, tokens_per_block=16, enable_block_reuse=chance.random() < 0.5
        ),
        "max_num_tokens": chance.choice([64, 256]),
        "enable_chunked_context": True,
        "speculative_decoding_config": chance.choice([None, PromptLookup()]),
        "deterministic": True,
    }


def check_run(device, seed):
    requests, errors = random_requests(seed)
    options = random_options(seed)
    together = finals(requests, device, LLAMA, **options)
    requests, _ = random_requests(seed)
    sound = [request for request in requests if request.request_id not in errors]
    expected = {final.request_id: final for final in finals(sound, device, LLAMA, **options)}
    for final in together:
        if final.request_id in errors:
            assert final.error.startswith("LogitsError: "), (seed, final, errors)
            assert all(text in final.error for text in errors[final.request_id]), (seed, final)
        else:
            tensors = expected[final.request_id].tensors
            assert not final.error, (seed, final)
            assert torch.equal(final.tensors["output_ids"], tensors["output_ids"]), (seed, final)


@pytest.mark.parametrize("seed", range(8 * NUM_RUNS))
@pytest.mark.every(3)
def test_odd_rows_end_their_own_requests_alone(seed):
    check_run("cpu", seed)


@pytest.mark.parametrize("device", ["emulator", GPU])
@pytest.mark.parametrize("seed", range(1000, 1000 + NUM_RUNS))
def test_odd_rows_end_their_own_requests_alone_on_a_device(device, seed):
    check_run(there_is(device), seed)


# A model that is broken, all of it or one token ---------------------------------------------------


def broken_checkpoint(name, index):
    """Weights of which some are NaN; with an empty index none is."""
    state = dict(checkpoint(tuple(sorted(LLAMA.items(), key=str))))
    state[name] = state[name].clone()
    state[name][index] = torch.nan
    return LLAMA, state


def manager_of(model, host, device, max_tokens=512, **options):
    options = {
        "kv_cache_config": KvCacheConfig(
            max_tokens, tokens_per_block=16, enable_block_reuse=options.pop("reuse", False)
        ),
        "max_batch_size": 4,
        "deterministic": True,
        "peft_cache_manager_config": NO_ADAPTERS,
        **options,
    }
    return GptManager(
        model,
        ModelType.INFLIGHT_FUSED_BATCHING,
        3,
        optional_params=OptionalParams(device=device, **options),
        **host.keywords(),
    )


def run(model, requests, device, **options):
    """The finals by request id, of a manager that is as sound as before."""
    host = RecordingCallbacks(requests)
    with manager_of(model, host, device, **options) as manager:
        assert manager.wait_idle(120), manager.exception
        assert manager.audit().ok and manager.health().alive
    return host


DEVICES = ["cpu", "emulator", GPU]


@pytest.mark.parametrize("device", DEVICES)
def test_weights_of_nan_end_every_request_at_its_first_token(device):
    model = broken_checkpoint("model.layers.0.mlp.down_proj.weight", 3)
    host = RecordingCallbacks(
        [from_tokens(i, prompt(i, 9), 5, **way) for i, way in enumerate(WAYS.values())]
    )
    with manager_of(model, host, there_is(device)) as manager:
        assert manager.wait_idle(120), manager.exception
        host.submit(from_tokens(100, prompt(3, 5), 4, is_streaming=True))
        manager.notify()
        assert manager.wait_idle(120) and manager.health().alive
    responses = [host.final(i) for i in [*range(len(WAYS)), 100]]
    assert all("logits of generated token 1 (iteration " in one.error for one in responses)
    assert all("NaN or +inf; inputs of the request" in one.error for one in responses)
    assert json.loads(host.statistics[-1])["gptmanager"]["logits_errors"] == len(WAYS) + 1


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_nan_reach_no_other_request(device, reuse):
    """One token's embedding is NaN: what is computed of it lies in blocks that others get then."""
    model = broken_checkpoint("model.embed_tokens.weight", 95)
    begin = prompt(5, 32)
    sound = [
        from_tokens(i, [*begin[: 8 * i], *prompt(40 + i, 9)], 7, bad_words_list=[[95]], **way)
        for i, way in enumerate([WAYS["top_p"], WAYS["beams"], WAYS["texts"], {}])
    ]
    odd = [
        from_tokens(100 + i, [*begin, *prompt(i % 2, 5 + i), 95, *prompt(9, 20)], 5, **way)
        for i, way in enumerate([WAYS["beams"], WAYS["texts"], WAYS["drafts"], {}])
    ]
    options = {"max_tokens": 144, "reuse": reuse}
    expected = run(model, sound, there_is(device), **options)
    host = run(
        model, [one for pair in zip(odd, sound, strict=True) for one in pair], device, **options
    )
    for one in odd:
        assert "logits of generated token 1 (" in host.final(one.request_id).error
    for one in sound:
        found = [given.final(one.request_id) for given in (host, expected)]
        assert not found[0].error
        assert torch.equal(*(final.tensors["output_ids"] for final in found)), one.request_id


def test_what_has_given_nan_is_not_found_in_the_cache():
    model = broken_checkpoint("model.embed_tokens.weight", 95)
    wrong, right = [*prompt(5, 40), 95, *prompt(9, 40)], prompt(50, 40)
    host = RecordingCallbacks([from_tokens(1, right, 3), from_tokens(2, wrong, 3)])
    with manager_of(model, host, "cpu", reuse=True) as manager:
        assert manager.wait_idle(120)
        counts = json.loads(host.statistics[-1])["gptmanager"]["block_reuse"]
        assert counts["cached_blocks"] == 3  # blocks of the other request
        host.submit(from_tokens(3, right, 3), from_tokens(4, wrong, 3))
        manager.notify()
        assert manager.wait_idle(120) and manager.audit().ok
    assert not host.final(3).error and host.final(4).error
    counts = json.loads(host.statistics[-1])["gptmanager"]["block_reuse"]
    assert counts["reused_tokens"] == 39


# Behind an end ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("streams", [False, True])
def test_odd_rows_after_an_end_count_for_nothing(device, streams):
    """Behind one of the tokens all are banned: that is an end, or an error."""
    there_is(device)
    asked = prompt(3, 6)
    model = broken_checkpoint("lm_head.weight", [])  # nothing is
    sound = run(model, [from_tokens(1, asked, 6)], "cpu").output(1)[len(asked) :]
    end = sound[2]
    assert end not in [*asked, *sound[:2]]
    banned = [[end, token] for token in range(VOCAB_SIZE)]
    kinds = [{}, {"draft_input_ids": sound}, {"num_return_sequences": 2}, {"beam_width": 2}]
    requests = [
        from_tokens(
            10 * (end_id >= 0) + place,
            asked,
            6,
            end_id=end_id,
            is_streaming=streams,
            bad_words_list=banned,
            **kind,
        )
        for end_id in (end, -1)
        for place, kind in enumerate(kinds)
    ]
    host = run(model, requests, device, run_ahead=1)
    for place in (10, 11, 12):
        final = host.final(place)
        assert not final.error, final
        assert (final.tensors["finish_reasons"] == FinishReason.END_ID).all()
        assert host.output(place)[-2:] == sound[:2]
    for place in (0, 1, 2):
        assert "no token is possible as generated token 4 (" in host.final(place).error
        if streams and place < 2:  # earlier tokens are sent
            assert host.output(place) == sound[:3]
    assert not host.final(13).error and not host.final(3).error  # other beams go on
    assert end not in host.output(3)[len(asked) * (not streams) : -1]


def test_a_text_that_has_ended_needs_no_token():
    texts = ParallelSampling(BeamParams(2, sampled=True), EndRule(9, frozenset({3})))
    assert not texts.advance(BeamCandidates(((3,), (5,)), ((-1.0,), (-1.0,))))
    assert not texts.advance(BeamCandidates(((-1,), (6,)), ((0.0,), (-1.0,))))
    assert texts.tokens == [0, 6] and not texts.fault
    assert texts.advance(BeamCandidates(((-2,), (-1,)), ((0.0,), (0.0,)))) and texts.fault == -1


@pytest.mark.parametrize("device", DEVICES)
def test_a_search_without_a_beam_that_goes_on_is_an_error(device):
    """And one of which a beam has ended is none."""
    for_all = np.where(np.isin(np.arange(VOCAB_SIZE), (7, 8)), 0, -np.inf)
    more = {"beam_width": 2, "embedding_bias": for_all}
    banned = [[token, after] for token in (7, 8) for after in (7, 8)]
    requests = [
        from_tokens(1, prompt(3, 6), 6, bad_words_list=banned, **more),
        from_tokens(2, prompt(3, 6), 6, bad_words_list=banned, end_id=7, **more),
        from_tokens(3, prompt(3, 6), 6, **more),
    ]
    host = run(broken_checkpoint("lm_head.weight", []), requests, there_is(device))
    assert "no token is possible as generated token 2 (iteration 1)" in host.final(1).error
    assert host.final(2).tensors["finish_reasons"][0, 0] == FinishReason.END_ID
    assert len(host.output(3)) == 12
