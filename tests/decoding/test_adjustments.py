"""Bias, penalties and bans: each against transformers or its formula, and their order."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from gptmanager.decoding.sampling.sampling import Sampler
from gptmanager.request.input_rows import split_bias, token_bias
from gptmanager.request.sampling_params import SamplingParams

LENGTH = 24
NEUTRAL = SamplingParams()


def adjusted(
    logits: torch.Tensor, rows: list[tuple[SamplingParams, list[int], int]]
) -> torch.Tensor:
    """What the sampler makes of `logits [n, vocab]`; a row is (parameters, history, prompt_len)."""
    histories = np.full((len(rows) + 1, LENGTH), 10**6, dtype=np.int32)
    sampler = Sampler(len(rows) + 1, logits.shape[1], histories)
    slots = np.arange(len(rows), 0, -1)  # not the order of the rows
    for slot, (params, history, prompt_len) in zip(slots, rows, strict=True):
        histories[slot, : len(history)] = history
        sampler.load(slot, params, prompt_len)
    changed = logits.clone()
    lengths = np.array([len(history) for _, history, _ in rows])
    sampler.sample(changed, slots, lengths)
    return changed


def expected(
    row: torch.Tensor, params: SamplingParams, history: list[int], prompt_len: int
) -> torch.Tensor:
    """One row by transformers' processors; what they do not have by its formula, in float32."""
    scores = row.clone()[None]
    ids, values = map(torch.from_numpy, split_bias(params.embedding_bias))
    scores[0, ids.long()] += values
    tokens = torch.tensor([history])
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(tokens, scores)
    counts = torch.bincount(torch.tensor(history[prompt_len:]).long(), minlength=len(row))
    scores = scores - params.frequency_penalty * counts
    scores = scores - params.presence_penalty * (counts > 0)
    rest = LogitsProcessorList()
    if params.bad_words:
        words = [list(word) for word in params.bad_words]
        rest.append(NoBadWordsLogitsProcessor(words, eos_token_id=None))
    if params.no_repeat_ngram_size:
        rest.append(NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
    if params.min_length:
        rest.append(
            MinNewTokensLengthLogitsProcessor(prompt_len, params.min_length, list(params.end_ids))
        )
    result: torch.Tensor = rest(tokens, scores)[0]
    return result


@st.composite
def cases(draw: Any) -> tuple[torch.Tensor, list[tuple[SamplingParams, list[int], int]]]:
    """Logits and rows that ask for anything or nothing; small vocabularies, so that words recur."""
    vocab_size = draw(st.integers(1, 40))
    token = st.integers(0, min(vocab_size, draw(st.sampled_from([2, 5, 40]))) - 1)
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        history = draw(st.lists(token, min_size=1, max_size=LENGTH))
        words = st.lists(token, min_size=1, max_size=min(4, len(history))).map(tuple)
        ids = tuple(sorted(draw(st.sets(st.integers(0, vocab_size - 1)))))
        bias = st.sampled_from([0.5, -3.0, 1e4, float(np.finfo(np.float32).min)])
        params = dataclasses.replace(
            NEUTRAL,
            repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 1.3, 50.0])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.0, -2.0, 0.25])),
            presence_penalty=draw(st.sampled_from([0.0, 0.0, -2.0, 0.5])),
            no_repeat_ngram_size=draw(st.sampled_from([0, 0, 1, 2, 3, 5, 1000])),
            bad_words=tuple(draw(st.lists(words, max_size=3))),
            embedding_bias=token_bias(ids, [draw(bias) for _ in ids]),
            end_ids=tuple(draw(st.lists(token, min_size=1, max_size=4, unique=True))),
            min_length=draw(st.sampled_from([0, 0, 1, LENGTH])),
        )
        rows.append((params, history, draw(st.integers(1, len(history)))))
    seed = draw(st.integers(0, 1000))
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(seed))
    logits[draw(st.booleans()) :: 2, :: draw(st.integers(2, 9))] = draw(
        st.sampled_from([0.0, -torch.inf, 5.0])
    )
    return logits, rows


@given(cases())
def test_rows_are_those_of_transformers(
    case: tuple[torch.Tensor, list[tuple[SamplingParams, list[int], int]]],
) -> None:
    logits, rows = case
    changed = adjusted(logits, rows)
    for got, row, (params, history, prompt_len) in zip(changed, logits, rows, strict=True):
        wanted = expected(row, params, history, prompt_len)
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


@given(cases())
def test_what_beams_are_searched_by_is_adjusted_alike(
    case: tuple[torch.Tensor, list[tuple[SamplingParams, list[int], int]]],
) -> None:
    logits, rows = case
    histories = np.zeros((len(rows), LENGTH), dtype=np.int32)
    sampler = Sampler(len(rows), logits.shape[1], histories)
    for slot, (params, history, prompt_len) in enumerate(rows):
        histories[slot, : len(history)] = history
        sampler.load(slot, dataclasses.replace(params, temperature=0.7), prompt_len)
    lengths = np.array([len(history) for _, history, _ in rows])
    got = sampler.log_probs(logits.clone(), np.arange(len(rows)), lengths)
    changed = adjusted(logits, rows)
    wanted = (changed / 0.7).log_softmax(-1)
    wanted[changed.isneginf().all(dim=1)] = -torch.inf  # all is banned
    torch.testing.assert_close(got, wanted, equal_nan=True)


