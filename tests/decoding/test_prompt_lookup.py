"""Guesses: what is proposed, how often, and that they never change an output."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from fuzz import ALL_CASES
from hypothesis import given
from hypothesis import strategies as st

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    PromptLookup,
    SchedulerConfig,
)
from gptmanager.decoding.prompt_lookup import Drafter, DrafterState
from gptmanager.testing import ContractChecker, RecordingCallbacks

VOCAB_SIZE = 50

# What is proposed --------------------------------------------------------------------------


def test_the_longest_repeated_end_is_continued_as_it_was_the_last_time():
    drafter = Drafter(PromptLookup(max_draft_tokens=3, max_ngram=2, min_ngram=1), VOCAB_SIZE)
    assert drafter.propose([1, 2, 3, 1, 2], 9) == [3, 1, 2]
    assert drafter.propose([1, 2, 3, 1, 2, 4, 1, 2], 9) == [4, 1, 2]
    assert drafter.propose([1, 2, 3, 1, 2, 4, 1, 2, 9, 2], 9) == [9, 2, 9]
    assert drafter.propose([1, 2, 3, 1, 2, 4, 1, 2, 9, 2, 7], 9) == []


def test_a_limit_is_kept_and_nothing_follows_nothing():
    drafter = Drafter(PromptLookup(max_ngram=1, min_ngram=1), VOCAB_SIZE)
    assert drafter.propose([5], 9) == []
    assert drafter.propose([5, 6, 5], 1) == [6]
    assert drafter.propose([5, 6, 5, 6, 5], 0) == []


def test_a_virtual_token_is_looked_up_but_never_guessed():
    drafter = Drafter(PromptLookup(max_ngram=2, min_ngram=2), VOCAB_SIZE)
    assert drafter.propose([50, 5, 6, 7, 50, 5], 9) == [6, 7]
    assert drafter.propose([50, 5, 6, 7, 50, 5, 6, 7], 9) == []


def test_more_is_guessed_after_right_guesses_and_less_after_wrong_ones():
    drafter = Drafter(PromptLookup(max_draft_tokens=10, max_ngram=1, min_ngram=1), VOCAB_SIZE)
    text = [1] * 50
    assert len(drafter.propose(text, 99)) == 4
    drafter.learn_result(4, 4)
    assert len(drafter.propose(text, 99)) == 8
    drafter.learn_result(8, 2)
    assert len(drafter.propose(text, 99)) == 3
    rests = []
    for _ in range(8):
        drafter.learn_result(1, 0)
        count = 0
        while not (drafts := drafter.propose(text, 99)):
            count += 1
        assert len(drafts) == 1
        rests.append(count)
    assert rests == [1, 2, 4, 8, 16, 32, 32, 32]
    drafter.learn_result(1, 1)
    assert len(drafter.propose(text, 99)) == 2


def test_a_state_is_restored_if_its_values_are_in_range():
    drafter = Drafter(PromptLookup(max_draft_tokens=10), VOCAB_SIZE)
    for state in (DrafterState(0, 0, 0), DrafterState(10, 9, 32)):
        drafter.restore(state)
        assert drafter.state() == state
    for wrong in ((-1, 0, 0), (11, 0, 0), (1, -1, 0), (1, 0, -1), (1, 0, 33)):
        with pytest.raises(ValueError, match="is out of range"):
            drafter.restore(DrafterState(*wrong))


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 3), st.integers(1, 3))
def test_a_proposal_is_what_followed_the_same_tokens(text, smallest, extra):
    config = PromptLookup(max_draft_tokens=4, max_ngram=smallest + extra - 1, min_ngram=smallest)
    drafter = Drafter(config, VOCAB_SIZE)
    for end in range(1, len(text) + 1):
        known = text[:end]
        expected = []
        for size in range(min(config.max_ngram, end - 1), smallest - 1, -1):
            places = [i for i in range(size, end) if known[i - size : i] == known[end - size :]]
            if places:
                expected = known[places[-1] :]
                while len(expected) < 4:
                    expected = expected + expected
                break
        assert drafter.propose(known, 99) == expected[:4]


# Whole managers ----------------------------------------------------------------------------


def serve(source, requests, lookup=None, policy=None, max_tokens=4096, **options):
    host = RecordingCallbacks(requests)
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    policy = policy or CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    with GptManager(
        source,
        ModelType.INFLIGHT_FUSED_BATCHING,
        2,
        SchedulerConfig(policy),
        checker.get_inference_requests,
        checker.send_response,
        return_batch_manager_stats_cb=host.return_batch_manager_stats,
        optional_params=OptionalParams(
            kv_cache_config=KvCacheConfig(max_tokens=max_tokens, tokens_per_block=8),
            speculative_decoding_config=lookup,
            deterministic=True,
            **options,
        ),
    ) as manager:
        assert manager.wait_idle(60)
    checker.check(manager)
    return host


def mixed_requests():
    """Texts that repeat; greedy and sampled, with penalties, ends, processors, and two beams."""
    chance = np.random.default_rng(3)
    requests = []
    for i in range(10):
        options = {"temperature": 0.7, "random_seed": i} if i % 3 == 0 else {}
        if i % 2:
            options["repetition_penalty"] = 0.9
        if i % 4 == 1:
            options["stop_words_list"] = [[17], [4, 8]]
        if i == 8:
            options = {"beam_width": 2}
        if i == 6:
            options["logits_post_processor"] = prefers_even_tokens
        prompt = chance.integers(0, 96, 12).tolist()
        requests.append(
            InferenceRequest.from_tokens(
                *(i, prompt + prompt[:9], 40),
                is_streaming=i % 2 == 0,
                return_log_probs=True,
                return_generation_logits=i % 4 == 0,
                **options,
            )
        )
    return requests


def prefers_even_tokens(request_id, logits, tokens, stream, client_id):
    logits[..., len(tokens[0]) % 2 :: 2] += 1.0


def joined(host, request_id):
    """Everything that a request was told, but when."""
    names = ["output_ids", "output_log_probs"]
    if request_id % 4 == 0:
        names.append("generation_logits")
    parts = [response.tensors for response in host.of(request_id)]
    return [torch.cat([part[name] for part in parts], dim=2) for name in names]


@pytest.fixture(scope="module")
def unguessed(source):
    host = serve(source, mixed_requests())
    return {i: joined(host, i) for i in range(10)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"run_ahead": 1},
        {"enable_trt_overlap": True, "max_batch_size": 4},
        {"enable_chunked_context": True, "max_num_tokens": 24},
        {"policy": CapacitySchedulerPolicy.MAX_UTILIZATION, "max_tokens": 160},
    ],
    ids=str,
)
@pytest.mark.every(3)
def test_guesses_show_nowhere_bit_by_bit(source, unguessed, options):
    host = serve(source, mixed_requests(), PromptLookup(min_ngram=1), **options)
    statistics = json.loads(host.statistics[-1])["gptmanager"]
    counts = statistics["draft_tokens"]
    assert counts["drafted"] > counts["accepted"] > 10 and not statistics["logits_errors"]
    for i in range(10):
        for ours, theirs in zip(joined(host, i), unguessed[i], strict=True):
            assert torch.equal(ours, theirs), i


def test_a_hosts_greedy_guesses_save_steps(source):
    prompt = [3, 1, 4, 1, 5]
    (request,) = [InferenceRequest.from_tokens(1, prompt, 12)]
    expected = serve(source, [request]).output(1)
    request = InferenceRequest.from_tokens(1, prompt, 12, draft_input_ids=expected[5:13])
    host = serve(source, [request])
    assert host.output(1) == expected
    assert len(host.statistics) == 12 - 8


def test_guesses_of_a_host_cost_tokens_of_one_step_alone(source):
    """In each step one of four prompts fits beside all that generate."""
    prompt = [3, 1, 4, 1, 5]
    first = serve(source, [InferenceRequest.from_tokens(1, prompt, 1)]).output(1)[5]
    wrong = {"draft_input_ids": [(first + 1) % VOCAB_SIZE]}
    requests = [InferenceRequest.from_tokens(i, prompt, 6, **wrong) for i in range(4)]
    host = serve(source, requests, max_num_tokens=3 + len(prompt) + 1)
    assert len(host.statistics) == 3 + 6


def test_drawn_drafts_lead_to_the_same_tokens_under_any_schedule(source):
    """In chunks, none, some or all of them have room at the end of their context."""
    chance, requests = np.random.default_rng(7), []
    for i in range(6):
        prompt, drafts = chance.integers(0, 96, 12 + i).tolist(), chance.integers(0, 96, 6)
        own = {"temperature": 40.0, "random_seed": i, "return_log_probs": True}
        own |= {"draft_input_ids": drafts, "draft_logits": np.zeros((6, 96), np.float32)}
        requests.append((i, prompt, 9, own))

    def outputs(**options):
        made = [InferenceRequest.from_tokens(*given, **own) for *given, own in requests]
        host = serve(source, made, **options)
        counts = json.loads(host.statistics[-1])["gptmanager"]["draft_tokens"]
        return [joined(host, i)[:2] for i in range(6)], counts

    expected, counts = outputs()
    assert counts["drafted"] == 36 and counts["accepted"] > 18
    chunks = {"enable_chunked_context": True, "max_num_tokens": 16}
    for options in (
        {"lookup": PromptLookup(min_ngram=1)},
        {"policy": CapacitySchedulerPolicy.MAX_UTILIZATION, "max_tokens": 64},
    ):
        found, fewer = outputs(**chunks, **options)
        assert fewer["drafted"] != 36
        for ours, theirs in zip(found, expected, strict=True):
            assert all(map(torch.equal, ours, theirs)), options


@pytest.mark.every(2)
@pytest.mark.parametrize("drawn_from", [range(96), (79, 18, 26, 20, 50)])
def test_sampled_guesses_leave_the_distribution_as_it_is(source, drawn_from):
    """Chi-squared over first tokens, where guesses come from quite another distribution.

    Or from a few of its tokens, as top-k leaves them: all else is -inf, though it may be likely.
    """
    prompt, count = [3, 1, 4, 1, 5], 1500 if ALL_CASES else 600
    chance = np.random.default_rng(0)
    draft_logits = torch.from_numpy(chance.normal(0, 1.5, (1, 96)).astype(np.float32))
    banned = torch.ones(96, dtype=torch.bool)
    banned[list(drawn_from)] = False
    draft_logits[:, banned] = -torch.inf
    q = torch.softmax(draft_logits[0].double(), 0).numpy()

    def first_tokens(guessing):
        options = {"temperature": 2.0, "runtime_top_k": 12}
        requests = []
        for i in range(count):
            seed = i if guessing else 10**6 + i
            if guessing:
                options["draft_input_ids"] = [int(chance.choice(96, p=q))]
                options["draft_logits"] = draft_logits
            requests.append(InferenceRequest.from_tokens(i, prompt, 2, random_seed=seed, **options))
        host = serve(source, requests, max_batch_size=256)
        counts = json.loads(host.statistics[-1])["gptmanager"]["draft_tokens"]
        tokens = [host.output(i)[5] for i in range(count)]
        return np.bincount(tokens, minlength=96), counts

    guessed, counts = first_tokens(guessing=True)
    plain, _ = first_tokens(guessing=False)
    assert counts["drafted"] == count and 10 < counts["accepted"] < count / 2
    both = guessed + plain
    used = both > 0
    statistic = ((guessed - plain)[used] ** 2 / both[used]).sum()
    assert used.sum() == 12
    assert statistic < 31.3, statistic  # chi-squared of 11 degrees of freedom: p = 0.001


def test_where_all_is_banned_no_guess_is_taken(source):
    asked = InferenceRequest.from_tokens(
        1,
        [5, 6],
        4,
        temperature=1.0,
        draft_input_ids=[3, 4],
        draft_logits=np.zeros((2, 96), np.float32),
        embedding_bias=np.full(96, -np.inf, np.float32),
    )
    error = serve(source, [asked]).final(1).error
    assert error.startswith("LogitsError: no token is possible as generated token 1 (iteration 0)")


def test_what_cannot_be_guessed_is_named(source):
    def refusal(**by_name):
        (response,) = serve(
            source, [InferenceRequest.from_tokens(1, [1, 2, 3], 4, **by_name)]
        ).responses
        return response.error

    assert "draft_input_ids must not be given with beam_width = 2" in refusal(
        beam_width=2, draft_input_ids=[1]
    )
    assert "draft_input_ids must not be given with num_return_sequences = 2" in refusal(
        num_return_sequences=2, draft_input_ids=[1]
    )
    assert "Undefined tensor: draft_input_ids, but draft_logits" in refusal(
        draft_logits=torch.zeros(1, 96)
    )
    text = "draft_logits has 2 rows, draft_input_ids 1 tokens"
    assert text in refusal(draft_input_ids=[1], draft_logits=torch.zeros(2, 96))
    logits = torch.zeros(2, 96)
    logits[1, 7] = -torch.inf
    text = (
        "draft_logits[1, 7] = -inf, but draft_input_ids[1] = 7: this token cannot have been sampled"
    )
    assert text in refusal(draft_input_ids=[7, 7], draft_logits=logits)
    assert not refusal(draft_input_ids=[7, 8], draft_logits=logits)
    for odd in (torch.nan, torch.inf):
        logits[1, 5] = odd
        text = f"draft_logits[1, 5] = {odd} is not finite"
        assert text in refusal(draft_input_ids=[7, 8], draft_logits=logits)
    assert "(3 + 200) exceeds maximum input length (159)" in refusal(draft_input_ids=[1] * 200)
