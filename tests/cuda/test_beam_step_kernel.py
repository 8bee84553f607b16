"""Continuations of beams: rows against float64, ties by id."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_values import close, randn

from gptmanager.cuda.sampling import sampling
from gptmanager.cuda.sampling.beam_step import best_of_rows
from gptmanager.request.sampling_params import SamplingParams


def best(machine, logits, counts, most, temperatures=None):
    """A slot for each row, in reverse."""
    num_rows, vocab_size = logits.shape
    params = [
        sampling.pack(SamplingParams(temperature=own), vocab_size)
        for own in reversed(temperatures or [1.0] * num_rows)
    ]
    table = np.array(params, dtype=sampling.PARAMS).view(np.uint8).reshape(num_rows, -1)
    slots = torch.arange(num_rows - 1, -1, -1, dtype=torch.int32)
    tokens = machine.tensor(torch.full((num_rows, most), 77, dtype=torch.int32))
    log_probs = machine.tensor(torch.full((num_rows, most), 77.0))
    given = logits, torch.from_numpy(table), slots, torch.tensor(counts, dtype=torch.int32)
    best_of_rows(machine.launcher, tokens, log_probs, *map(machine.tensor, given))
    return tokens.cpu(), log_probs.cpu()


def check(machine, logits, counts, most, temperatures=None):
    """Against float64; logits are so far apart that rounding does not change their order."""
    tokens, log_probs = best(machine, logits, counts, most, temperatures)
    scales = torch.tensor([own or 1.0 for own in temperatures or [1.0] * len(logits)])
    scores = (logits / scales[:, None]).double().log_softmax(1)
    for row, count in enumerate(counts):
        if not count:
            assert (tokens[row] == 77).all() and (log_probs[row] == 77.0).all()
            continue
        found = min(count, logits.shape[1])
        values, ids = scores[row].sort(descending=True, stable=True)
        assert tokens[row].tolist() == [*ids[:found].tolist(), *[-1] * (most - found)]
        close(log_probs[row, :found], values[:found], absolute=1e-5)
        assert (log_probs[row, found:] == -torch.inf).all()


@pytest.mark.parametrize("vocab_size", [1, 3, 30, 1003, 4096, 9001])
def test_rows(machine, vocab_size):
    logits = randn(4, vocab_size, seed=vocab_size) * 4
    check(machine, logits, [4, 0, 16, 10], 16, [1.0, 1.0, 0.5, 0.0])


@pytest.mark.parametrize("vocab_size", [1003, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits(machine, dtype, vocab_size):
    """The same bits as of the same logits in single precision."""
    logits = (randn(3, vocab_size, seed=1) * 4).to(dtype)
    found, expected = (best(machine, own, [7, 0, 20], 20) for own in (logits, logits.float()))
    assert all(map(torch.equal, found, expected))


def test_wide_rows(machine):
    check(machine, randn(2, 5000) * 4, [512, 100], 512)


@pytest.mark.parametrize("vocab_size", [700, 3001])
def test_more_than_a_block_has_threads(machine, vocab_size):
    check(machine, randn(3, vocab_size) * 4, [513, 2048, 0], 2048)
    logits = randn(1, vocab_size).round()  # ties at the bound
    check(machine, logits, [600], 600)


def test_more_than_there_is_room_for(machine):
    check(machine, torch.zeros(1, 2500), [520], 520)


def test_ties_rank_by_id(machine):
    logits = randn(3, 500).round()
    check(machine, logits, [40, 6, 2], 40)
    check(machine, torch.zeros(1, 6000), [8], 8)  # more than there is room for


def test_odd_logits(machine):
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[-inf] * 4, [nan, 1.0, nan, 0.0], [0.0, inf, 3.0, inf]])
    tokens, log_probs = best(machine, logits, [4, 4, 4], 4)
    assert tokens.tolist() == [[0, 1, 2, 3], [1, 3, 0, 2], [1, 3, 0, 2]]
    assert (log_probs[0] == -inf).all()
    half = torch.tensor(0.5).log().item()
    assert log_probs[2, :2].tolist() == [half, half] and not log_probs.isnan().any()
    close(log_probs[1, :2], torch.tensor([1.0, 0.0]).double().log_softmax(0))


def test_there_is_no_race(checked_machine):
    check(checked_machine, randn(3, 700) * 4, [6, 0, 4], 6)
    check(checked_machine, torch.zeros(1, 2100), [3], 4)
    check(checked_machine, randn(1, 700) * 4, [550], 550)


def test_too_many_a_row(machine):
    ids, table = machine.empty((1,), torch.int32), machine.empty((1, 40), torch.uint8)
    logits, tokens = machine.empty((1, 8), torch.float32), machine.empty((1, 2049), torch.int32)
    with pytest.raises(ValueError, match="`tokens` must have at most 2048 columns, got 2049"):
        best_of_rows(machine.launcher, tokens, tokens.float(), logits, table, ids, ids)
