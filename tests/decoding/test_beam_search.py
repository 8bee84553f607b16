"""Beam search against transformers' own, and by hand where that has no counterpart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, checkpoint, random_model
from fuzz import FUZZ
from hypothesis import given, settings
from hypothesis import strategies as st

from gptmanager import (
    CapacitySchedulerPolicy,
    FinishReason,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.callbacks import BannedTokens
from gptmanager.decoding.end_rule import EndRule
from gptmanager.decoding.sampling.random_numbers import derive_seed
from gptmanager.decoding.search.beam_search import BeamParams, BeamSearch
from gptmanager.decoding.search.beam_state import (
    _NODE_VALUES,
    BeamEndState,
    BeamNodeState,
    beam_state,
    restore_beams,
)
from gptmanager.decoding.stop_words import StopWords
from gptmanager.step import BeamCandidates
from gptmanager.testing import ContractChecker, RecordingCallbacks


def candidates_of(log_probs, beam_search):
    """The best of each row of `log_probs` `[beams, vocab]`, as many as the search asks for."""
    best = log_probs.sort(dim=-1, descending=True, stable=True)
    count = beam_search.num_candidates
    return BeamCandidates(
        tuple(map(tuple, best.indices[:, :count].tolist())),
        tuple(map(tuple, best.values[:, :count].tolist())),
    )


def tokens_of(hypothesis):
    return [node.token for node in hypothesis.node.path()]


def search(model, prompt, beam_search):
    """Run the search to its end, every beam computed from its first token."""
    texts = [[]]
    while True:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + text for text in texts])).logits[:, -1].float()
        log_probs = torch.log_softmax(logits, dim=-1)
        if beam_search.advance(candidates_of(log_probs, beam_search)):
            return beam_search.hypotheses()
        texts = [[node.token for node in live.path()] for live in beam_search.live]


@pytest.fixture(scope="module")
def llama():
    return random_model(CONFIGS["llama"])


@pytest.mark.every(9)
@pytest.mark.parametrize("early_stopping", [0, 1, 2])
@pytest.mark.parametrize("len_penalty", [0.0, 1.0, -0.7, 2.5])
@pytest.mark.parametrize("width", [2, 3, 5])
def test_ids_and_scores_are_those_of_transformers(llama, width, len_penalty, early_stopping):
    chance = np.random.default_rng([width, early_stopping, int(len_penalty * 10) + 10])
    num_ended = 0
    for _ in range(8):
        prompt = chance.integers(0, 96, int(chance.integers(1, 12))).tolist()
        max_new_tokens = int(chance.integers(2, 14))
        with torch.inference_mode():  # a likely token, so that beams do end
            likely = llama(torch.tensor([prompt])).logits[0, -1].topk(3).indices
        end_id = int(chance.choice(likely.numpy()))
        peer = llama.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_new_tokens,
            length_penalty=len_penalty,
            early_stopping={0: False, 1: True, 2: "never"}[early_stopping],
            eos_token_id=end_id,
            pad_token_id=95,
            return_dict_in_generate=True,
            output_scores=True,
        )
        params = BeamParams(width, len_penalty, early_stopping)
        found = search(
            llama, prompt, BeamSearch(params, EndRule(max_new_tokens, frozenset({end_id})))
        )
        assert len(found) == width
        for row, score, hypothesis in zip(
            peer.sequences.tolist(), peer.sequences_scores.tolist(), found, strict=True
        ):
            tokens = tokens_of(hypothesis)
            assert row[len(prompt) :][: len(tokens)] == tokens
            assert set(row[len(prompt) + len(tokens) :]) <= {95, end_id}
            assert hypothesis.score == pytest.approx(score, rel=1e-4)
            num_ended += hypothesis.reason is FinishReason.END_ID
    assert num_ended


def distribution(*probabilities):
    return torch.log(torch.tensor(probabilities))


def test_the_end_counts_in_the_score_but_is_not_output():
    beam_search = BeamSearch(BeamParams(2), EndRule(3, frozenset({0})))
    assert not beam_search.advance(candidates_of(distribution([0.5, 0.3, 0.2]), beam_search))
    assert beam_search.parents == [0, 0] and beam_search.tokens == [1, 2]
    (ended,) = beam_search.ended
    assert ended.end == 0 and ended.reason is FinishReason.END_ID
    assert ended.score == pytest.approx(np.log(0.5))
    rows = distribution([0.1, 0.6, 0.3], [0.2, 0.2, 0.6])
    assert not beam_search.advance(candidates_of(rows, beam_search))
    assert beam_search.tokens == [1, 2] and beam_search.parents == [0, 1]
    assert beam_search.advance(candidates_of(rows, beam_search))
    found = beam_search.hypotheses()
    assert [tokens_of(hypothesis) for hypothesis in found] == [[0], [1, 1, 1]]
    assert found[1].cum_log_prob == pytest.approx(np.log(0.3 * 0.6 * 0.6))
    assert found[1].score == pytest.approx(np.log(0.3 * 0.6 * 0.6) / 3)
    assert found[1].reason is FinishReason.LENGTH and found[1].end == 3


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_word_ends_its_beam_alone(include):
    words = StopWords([[1, 2]])
    beam_search = BeamSearch(BeamParams(2), EndRule(3, stop_words=words, include_stop=include))
    rows = distribution([0.1, 0.6, 0.3], [0.2, 0.2, 0.6])
    assert not beam_search.advance(candidates_of(rows[:1], beam_search))
    assert beam_search.tokens == [1, 2]
    assert beam_search.stable_length() == 0  # the first beam may yet become a stop word
    assert not beam_search.advance(candidates_of(rows, beam_search))
    (ended,) = beam_search.ended
    assert tokens_of(ended) == [1, 2] and ended.reason is FinishReason.STOP_WORDS
    assert ended.end == (2 if include else 0)
    assert [tokens_of_node(node) for node in beam_search.live] == [[1, 1], [2, 2]]


def tokens_of_path(path):
    return [step.token for step in path]


def tokens_of_node(node):
    return tokens_of_path(node.path())


def test_a_cut_off_search_ranks_its_live_beams_with_the_ended_ones():
    beam_search = BeamSearch(BeamParams(2), EndRule(9, frozenset({0})))
    beam_search.advance(candidates_of(distribution([0.1, 0.6, 0.3]), beam_search))
    beam_search.advance(
        candidates_of(distribution([0.9, 0.05, 0.05], [0.1, 0.1, 0.8]), beam_search)
    )
    assert [tokens_of(h) for h in beam_search.ended] == [[1, 0]]
    found = beam_search.hypotheses(FinishReason.CANCELLED)
    assert [tokens_of(h) for h in found] == [[1, 0], [2, 2]]
    assert [h.reason for h in found] == [FinishReason.END_ID, FinishReason.CANCELLED]


def test_a_vocabulary_smaller_than_the_beams_gives_what_there_is():
    beam_search = BeamSearch(BeamParams(5), EndRule(2))
    assert not beam_search.advance(candidates_of(distribution([0.75, 0.25]), beam_search))
    assert len(beam_search.live) == 5
    rows = distribution(*[[0.75, 0.25]] * 5)
    assert beam_search.advance(candidates_of(rows, beam_search))
    found = beam_search.hypotheses()
    assert sorted(map(tokens_of, found)) == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_a_restart_forgets_everything():
    beam_search = BeamSearch(BeamParams(2), EndRule(3, frozenset({0})))
    rows = distribution([0.5, 0.3, 0.2], [0.2, 0.2, 0.6])
    beam_search.advance(candidates_of(rows[:1], beam_search))
    beam_search.restart()
    assert not beam_search.ended and not beam_search.live
    beam_search.advance(candidates_of(rows[:1], beam_search))
    assert len(beam_search.ended) == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"live": (0,)}, "1 beams live and 1 ended of 2"),
        ({"live": (0, 1, 2)}, "3 beams live and 1 ended of 2"),
        ({"ended": (BeamEndState(0, FinishReason.END_ID, 0, -1),) * 3}, "2 beams live and 3 ended"),
        ({"live": (0, 3)}, "out of range, of 2 beams and 3 nodes"),
        ({"live": (0, -1)}, "out of range, of 2 beams and 3 nodes"),
        ({"parents": (0, 2)}, "out of range, of 2 beams and 3 nodes"),
        ({"nodes": (BeamNodeState(0, 0, 1, 0),) * 3}, "beam node 0 cannot follow node 0"),
    ],
)
def test_a_state_of_beams_that_contradicts_itself_is_refused(changes, text):
    def new_search():
        return BeamSearch(BeamParams(2), EndRule(3, frozenset({0})))

    search = new_search()
    search.advance(candidates_of(distribution([0.5, 0.3, 0.2]), search))
    state = beam_state(search).make()
    assert [end.beam for end in state.ended] == [-1]  # only samples have beams of their own
    restored = new_search()
    restore_beams(restored, state)
    assert beam_state(restored).make() == state
    with pytest.raises(ValueError, match=text):
        restore_beams(new_search(), state._replace(**changes))


def test_a_state_and_its_size_include_all_nodes_of_beams_that_share_none():
    search = BeamSearch(BeamParams(2), EndRule(9))
    search.advance(candidates_of(distribution([0.5, 0.4, 0.1]), search))
    for _ in range(4):
        search.advance(candidates_of(distribution(*[[0.98, 0.01, 0.01]] * 2), search))
    state = beam_state(search)
    made, restored = state.make(), BeamSearch(BeamParams(2), EndRule(9))
    assert len(made.nodes) == 10 and state.num_values >= 10 * _NODE_VALUES
    restore_beams(restored, made)
    assert beam_state(restored).make() == made


def test_without_live_beams_the_best_ended_one_is_stable():
    search = BeamSearch(BeamParams(2), EndRule(3, frozenset({0, 1})))
    assert search.advance(candidates_of(distribution([0.7, 0.3]), search))
    assert not search.live and tokens_of_path(search.stable_path()) == [0]


@settings(max_examples=75 * FUZZ, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(3, 7),
    st.integers(1, 8),
    st.sampled_from([0, 1, 2]),
    st.integers(0, 2**32 - 1),
)
def test_what_was_stable_stays(width, vocab_size, max_new_tokens, early_stopping, seed):
    """The stable tokens of every step begin all beams of all later steps, and the results."""
    chance = np.random.default_rng(seed)
    words = StopWords([[1, 2], [2]]) if seed % 2 else None
    params = BeamParams(width, 1.0, early_stopping)
    beam_search = BeamSearch(params, EndRule(max_new_tokens, frozenset({0}), stop_words=words))
    stable = []
    is_over = False
    while not is_over:
        beams = len(beam_search.live) or 1
        rows = torch.from_numpy(chance.dirichlet(np.ones(vocab_size) * 0.3, beams)).log()
        is_over = beam_search.advance(candidates_of(rows.clamp(min=-50.0), beam_search))
        results = [tokens_of(h)[: h.end] for h in beam_search.hypotheses()]
        texts = results if is_over else [tokens_of_node(node) for node in beam_search.live]
        assert all(text[: len(stable)] == stable for text in texts)
        if not is_over:
            length = beam_search.stable_length()
            assert length >= len(stable)
            stable = tokens_of_path(beam_search.stable_path()[:length])
    scores = [hypothesis.score for hypothesis in beam_search.hypotheses()]
    assert scores == sorted(scores, reverse=True)
    assert beam_search.length <= max_new_tokens


# Whole managers ----------------------------------------------------------------------------


def serve(source, requests, **options):
    host = RecordingCallbacks(requests)
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    model_type = options.pop("model_type", ModelType.INFLIGHT_FUSED_BATCHING)
    policy = options.pop("policy", CapacitySchedulerPolicy.GUARANTEED_NO_EVICT)
    max_tokens = options.pop("max_tokens", 4096)
    with GptManager(
        source,
        model_type,
        4,
        SchedulerConfig(policy),
        checker.get_inference_requests,
        checker.send_response,
        optional_params=OptionalParams(
            kv_cache_config=KvCacheConfig(max_tokens=max_tokens, tokens_per_block=8),
            **{"max_batch_size": 4, **options},
        ),
    ) as manager:
        assert manager.wait_idle(60)
    checker.check(manager)
    return host


def beams_of(response):
    ids, lengths = response.tensors["output_ids"], response.tensors["sequence_length"]
    return [ids[0, i, :length].tolist() for i, length in enumerate(lengths[0].tolist())]


def mixed_requests():
    """Return requests with one beam and with several, as (prompt, new tokens, width) by id."""
    chance = np.random.default_rng(4)
    return {
        i: (
            chance.integers(0, 96, int(chance.integers(1, 30))).tolist(),
            int(chance.integers(2, 20)),
            1 + i % 4,
        )
        for i in range(12)
    }


@pytest.fixture(scope="module")
def mixed_beams(llama):
    """Return what transformers generates for each of `mixed_requests`, by id."""
    return {
        i: llama.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        ).tolist()
        for i, (prompt, max_new_tokens, width) in mixed_requests().items()
    }


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"run_ahead": 1},
        {"enable_trt_overlap": True, "max_batch_size": 2},
        {"enable_chunked_context": True, "max_num_tokens": 16},
        {"policy": CapacitySchedulerPolicy.MAX_UTILIZATION, "max_tokens": 256},
        {"model_type": ModelType.V1},
        {"model_type": ModelType.INFLIGHT_BATCHING},
    ],
    ids=str,
)
def test_managed_beams_of_mixed_widths_are_those_of_transformers(llama, mixed_beams, options):
    requests = mixed_requests()
    host = serve(
        checkpoint(llama),
        [
            InferenceRequest.from_tokens(i, p, n, beam_width=w, is_streaming=i % 3 == 0)
            for i, (p, n, w) in requests.items()
        ],
        **options,
    )
    for i, (prompt, _, _) in requests.items():
        *partial, final = host.of(i)
        assert final.is_final and not final.error
        sent = [token for response in partial for token in beams_of(response)[0]]
        found = [(sent if i % 3 == 0 else []) + beam for beam in beams_of(final)]
        first = len(prompt) if i % 3 == 0 else 0
        assert found == [row[first:] for row in mixed_beams[i]]


def test_a_search_that_cannot_be_is_refused_by_name(llama):
    def refusal(**by_name):
        request = InferenceRequest.from_tokens(1, [1, 2, 3], 100, **by_name)
        (response,) = serve(checkpoint(llama), [request], max_tokens=160).responses
        return response.error

    assert "beam_width = 5" in refusal(beam_width=5) and "4" in refusal(beam_width=5)
    assert "runtime_top_k = 2 with beam_width = 2" in refusal(beam_width=2, runtime_top_k=2)
    assert "temperature = 0 with beam_width = 2" in refusal(beam_width=2, temperature=0.0)
    text = "2 beams of 3 + 100 tokens need 26 KV cache blocks of 8 tokens, the cache has 20"
    assert text in refusal(beam_width=2)


@pytest.mark.parametrize("len_penalty", [1e3, -1e3, 1e30, -1e30])
@pytest.mark.parametrize("early_stopping", [0, 1, 2])
def test_a_length_penalty_may_be_any_number(llama, len_penalty, early_stopping):
    options = {"beam_width": 3, "len_penalty": len_penalty, "early_stopping": early_stopping}
    asked = InferenceRequest.from_tokens(1, [5, 6, 7], 6, end_id=8, **options)
    assert len(beams_of(serve(checkpoint(llama), [asked]).final(1))) == 3


def test_of_equal_tokens_the_lowest_are_looked_at(llama):

    def flat(request_id, logits, tokens, stream, client_id):
        logits.fill_(-1.0)
        logits[..., 40] = 0.0

    asked = InferenceRequest.from_tokens(1, [5], 2, beam_width=3, logits_post_processor=flat)
    assert beams_of(serve(checkpoint(llama), [asked]).final(1)) == [
        [5, 40, 40],
        [5, 40, 0],
        [5, 40, 1],
    ]


def test_a_bias_of_minus_infinity_leaves_no_beam(llama):
    bias = np.where(np.arange(96) == 4, 0, -np.inf).astype(np.float32)
    asked = InferenceRequest.from_tokens(
        1, [5], 3, beam_width=2, embedding_bias=bias, return_log_probs=True
    )
    final = serve(checkpoint(llama), [asked]).final(1)
    assert beams_of(final)[0] == [5, 4, 4, 4]
    assert final.tensors["cum_log_probs"].tolist() == [[0.0, -np.inf]]


@pytest.mark.parametrize("streaming", [False, True])
def test_log_probabilities_and_logits_are_those_of_each_beam(llama, streaming):
    prompt, new, width = [5, 9, 2, 40], 9, 3
    request = InferenceRequest.from_tokens(
        *(1, prompt, new),
        beam_width=width,
        len_penalty=0.0,
        is_streaming=streaming,
        return_log_probs=True,
        return_generation_logits=True,
        return_context_logits=True,
    )
    host = serve(checkpoint(llama), [request])
    parts = [response.tensors for response in host.of(1)]
    log_probs, logits = (
        torch.cat([part[name] for part in parts], dim=2)
        for name in ("output_log_probs", "generation_logits")
    )
    assert log_probs.shape == (1, width, new) and logits.shape == (1, width, new, 96)
    texts = [[] for _ in range(width)]
    for response in host.of(1):
        for text, beam in zip(texts, beams_of(response), strict=True):
            text += beam
    generated = torch.tensor(texts)[:, -new:]
    chosen = torch.log_softmax(logits[0], dim=-1).gather(2, generated[:, :, None].long())
    torch.testing.assert_close(chosen[:, :, 0], log_probs[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_probs.sum(2), parts[-1]["cum_log_probs"], atol=1e-5, rtol=1e-5)
    with torch.inference_mode():
        expected = llama(torch.cat([torch.tensor([prompt] * width), generated], dim=1)).logits
    torch.testing.assert_close(logits[0], expected[:, len(prompt) - 1 : -1], atol=1e-4, rtol=1e-4)
    (context,) = [
        part["context_logits"]
        for part in parts
        if "context_logits" in part and part["context_logits"].shape[1] > 1
    ]
    torch.testing.assert_close(context[0], expected[0, : len(prompt)], atol=1e-4, rtol=1e-4)
    for part in parts[:-1]:
        assert (
            list(part)
            == [
                *("output_ids", "sequence_length", "generation_logits", "output_log_probs"),
                *("cum_log_probs", "output_offset"),
            ]
            or "context_logits" in part
        )


class PrefersWhatFollows:
    """Adds to the logits of tokens near the last one: depends on each beam's own history."""

    def __init__(self):
        self.shapes = set()

    def __call__(self, request_id, logits, tokens, stream, client_id):
        self.shapes.add(tuple(logits.shape))
        assert logits.shape[:2] == (1, len(tokens))
        for row, text in zip(logits[0], tokens, strict=True):
            change(row, text)

    def process_batch(self, request_ids, logits_list, tokens_list, stream, client_ids):
        for arguments in zip(request_ids, logits_list, tokens_list, client_ids, strict=True):
            self(*arguments[:3], stream, arguments[3])


