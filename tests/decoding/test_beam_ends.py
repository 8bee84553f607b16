"""Searches in which many tokens may end a beam, against the definition and against transformers.

GPTMANAGER_FUZZ=10 tries ten times as many (3,000 searches by the class, 300 by managers).
"""

from __future__ import annotations

import functools

import beam_oracle
import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, checkpoint, random_model
from fuzz import FUZZ

from gptmanager import GptManager, InferenceRequest, ModelType
from gptmanager.decoding.end_rule import EndRule
from gptmanager.decoding.search.beam_search import BeamParams, BeamSearch
from gptmanager.decoding.stop_words import StopWords
from gptmanager.step import BeamCandidates
from gptmanager.testing import RecordingCallbacks

VOCAB_SIZE = 96


def logits_after(seed, likely, vocab_size, text):
    """Any, but for tokens that are `likely`."""
    chance = np.random.default_rng([seed, len(text), *text])
    logits = chance.normal(scale=1.5, size=vocab_size).astype(np.float32)
    logits[likely] += chance.normal(3.0, 1.5, len(likely)).astype(np.float32)
    if seed % 5 == 4:  # a rule that permits few tokens
        logits[chance.permutation(vocab_size)[3:]] = -np.inf
    return logits


def log_softmax(logits):
    return torch.log_softmax(torch.from_numpy(logits)[None], dim=1)[0].numpy()


def random_search(chance, vocab_size):
    """What the definition takes: (width, tokens, words, penalty, stopping)."""
    num_ends = int(chance.integers(0, 9))
    words = [[int(token)] for token in chance.permutation(vocab_size)[:num_ends]]
    for _ in range(chance.integers(0, 3)):
        words.append(chance.integers(0, vocab_size, int(chance.integers(2, 4))).tolist())
    return (
        int(chance.integers(2, 5)),
        int(chance.integers(1, 12)),
        words,
        float(chance.choice([0.0, 1.0, 0.5, -0.7, 2.0, 2.0])),
        int(chance.choice([0, 1, 2, 2])),
    )


def best_of(rows, count):
    """The `count` best of each row, as an executor brings them."""
    order = np.argsort(-rows, axis=1, kind="stable")[:, :count]
    values = np.take_along_axis(rows, order, 1)
    return BeamCandidates(*(tuple(map(tuple, part.tolist())) for part in (order, values)))


def found_by_class(log_probs_after, width, max_new_tokens, words, len_penalty, early_stopping):
    """The last word of one token is the end id."""
    singles = [word for word in words if len(word) == 1]
    end_id = singles[-1][0] if singles else -1
    beam_search = BeamSearch(
        BeamParams(width, len_penalty, early_stopping),
        EndRule(
            max_new_tokens,
            end_ids=frozenset({end_id} - {-1}),
            stop_words=StopWords([word for word in words if word != [end_id]]),
        ),
    )
    assert width <= beam_search.num_candidates <= width + len(words)
    texts = [()]
    while True:
        rows = np.stack([log_probs_after(text) for text in texts])
        if beam_search.advance(best_of(rows, beam_search.num_candidates)):
            return [
                (tuple(node.token for node in found.node.path()), np.float32(found.score))
                for found in beam_search.hypotheses()
            ]
        texts = [tuple(node.token for node in live.path()) for live in beam_search.live]


def test_searches_with_many_ends_are_those_of_the_definition():
    for seed in range(300 * FUZZ):
        chance = np.random.default_rng(seed)
        vocab_size = int(chance.choice([3, 12, 40]))
        own = random_search(chance, vocab_size)
        likely = [word[-1] for word in own[2]]

        @functools.cache
        def log_probs_after(text, seed=seed, likely=likely, vocab_size=vocab_size):
            return log_softmax(logits_after(seed, likely, vocab_size, text))

        assert found_by_class(log_probs_after, *own) == beam_oracle.search(log_probs_after, *own)


class LogitsOfTheText:
    """A logits post-processor: what comes next depends on the generated text alone."""

    def __init__(self, seed, likely, prompt_len):
        self._given = seed, likely, VOCAB_SIZE
        self._prompt_len = prompt_len

    def __call__(self, request_id, logits, tokens, stream, client_id):
        texts = (tuple(history[self._prompt_len :]) for history in tokens)
        rows = np.stack([logits_after(*self._given, text) for text in texts])
        logits[0] = torch.from_numpy(rows)


