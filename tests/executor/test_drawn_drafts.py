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
from gptmanager.executor.choice.drawn_drafts import Compared, DrawnDrafts
from gptmanager.executor.step_in_flight import SamplingRows
from gptmanager.request.input_rows import HostRows, drawn_draft
from gptmanager.request.output_options import OutputConfig
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import Drafts, Row, SequenceStart

VOCAB, FIRST = 8, 5  # tokens, and the position of the first draft
# by slot: the drafts, and whether the host has passed logits for them; slot 0 has no sequence
DRAFTS = {1: ((4, 3), True), 2: ((5,), False), 3: ((6,), True), 4: ((), False)}


def certain(tokens, others=-np.inf):
    logits = np.full((len(tokens), VOCAB), others, dtype=np.float32)
    logits[np.arange(len(tokens)), tokens] = 0
    return logits


def drawn_rows(drafts):
    rows = np.empty(len(drafts), drawn_draft(VOCAB))
    rows["token"], rows["logits"] = drafts, certain(drafts)
    return HostRows(rows)


def start(slot, drafts, generated=()):
    sampling = SamplingParams(greedy=False, temperature=1 + slot, min_length=3, end_ids=(0,))
    tokens = (1,) * (FIRST + slot) + generated
    return SequenceStart(slot, tokens, FIRST + slot, sampling, draft_logits=drafts)


@pytest.fixture
def sampler():
    return Sampler(1 + max(DRAFTS), VOCAB)


@pytest.fixture
def drawn(sampler):
    made = DrawnDrafts(sampler)
    for slot, (drafts, has_logits) in DRAFTS.items():
        own = start(slot, drawn_rows(drafts) if has_logits else None)
        sampler.load(slot, own.sampling, FIRST + slot)
        made.load(own)
    return made


def rows_at(slots):
    """Return rows that choose the token of the first draft, as the verification does."""
    own = tuple(Row(10 + it, 0, it, 0, FIRST, True, 1, len(DRAFTS[it][0])) for it in slots)
    lines = np.array(slots)
    drafts = tuple(Drafts(it, FIRST, DRAFTS[it][0]) for it in slots)
    positions = FIRST + lines  # as different as the prompts
    return SamplingRows(own, lines, np.arange(len(slots) + 1), lines, positions, drafts)


@pytest.mark.parametrize(
    ("slots", "compared"), [((3, 2, 1, 4), {0: 3, 2: 1}), ((3, 1), {0: 3, 1: 1}), ((2, 4), {})]
)
def test_rows_with_drafts_of_a_host_are_compared_with_the_models_numbers(
    drawn, sampler, slots, compared
):
    rows = rows_at(slots)
    assert drawn.has_any(rows.slots) == bool(compared)
    logits = torch.randn(len(slots), VOCAB, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    found = drawn.at(rows, logits)
    assert torch.equal(logits, before)
    assert {index: slots[index] for index in found} == compared
    for index, own in found.items():
        here = slice(index, index + 1)
        place = rows.lines[here], rows.positions[here]
        assert torch.equal(own.logits, sampler.adjusted(logits[here].clone(), *place)[0])
        assert torch.equal(own.log_probs, sampler.log_probs(logits[here].clone(), *place)[0])


def compared_with(scores):
    # the logits are of the temperature and the normalization of slot 1
    return Compared(torch.from_numpy(2 * scores + 6), torch.from_numpy(scores))


@pytest.mark.parametrize("log_probs", [None, "normalized", "logits"])
@pytest.mark.parametrize(
    ("of_model", "chosen"),
    [
        ((6, 7, 4), [6, 1, 4]),  # both drafts are what the model is certain of
        ((2, 7, 0), [2, 1, 0]),
        ((0, 7, 6), [0, 1, 6]),
    ],
)
def test_a_token_is_the_draft_or_what_the_model_is_certain_of(
    drawn, sampler, of_model, chosen, log_probs
):
    slots = 3, 2, 1
    rows, scores = rows_at(slots), certain(of_model, others=-16)
    tokens, histories = np.array([0, 1, 7], dtype=np.int32), np.full((5, 20), -5, dtype=np.int32)
    if log_probs:
        config = OutputConfig(log_probs=True, normalized=log_probs == "normalized")
        sampler.load(1, drawn.by_slot[1].params, FIRST + 1, config)
    # of the tokens that the sampler has chosen
    values = np.array([0, 9, 3 if log_probs == "logits" else -18], dtype=np.float32)
    given = values.copy() if log_probs else None
    compared = {0: compared_with(scores[0] - 1), 2: compared_with(scores[2] - 2)}
    drawn.replace_rejected(rows, compared, tokens, given, histories)
    assert tokens.tolist() == chosen
    if log_probs:
        change = scores[2, chosen[2]] - scores[2, 7]
        assert given[1:].tolist() == [9, values[2] + change]
    expected = np.full((5, 20), -5)
    for index in compared:
        expected[slots[index], rows.positions[index]] = chosen[index]
    assert np.array_equal(histories, expected)
    # slot 1 has one more draft, unless its first one was replaced
    assert {*drawn.by_slot} == ({1} if chosen[2] == 4 else set())


def test_a_row_without_a_valid_token_keeps_its_error(drawn):
    rows, tokens = rows_at((3, 1)), np.array([-2, 7], dtype=np.int32)
    histories = np.full((5, 20), -5, dtype=np.int32)
    scores = np.full(VOCAB, np.nan, dtype=np.float32), certain([2])[0]
    compared = dict(enumerate(map(compared_with, scores)))
    drawn.replace_rejected(rows, compared, tokens, None, histories)
    assert tokens.tolist() == [-2, 2] and (histories[3] == -5).all()


@pytest.mark.parametrize(
    ("generated", "has_next"),
    [((), True), ((4,), True), ((4, 3), True), ((4, 3, 7), False), ((5,), False), ((5, 3), False)],
)
def test_drafts_go_on_after_a_pause_where_all_tokens_are_drafts(drawn, generated, has_next):
    drawn.load(start(1, drawn_rows((4, 3, 2)), generated))
    assert (1 in drawn.by_slot) == has_next


def test_draft_logits_belong_to_one_sequence(drawn):
    assert {*drawn.by_slot} == {1, 3}
    drawn.load(start(1, None))  # another sequence, before the first one has chosen a token
    drawn.load(start(2, None))
    drawn.load(start(3, HostRows(None, count=1)))  # a row of a recording
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