def change(row, text):
    row[(text[-1] + len(text)) % 96] += 3.0
    row[sum(text[-3:]) % 96] += 2.0


def searched_with_change(model, prompt, width, max_new_tokens):
    beam_search = BeamSearch(BeamParams(width), EndRule(max_new_tokens))
    texts = [[]]
    while True:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + text for text in texts])).logits[:, -1].clone()
            for row, text in zip(logits, texts, strict=True):
                change(row, prompt + text)
        rows = torch.log_softmax(logits, dim=-1)
        if beam_search.advance(candidates_of(rows, beam_search)):
            return [prompt + tokens_of(found) for found in beam_search.hypotheses()]
        texts = [[node.token for node in live.path()] for live in beam_search.live]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"policy": CapacitySchedulerPolicy.MAX_UTILIZATION, "max_tokens": 256}], ids=str
)
@pytest.mark.every(2)
def test_a_logits_post_processor_sees_each_beam_with_its_own_history(llama, batched, options):
    processor = PrefersWhatFollows()
    given = processor if batched else processor.__call__
    requests = mixed_requests()
    host = serve(
        checkpoint(llama),
        [
            InferenceRequest.from_tokens(
                *(i, p, n), beam_width=w, logits_post_processor=given if i % 3 else None
            )
            for i, (p, n, w) in requests.items()
        ],
        **options,
    )
    for i, (prompt, max_new_tokens, width) in requests.items():
        if i % 3:
            found = beams_of(host.final(i))
            assert found == searched_with_change(llama, prompt, width, max_new_tokens), i
    assert processor.shapes >= {(1, width, 96) for width in (1, 2, 3, 4)}


