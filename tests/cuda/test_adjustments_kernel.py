"""The same bits as on the CPU, whose adjustments have a textbook of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_values import randn

from gptmanager.cuda.sampling.adjustments import PARAMS, adjust, pack, pack_lists
from gptmanager.decoding.sampling.sampling import Sampler
from gptmanager.request.input_rows import token_bias
from gptmanager.request.sampling_params import SamplingParams

PROMPT_LENGTH = 6
VOCAB = 53
KINDS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=0.7),
    SamplingParams(frequency_penalty=-0.3),
    SamplingParams(repetition_penalty=0.8, presence_penalty=-0.1, frequency_penalty=0.17),
    SamplingParams(bad_words=((7,), (), (1, 2), (3, 4, 5), (9, 9, 9, 9, 9, 9, 9, 8))),
    SamplingParams(no_repeat_ngram_size=1),
    SamplingParams(no_repeat_ngram_size=2),
    SamplingParams(no_repeat_ngram_size=3),
    SamplingParams(end_ids=(11,), min_length=4),
    SamplingParams(end_ids=(VOCAB,), min_length=4),
    SamplingParams(end_ids=(5, VOCAB, 0, VOCAB - 1), min_length=4),
    SamplingParams(embedding_bias=token_bias([0, 5, 52], [1.5, -2.25, 0.1])),
    SamplingParams(
        embedding_bias=token_bias(range(VOCAB), [0.37 * i - 3 for i in range(VOCAB)]),
        repetition_penalty=1.1,
        presence_penalty=0.2,
        bad_words=((2,), (0, 1)),
        no_repeat_ngram_size=2,
        end_ids=(0, 3),
        min_length=100,
    ),
]


def run(machine, logits, params, histories, positions, idle=1):
    """By the kernel and by the CPU; a slot for each row, in reverse, and `idle` rows behind."""
    count, vocab_size = logits.shape
    sampler = Sampler(count, vocab_size, histories)
    lists, records = [np.zeros(1, np.int32)], []
    for slot, own in enumerate(reversed(params)):
        sampler.load(slot, own, PROMPT_LENGTH)
        records.append(pack(own, PROMPT_LENGTH, vocab_size, sum(map(len, lists))))
        lists.append(pack_lists(own))
    table = np.array(records, dtype=PARAMS).view(np.uint8).reshape(count, -1)
    slots = np.arange(count)[::-1].copy()
    expected = logits.clone()
    sampler.sample(expected, slots, positions)
    slots = np.append(slots, np.full(idle, -1)).astype(np.int32)
    positions = np.append(positions, np.full(idle, 5))
    got = machine.tensor(torch.cat([logits, logits[:idle]]))
    seen = machine.tensor(torch.zeros(count + idle, vocab_size, dtype=torch.int32))
    arrays = table, np.concatenate(lists), histories
    given = [machine.tensor(torch.from_numpy(array)) for array in arrays]
    places = [machine.tensor(torch.from_numpy(array)) for array in (slots, positions)]
    adjust(machine.launcher, got, *given, seen, *places)
    assert not seen.any()
    return got.cpu(), torch.cat([expected, logits[:idle]])


def check(machine, logits, params, histories, positions, idle=1):
    got, expected = run(machine, logits, params, histories, positions, idle)
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
    return got


def histories(count, length, num_tokens=VOCAB, seed=0):
    return np.random.default_rng(seed).integers(0, num_tokens, (count, length), dtype=np.int32)


@pytest.mark.parametrize("position", [0, 1, 5, 6, 7, 8, 40])
def test_each_kind(machine, position):
    texts = histories(len(KINDS), 40, num_tokens=10)
    if position > 1:
        texts[:, position - 2 : position] = 3, 4  # the beginning of a bad word
    logits = randn(len(KINDS), VOCAB) * 3
    check(machine, logits, KINDS, texts, np.full(len(KINDS), position))


@pytest.mark.parametrize("num_tokens", [1, 7, 2000])
def test_long_histories(machine, num_tokens):
    texts = histories(5, 700, num_tokens)
    params = [KINDS[4], KINDS[5], KINDS[7], KINDS[8], KINDS[12]]
    logits = randn(5, 2000) * 3
    changed = check(machine, logits, params, texts, np.array([700, 699, 513, 257, 256]))
    assert not torch.equal(changed[:5], logits)


def test_tokens_outside_of_the_vocabulary_are_passed_over(machine):
    texts = histories(2, 20, num_tokens=90)
    texts[:, 3] = -1
    check(machine, randn(2, VOCAB), [KINDS[4], KINDS[6]], texts, np.array([20, 20]))


def test_the_first_token_after_the_vocabulary(machine):
    """It is the first one of the next row's logits and marks."""
    texts = np.full((4, 20), VOCAB, dtype=np.int32)
    logits = randn(4, VOCAB)
    params = [KINDS[4], KINDS[6], KINDS[7], KINDS[10]]
    got = check(machine, logits, params, texts, np.full(4, 8))
    assert torch.equal(got[:4], logits)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_marks_before_and_after_the_vocabulary_are_ignored(checked_machine, token):
    texts = np.full((1, 20), token, dtype=np.int32)
    check(checked_machine, randn(1, VOCAB), [KINDS[4]], texts, np.array([9]), idle=0)


def test_odd_logits(machine):
    logits = randn(2, VOCAB)
    logits[:, :3] = torch.tensor([-torch.inf, torch.inf, 0.0])
    texts = histories(2, 20, num_tokens=4)
    check(machine, logits, [KINDS[1], KINDS[4]], texts, np.array([20, 20]))


def test_there_is_no_race(checked_machine):
    texts = histories(len(KINDS), 300, num_tokens=9)
    logits = randn(len(KINDS), VOCAB)
    check(checked_machine, logits, KINDS, texts, np.full(len(KINDS), 300))


def test_a_bias_and_a_ban_of_one_token_without_penalties(checked_machine):
    """Two threads apply them, which only one barrier orders."""
    bias = token_bias([3, 5], [1.5, -2.0])
    params = SamplingParams(embedding_bias=bias, bad_words=((7,), (9,), (11,), (5,), (3,)))
    got = check(checked_machine, randn(1, VOCAB), [params], histories(1, 9), np.array([9]))
    assert got[0, 5] == got[0, 3] == -torch.inf


def test_tensors_that_do_not_fit(machine):
    logits, table = machine.empty((2, 8), torch.float32), machine.empty((1, 64), torch.uint8)
    ids = machine.empty((2,), torch.int32)
    texts, seen = machine.empty((1, 9), torch.int32), machine.empty((1, 8), torch.int32)
    with pytest.raises(ValueError, match="`seen` must have at least the 2 rows"):
        adjust(machine.launcher, logits, table, ids, texts, seen, ids, ids.long())
