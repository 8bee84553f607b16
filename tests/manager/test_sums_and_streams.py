"""`cum_log_probs` is the sum of what was sent; a stream holds back what may be cut, and no more."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from gptmanager import FinishReason, GptManager, InferenceRequest, ModelType
from gptmanager.testing import RecordingCallbacks

PROMPT = [5, 9, 2]
KINDS = {
    "a text": {},
    "a sampled text": {"temperature": 1.5, "random_seed": 3},
    "texts": {"num_return_sequences": 3, "temperature": 1.5, "random_seed": 3},
    "beams": {"beam_width": 3, "early_stopping": 2},
    "fewer beams": {"beam_width": 4, "num_return_sequences": 2},
}


def serve(source, requests):
    host = RecordingCallbacks(requests)
    with GptManager(source, ModelType.INFLIGHT_FUSED_BATCHING, 4, **host.keywords()) as manager:
        assert manager.wait_idle(60)
    return host


def rows_of(host, request_id):
    """Return all that was sent for each beam: its log probabilities, and the last sum."""
    parts = [response.tensors for response in host.of(request_id)]
    assert not host.final(request_id).error
    found = []
    for beam in range(parts[-1]["cum_log_probs"].shape[1]):
        lengths = [int(part["sequence_length"][0, beam]) for part in parts]
        if "output_offset" not in parts[0]:  # the prompt is with it
            lengths = [max(0, lengths[0] - len(PROMPT))]
        pieces = [
            part["output_log_probs"][0, beam, :length]
            for part, length in zip(parts, lengths, strict=True)
        ]
        so_far = 0.0
        for part, piece in zip(parts, pieces, strict=True):
            so_far += piece.double().sum().item()
            sent = part["cum_log_probs"][0, beam].item()
            assert sent == pytest.approx(so_far, abs=1e-5) or sent == -np.inf
        found.append((torch.cat(pieces), parts[-1]["finish_reasons"][0, beam].item()))
    return found


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.every(2)
def test_sums_are_those_of_what_was_sent(source, streaming, include):
    """Whether texts end by an id, a word of several tokens, or their length, or are stopped."""
    ends = [{"end_id": 40}, {"stop_words_list": [[token] for token in range(0, 96, 7)]}, {}]
    words = [list(pair) for pair in itertools.product(range(0, 96, 3), range(96))]
    ends += [{"stop_words_list": words, "end_id": 40}, {"stop_words_list": words[::2]}]
    requests = [
        InferenceRequest.from_tokens(
            *(number, PROMPT, 12),
            is_streaming=streaming,
            include_stop_in_output=include,
            return_log_probs=True,
            **{**kind, **end},
        )
        for number, (kind, end) in enumerate(itertools.product(KINDS.values(), ends))
    ]
    host = serve(source, requests)
    reasons = {r for i in range(len(requests)) for _, r in rows_of(host, i)}
    assert reasons >= {FinishReason.STOP_WORDS, FinishReason.LENGTH}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_cancelled_request_sums_up_what_was_sent(source, kind):
    host = RecordingCallbacks()
    asked = InferenceRequest.from_tokens(
        1, PROMPT, 100, is_streaming=kind == "a text", return_log_probs=True, **KINDS[kind]
    )
    started = []

    def stops(record):
        started.append(record)
        return {1} if len(started) > 3 else set()

    keywords = host.keywords()
    keywords["poll_stop_signal_cb"] = lambda: stops(1)
    host.submit(asked)
    with GptManager(source, ModelType.INFLIGHT_FUSED_BATCHING, 4, **keywords) as manager:
        assert manager.wait_idle(60)
    for log_probs, reason in rows_of(host, 1):
        assert reason == FinishReason.CANCELLED and 0 < len(log_probs) < 100


def test_the_end_of_a_beam_is_in_the_sum_if_it_is_in_the_output(source):
    def sums(include):
        asked = InferenceRequest.from_tokens(
            *(1, PROMPT, 4),
            beam_width=2,
            stop_words_list=[[token] for token in range(96)],
            include_stop_in_output=include,
            return_log_probs=True,
        )
        return serve(source, [asked]).final(1).tensors["cum_log_probs"][0].tolist()

    assert sums(False) == [0.0, 0.0]
    assert max(sums(True)) < 0


# Streams -----------------------------------------------------------------------------------


def sent_lengths(source, words, include, count, prompt=PROMPT, **options):
    """How many tokens each response but the final one had brought, all in all."""
    asked = InferenceRequest.from_tokens(
        *(1, prompt, count),
        is_streaming=True,
        stop_words_list=words,
        include_stop_in_output=include,
        **options,
    )
    *partial, _ = serve(source, [asked]).of(1)
    counts = [int(response.tensors["sequence_length"][0, 0]) for response in partial]
    return list(itertools.accumulate(counts))


@pytest.fixture(scope="module")
def text(source):
    """A greedy text of eight tokens, no two alike, and the prompt that it follows."""
    prompts = [[token, 9, 2] for token in range(96)]
    host = serve(source, [InferenceRequest.from_tokens(*(i, prompts[i], 8)) for i in range(96)])
    texts = (host.output(i) for i in range(96))
    return next(own for own in texts if len({*own[3:]}) == 8)


def test_a_stream_that_keeps_stop_words_holds_nothing_back(source):
    words = [[token, 95, 95] for token in range(96)]
    assert sent_lengths(source, words, True, 8) == list(range(1, 8))
    assert len(sent_lengths(source, words, False, 8)) < 7


def test_beams_that_keep_stop_words_hold_nothing_back(source):
    """What all share, and no word is ever completed."""
    options = {"beam_width": 2}
    plain = serve(source, [InferenceRequest.from_tokens(1, PROMPT, 24, **options)]).final(1)
    best = plain.tensors["output_ids"][0, 0, 3:].tolist()
    words = [[*best[:10], next(token for token in range(96) if token != best[10])]]
    shared = sent_lengths(source, None, False, 24, **options)
    assert shared and shared == sent_lengths(source, words, True, 24, **options)
    assert shared != sent_lengths(source, words, False, 24, **options)


def test_a_stream_holds_back_what_may_be_cut_and_no_more(source, text):
    """The beginning of a word of three tokens may be cut as long as two more may come."""
    other = next(token for token in range(96) if token not in text)
    word = [text[-2], text[-1], other]  # its end would come behind the last token
    assert sent_lengths(source, [word], False, 8, text[:3]) == list(range(1, 8))
    word = [text[-3], text[-2], other]  # once the second has come, one more may
    assert sent_lengths(source, [word], False, 8, text[:3]) == [1, 2, 3, 4, 5]
    word = [text[-4], text[-3], other]
    assert sent_lengths(source, [word], False, 8, text[:3]) == [1, 2, 3, 4, 7]


def test_a_word_with_the_end_id_in_it_holds_nothing_back(source, text):
    end_id = next(token for token in range(96) if token not in text)
    words = [[token, end_id, token] for token in text]
    assert sent_lengths(source, words, False, 8, text[:3], end_id=end_id) == list(range(1, 8))
    assert len(sent_lengths(source, words, False, 8, text[:3])) < 7
