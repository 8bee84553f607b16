"""The same tokens as the Sampler's, which is the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_values import randn

from gptmanager.cuda.sampling import packed, sample
from gptmanager.decoding.sampling import Sampler
from gptmanager.request import SamplingParams


def choose(machine, logits, params, positions):
    """By the kernel and by the Sampler; a slot for each row, in reverse."""
    num_rows, vocab_size = logits.shape
    sampler = Sampler(num_rows, vocab_size)
    slots = np.arange(num_rows)[::-1].copy()
    for slot, own in zip(slots.tolist(), params, strict=True):
        sampler.load(slot, own, orig_prompt_len=5)
    table = packed(sampler._params)
    tokens = machine.empty((num_rows,), torch.int32)
    sample(
        machine.launcher,
        tokens,
        *map(machine.tensor, (logits, table)),
        machine.tensor(torch.from_numpy(slots.astype(np.int32))),
        machine.tensor(torch.from_numpy(positions)),
    )
    expected = sampler.sample(logits.clone(), slots, positions)
    return tokens.cpu().tolist(), expected.tolist()


def check(machine, logits, params, first_position=100):
    positions = np.arange(len(logits), dtype=np.int64) + first_position
    got, expected = choose(machine, logits, params, positions)
    assert got == expected
    return got


def rows(count, vocab_size, scale=2.0):
    return randn(count, vocab_size, seed=vocab_size) * scale


def drawing(count, **options):
    return [SamplingParams(greedy=False, seed=i * 2**33 + 7, **options) for i in range(count)]


@pytest.mark.parametrize("vocab_size", [1, 30, 1003, 4096, 5000])
def test_greedy_and_unlimited(machine, vocab_size):
    logits = rows(6, vocab_size)
    check(machine, logits, [SamplingParams()] * 6)
    check(machine, logits, drawing(6, temperature=0.7))


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5},
        {"top_k": 1002},
        {"top_p": 0.9},
        {"top_p": 0.1},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
    ],
    ids=str,
)
def test_limits(machine, options):
    check(machine, rows(12, 1003), drawing(12, **options))


def test_rows_are_their_own(machine):
    params = [
        *drawing(3, top_k=3),
        SamplingParams(),
        *drawing(3, top_p=0.5),
        *drawing(3, temperature=0.0),
    ]
    together = check(machine, rows(10, 4096), params)
    for row in range(10):
        alone = check(machine, rows(10, 4096)[row : row + 1], params[row : row + 1], 100 + row)
        assert alone == together[row : row + 1]


def test_more_candidates_than_fit(machine):
    logits = rows(4, 5000).round()  # many ties: top-k keeps all that tie with the last
    check(machine, logits, drawing(4, top_k=1500))
    check(machine, rows(4, 5000), drawing(4, top_k=2000, top_p=0.7))
    check(machine, rows(1, 5000).repeat(30, 1), drawing(30, top_p=0.3))
    check(machine, torch.zeros(4, 5000), drawing(4, top_k=7))


def test_ties_of_a_nucleus_rank_by_id(machine):
    assert max(check(machine, torch.zeros(20, 64), drawing(20, top_p=0.25))) == 15


def test_an_end_that_may_not_come_yet(machine):
    logits = rows(4, 100)
    logits[:, 7] = 50.0
    params = drawing(2, end_id=7, min_length=3) + [SamplingParams(end_id=7, min_length=3)] * 2
    positions = np.array([7, 8, 7, 8])
    got, expected = choose(machine, logits, params, positions)
    assert got == expected
    assert [token == 7 for token in got] == [False, True, False, True]


def test_odd_logits(machine):
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor(
        [[-inf] * 4, [nan, 1.0, nan, 0.0], [0.0, inf, 3.0, inf], [-inf, -inf, 2.0, -inf]]
    )
    for own in (SamplingParams(), drawing(1)[0], drawing(1, top_k=2)[0], drawing(1, top_p=0.5)[0]):
        check(machine, logits, [own] * 4)
    check(machine, logits, drawing(4, temperature=1e-40))


def test_there_is_no_race(checked_machine):
    check(checked_machine, rows(2, 300), drawing(2, top_k=20, top_p=0.5, min_p=0.01))


def test_tensors_that_do_not_fit(machine):
    with pytest.raises(ValueError, match=r"params is torch.uint8 \[1, 8\], expected .* 56\]"):
        ids = machine.empty((1,), torch.int32)
        table = machine.empty((1, 8), torch.uint8)
        sample(machine.launcher, ids, machine.empty((1, 8), torch.float32), table, ids, ids.long())