def one(logits: list[float], history: list[int], prompt_len: int, **params: Any) -> list[float]:
    changed = adjusted(torch.tensor([logits]), [(SamplingParams(**params), history, prompt_len)])
    values: list[float] = changed[0].tolist()
    return values


def test_repetition_counts_the_prompt_and_the_others_do_not() -> None:
    logits, history = [2.0, -2.0, 2.0, 2.0], [0, 1, 1, 2, 2]
    assert one(logits, history, 3, repetition_penalty=2.0) == [1.0, -4.0, 1.0, 2.0]
    assert one(logits, history, 3, presence_penalty=0.5) == [2.0, -2.0, 1.5, 2.0]
    assert one(logits, history, 3, frequency_penalty=0.5) == [2.0, -2.0, 1.0, 2.0]
    assert one(logits, history, 5, frequency_penalty=0.5) == logits


def test_the_order_shows_where_two_touch_the_same_token() -> None:
    both = {
        "embedding_bias": token_bias([0], [-3.0]),
        "repetition_penalty": 2.0,
        "presence_penalty": 1.0,
    }
    assert one([1.0, 0.0], [0], 0, **both) == [-5.0, 0.0]  # ((1 - 3) * 2) - 1


def test_a_bad_word_as_long_as_the_history_and_one_more_is_found() -> None:
    inf = float("inf")
    assert one([0.0] * 4, [1, 2], 2, bad_words=((1, 2, 3),)) == [0.0, 0.0, 0.0, -inf]
    assert one([0.0] * 4, [1, 2], 2, bad_words=((0, 1, 2, 3),)) == [0.0] * 4
    assert one([0.0] * 4, [1, 2], 2, bad_words=((0,), (), (2, 1))) == [-inf, -inf, 0.0, 0.0]


def test_a_history_longer_than_it_was_is_read_to_its_new_end() -> None:
    """What a step reads is the table, so a restart after a pause changes nothing."""
    histories = np.array([[3, 1, 1, 0, 0]], dtype=np.int32)
    sampler = Sampler(1, 8, histories)
    params = SamplingParams(frequency_penalty=1.0, no_repeat_ngram_size=2)
    seen = []
    for restarts in (False, True):
        histories[0, 2:] = 0
        sampler.load(0, params, 1)
        for length in (2, 3, 4):
            if restarts:
                sampler.load(0, params, 1)
            logits = torch.tensor([[0.0, 2.0, 0.0, 0.0, 1.5, 0.5, 0.0, 0.0]])
            token = sampler.sample(logits, np.array([0]), np.array([length]))[0]
            histories[0, length] = token
            seen.append((int(token), logits.tolist()))
    assert [token for token, _ in seen[:3]] == [4, 1, 5]
    assert seen[:3] == seen[3:]


def test_ids_beyond_the_vocabulary_are_passed_over() -> None:
    params = {"repetition_penalty": 2.0, "frequency_penalty": 1.0, "no_repeat_ngram_size": 1}
    assert one([1.0, 1.0], [1, 7, 2**31 - 1, -1], 0, **params) == [1.0, -float("inf")]
    ends = [SamplingParams(min_length=9, end_ids=(1, beyond)) for beyond in (3, -1)]
    rows = adjusted(torch.ones(2, 3), [(own, [0], 1) for own in ends])
    assert rows.tolist() == [[1.0, -float("inf"), 1.0]] * 2  # neither bans a token of the other


@pytest.mark.parametrize("greedy", [True, False])
def test_banned_tokens_never_come(greedy: bool) -> None:
    params = SamplingParams(greedy, bad_words=tuple((token,) for token in range(1, 50)))
    sampler = Sampler(1, 50, np.zeros((1, 1), dtype=np.int32))
    sampler.load(0, params, 0)
    tokens = sampler.sample(torch.rand(99, 50), np.zeros(99, dtype=np.int64), np.arange(99) % 2)
    assert not tokens.any()


def test_a_row_that_asks_for_nothing_is_not_touched() -> None:
    histories = np.zeros((1, 1), dtype=np.int32)
    sampler = Sampler(1, 100, histories)
    for params in (NEUTRAL, SamplingParams(bad_words=((),), end_ids=(3,))):
        sampler.load(0, params, 1)
        logits = torch.full((1, 100), torch.nan)
        sampler.sample(logits, np.array([0]), np.array([1]))
        assert logits.isnan().all()
        assert not sampler._adjustments["adjusts"].any()