def test_a_kernel_processes_each_beam_as_a_row(llama):
    banned = BannedTokens(max_tokens=48)
    request = InferenceRequest.from_tokens(
        *(1, [5, 6, 7], 8), beam_width=3, logits_post_processor=banned.bind(range(48))
    )
    plain = InferenceRequest.from_tokens(2, [5, 6, 7], 8, beam_width=3)
    host = serve(checkpoint(llama), [request, plain])
    assert all(min(beam[3:]) >= 48 for beam in beams_of(host.final(1)))
    assert any(min(beam[3:]) < 48 for beam in beams_of(host.final(2)))


# Several texts of one prompt ---------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"run_ahead": 1},
        {"enable_trt_overlap": True, "max_batch_size": 2},
        {"enable_chunked_context": True, "max_num_tokens": 16},
        {"policy": CapacitySchedulerPolicy.MAX_UTILIZATION, "max_tokens": 256},
    ],
    ids=str,
)
def test_texts_of_one_prompt_are_those_of_as_many_requests(llama, options):
    """Bit by bit: the first with the request's own seed, the others with seeds derived from it."""
    source = checkpoint(llama)
    sampling = {"temperature": 1.5, "end_id": 7, "repetition_penalty": 1.2}
    sampling |= {"stop_words_list": [[3, 5], [11]], "return_log_probs": True}
    chance = np.random.default_rng(2)
    prompts = [chance.integers(0, 96, n).tolist() for n in (3, 25, 9, 14)]
    together = [
        InferenceRequest.from_tokens(
            i, p, 20, num_return_sequences=1 + i, random_seed=50 + i, **sampling
        )
        for i, p in enumerate(prompts)
    ]
    alone = [
        InferenceRequest.from_tokens(
            *(10 * i + k, p, 20),
            random_seed=50 + i if not k else derive_seed(50 + i, k),
            **sampling,
        )
        for i, p in enumerate(prompts)
        for k in range(1 + i)
    ]
    found = serve(source, together, deterministic=True, **options)
    expected = serve(source, alone, deterministic=True)
    for i in range(4):
        texts, final = beams_of(found.final(i)), found.final(i).tensors
        assert texts == [expected.output(10 * i + k) for k in range(1 + i)]
        for k in range(1 + i):
            peer = expected.final(10 * i + k).tensors
            assert final["finish_reasons"][0, k] == peer["finish_reasons"][0, 0]
            count = peer["output_log_probs"].shape[2]
            assert torch.equal(
                final["output_log_probs"][0, k, :count], peer["output_log_probs"][0, 0]
            )


