"""Drafts that a host has sampled from its own logits: which rows they are of, and what is chosen.

The draft model is certain of each draft, and the model is nearly certain of one token. With the
numbers of another draft, a wrong draft would be accepted.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gptmanager.decoding.sampling.rejection import truncated
from gptmanager.decoding.sampling.sampling import Sampler
from gptmanager.executor.choice.drawn_drafts import DrawnDrafts
from gptmanager.executor.step_in_flight import SamplingRows
from gptmanager.request.input_rows import HostRows
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import Drafts, Row, SequenceStart

VOCAB, FIRST = 8, 5  # tokens, and the position of the first draft
# by slot: the drafts, and whether the host has passed logits for them; slot 0 has no sequence
DRAFTS = {1: ((4, 3), True), 2: ((5,), False), 3: ((6,), True), 4: ((), True)}


def certain(tokens, others=-np.inf):
    logits = np.full((len(tokens), VOCAB), others, dtype=np.float32)
    logits[np.arange(len(tokens)), tokens] = 0
    return logits


def start(slot, logits):
    sampling = SamplingParams(greedy=False, temperature=1 + slot, min_length=3, end_ids=(0,))
    return SequenceStart(slot, (1,) * FIRST, FIRST, sampling, draft_logits=logits)


@pytest.fixture
def sampler():
    return Sampler(1 + max(DRAFTS), VOCAB)


@pytest.fixture
def drawn(sampler):
    made = DrawnDrafts(sampler)
    for slot, (drafts, has_logits) in DRAFTS.items():
        own = start(slot, HostRows(certain(drafts)) if has_logits else None)
        sampler.load(slot, own.sampling, FIRST)
        made.load(own)
    return made


def rows_at(offset, slots):
    """Return rows that choose the token of draft number `offset`, as the verification does."""
    own = tuple(Row(10 + it, 0, it, 0, FIRST, True, 1, len(DRAFTS[it][0])) for it in slots)
    lines = np.array(slots)
    drafts = tuple(Drafts(it, FIRST, DRAFTS[it][0]) for it in slots)
    positions = np.full(len(slots), FIRST + offset) + lines  # as different as the prompts
    return SamplingRows(own, lines, np.arange(len(slots) + 1), lines, positions, drafts)


@pytest.mark.parametrize(
    ("offset", "slots", "compared"),
    [
        (0, (3, 2, 1, 4), {0: 3, 2: 1}),
        (1, (3, 2, 1, 4), {2: 1}),  # after the last draft the sampler chooses
        (2, (3, 1), {}),
        (0, (2, 4), {}),
    ],
)
def test_rows_with_drafts_of_a_host_are_compared_with_the_models_numbers(
    drawn, sampler, offset, slots, compared
):
    rows = rows_at(offset, slots)
    logits = torch.randn(len(slots), VOCAB, generator=torch.Generator().manual_seed(0))
    found = drawn.at(offset, rows, logits.clone())
    assert {index: slots[index] for index in found} == compared
    for index, own in found.items():
        here = slice(index, index + 1)
        expected = sampler.log_probs(
            logits[here].clone(), rows.lines[here], rows.positions[here]
        ).numpy()
        assert np.array_equal(own, expected[0])


@pytest.mark.parametrize("has_log_probs", [False, True])
@pytest.mark.parametrize(
    ("of_model", "chosen"),
    [
        ((6, 7, 4), [6, 1, 4]),  # both drafts are what the model is certain of
        ((2, 7, 0), [2, 1, 0]),
        ((0, 7, 6), [0, 1, 6]),
    ],
)
def test_a_token_is_the_draft_or_what_the_model_is_certain_of(
    drawn, of_model, chosen, has_log_probs
):
    slots = 3, 2, 1
    rows, scores = rows_at(0, slots), certain(of_model, others=-16)
    tokens, histories = np.array([0, 1, 7], dtype=np.int32), np.full((5, 20), -5, dtype=np.int32)
    log_probs = np.full(3, 9, dtype=np.float32) if has_log_probs else None
    compared = {0: scores[0] - 1, 2: scores[2] - 2}  # not normalized
    drawn.replace_rejected(0, rows, compared, tokens, log_probs, histories)
    assert tokens.tolist() == chosen
    if has_log_probs:
        assert log_probs.tolist() == [-1, 9, -2]
    expected = np.full((5, 20), -5)
    for index in compared:
        expected[slots[index], rows.positions[index]] = chosen[index]
    assert np.array_equal(histories, expected)


def test_a_row_without_a_valid_token_keeps_its_error(drawn):
    rows, tokens = rows_at(0, (3, 1)), np.array([-2, 7], dtype=np.int32)
    histories = np.full((5, 20), -5, dtype=np.int32)
    scores = {0: np.full(VOCAB, np.nan, dtype=np.float32), 1: certain([2])[0]}
    drawn.replace_rejected(0, rows, scores, tokens, None, histories)
    assert tokens.tolist() == [-2, 2] and (histories[3] == -5).all()


def test_draft_logits_belong_to_the_first_tokens_of_one_sequence(drawn):
    assert {*drawn.by_slot} == {1, 3, 4}
    drawn.forget(rows_at(0, (3, 2)))
    assert {*drawn.by_slot} == {1, 4}
    drawn.load(start(1, None))  # another sequence, before the first one has chosen a token
    drawn.load(start(2, None))
    drawn.load(start(4, HostRows(None, count=1)))  # of a recording
    assert not drawn.by_slot


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [1, 4, 2, 3]),
        ({"top_k": 3}, [0, 4, 2, 3]),
        ({"top_p": 0.6}, [0, 4, 0, 3]),
        ({"top_p": 0.8}, [0, 4, 2, 3]),
        ({"top_p": 0.0}, [0, 4, 0, 0]),
        ({"top_k": 3, "top_p": 0.75}, [0, 4, 0, 3]),  # top_p is a share of what top_k keeps
        ({"min_p": 0.6}, [0, 4, 0, 3]),
    ],
)
def test_drafts_are_compared_with_the_tokens_that_sampling_keeps(options, kept):
    log_probs = np.log(np.float32([0.1, 0.4, 0.2, 0.3]))
    found = truncated(log_probs, SamplingParams(greedy=False, **options))
    assert found == pytest.approx(np.array(kept) / sum(kept))