def asked(request_id, own, prompt):
    width, max_new_tokens, words, len_penalty, early_stopping = own
    singles = [word for word in words if len(word) == 1]
    return InferenceRequest.from_tokens(
        *(request_id, prompt, max_new_tokens),
        beam_width=width,
        end_id=singles[-1][0] if singles else None,
        stop_words_list=words,
        len_penalty=len_penalty,
        early_stopping=early_stopping,
        include_stop_in_output=True,
        logits_post_processor=LogitsOfTheText(
            request_id, [word[-1] for word in words], len(prompt)
        ),
    )


def beams_of(final, start):
    ids, lengths = final.tensors["output_ids"][0], final.tensors["sequence_length"][0]
    return [tuple(row[start:length].tolist()) for row, length in zip(ids, lengths, strict=True)]


@pytest.fixture(scope="module")
def llama():
    return random_model(CONFIGS["llama"])


def test_managed_searches_with_many_ends_are_those_of_the_definition(llama):
    chance = np.random.default_rng(8)
    searches = {i: random_search(chance, VOCAB_SIZE) for i in range(30 * FUZZ)}
    for i in range(0, len(searches), 2):  # searches that go on though many beams have ended
        words = [[int(token)] for token in chance.permutation(VOCAB_SIZE)[:8]]
        searches[i] = (2 + i % 3, 10, words, 2.0, 2)
    host = RecordingCallbacks([asked(i, own, [1, 2, 3]) for i, own in searches.items()])
    source = checkpoint(llama)
    with GptManager(source, ModelType.INFLIGHT_FUSED_BATCHING, 4, **host.keywords()) as manager:
        assert manager.wait_idle(60 * FUZZ)
    for i, own in searches.items():

        @functools.cache
        def log_probs_after(text, seed=i, likely=tuple(word[-1] for word in own[2])):
            return log_softmax(logits_after(seed, list(likely), VOCAB_SIZE, text))

        expected = [text for text, _ in beam_oracle.search(log_probs_after, *own)]
        found = beams_of(host.final(i), 3)
        assert found[: len(expected)] == expected, i
        assert not any(found[len(expected) :])


@pytest.mark.parametrize("early_stopping", [0, 1, 2])
def test_six_ends_are_those_of_transformers(llama, early_stopping):
    chance = np.random.default_rng(early_stopping)
    peers, requests = {}, []
    for i in range(7):
        prompt = chance.integers(0, 96, 5).tolist()
        with torch.inference_mode():
            likely = llama(torch.tensor([prompt])).logits[0, -1].topk(12).indices
        ends = chance.permutation(likely.numpy())[:6].tolist()
        peers[i] = llama.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=10,
            early_stopping={0: False, 1: True, 2: "never"}[early_stopping],
            eos_token_id=ends,
            pad_token_id=ends[0],
        )
        requests.append(
            InferenceRequest.from_tokens(
                *(i, prompt, 10),
                beam_width=3,
                early_stopping=early_stopping,
                end_id=ends[0],
                stop_words_list=[[end] for end in ends[1:]],
                include_stop_in_output=True,
            )
        )
    host = RecordingCallbacks(requests)
    source = checkpoint(llama)
    with GptManager(source, ModelType.INFLIGHT_FUSED_BATCHING, 3, **host.keywords()) as manager:
        assert manager.wait_idle(60)
    num_ended = 0
    for i, peer in peers.items():
        for row, beam in zip(peer.tolist(), beams_of(host.final(i), 0), strict=True):
            assert tuple(row[: len(beam)]) == beam
            assert len(set(row[len(beam) :])) <= 1  # padding
            num_ended += len(beam) < 15
    assert num_ended


def test_a_thousand_stop_words_add_as_many_candidates_as_they_have_last_tokens():
    words = [[first, last] for first in range(100) for last in range(10)]
    search = BeamSearch(
        BeamParams(4), EndRule(5, frozenset({3}), stop_words=StopWords([*words, []]))
    )
    assert search.num_candidates == 4 + 10
    words = [[token] for token in range(1000)]
    search = BeamSearch(BeamParams(4), EndRule(5, frozenset({2000}), stop_words=StopWords(words)))
    assert search.num_candidates == 4 + 1001


def test_more_stop_words_than_there_are_tokens(llama):
    """Every token but one ends its beam; the candidates are the whole vocabulary."""
    words = [[token] for token in range(95)] * 11
    asked = InferenceRequest.from_tokens(
        *(1, [5, 6], 4), beam_width=2, early_stopping=2, stop_words_list=words
    )
    host = RecordingCallbacks([asked])
    source = checkpoint(llama)
    with GptManager(source, ModelType.INFLIGHT_FUSED_BATCHING, 2, **host.keywords()) as manager:
        assert manager.wait_idle(60)
    final = host.final(1)
    assert not final.error and final.tensors["finish_reasons"].shape == (1, 2)