def test_greedy_texts_are_all_alike_and_beams_may_be_fewer_than_were_searched(llama):
    requests = [
        InferenceRequest.from_tokens(1, [5, 6], 6, num_return_sequences=3),
        InferenceRequest.from_tokens(2, [5, 6], 6, beam_width=4, num_return_sequences=2),
        InferenceRequest.from_tokens(3, [5, 6], 6, beam_width=4),
        InferenceRequest.from_tokens(4, [5, 6], 6, num_return_sequences=5),
        InferenceRequest.from_tokens(5, [5, 6], 6, beam_width=2, num_return_sequences=3),
    ]
    host = serve(checkpoint(llama), requests)
    first, *others = beams_of(host.final(1))
    assert others == [first, first]
    assert beams_of(host.final(2)) == beams_of(host.final(3))[:2]
    assert "num_return_sequences = 5 exceeds max_beam_width = 4" in host.final(4).error
    assert "num_return_sequences = 3 exceeds beam_width = 2" in host.final(5).error


def test_odd_logits_of_a_processor_harm_its_own_request_alone(llama):
    def spoils(request_id, logits, tokens, stream, client_id):
        if len(tokens[0]) > 5:
            logits[:, 1, 3] = float("nan")

    prompt = [5, 6, 7]
    host = serve(
        checkpoint(llama),
        [
            InferenceRequest.from_tokens(1, prompt, 6, beam_width=3, logits_post_processor=spoils),
            InferenceRequest.from_tokens(2, prompt, 6, beam_width=3),
        ],
    )
    (alone,) = [
        serve(checkpoint(llama), [InferenceRequest.from_tokens(2, prompt, 6, beam_width=3)])
    ]
    assert beams_of(host.final(2)) == beams_of(alone.final(2))
    assert "logits of generated token 4 (iteration 3) hold NaN or +inf" in host.final(1).error
