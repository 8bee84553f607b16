"""Continuations of beams: rows against float64, ties and sums against the CPU's ranking."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_values import close, randn

from gptmanager.cuda import sampling
from gptmanager.cuda.beam_step import best_of_rows, merge_beams
from gptmanager.request import SamplingParams


def best(machine, logits, counts, most, temperatures=None):
    """A slot for each row, in reverse."""
    num_rows, vocab_size = logits.shape
    params = [
        sampling.pack(SamplingParams(temperature=own), 0, vocab_size)
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


def test_wide_rows(machine):
    check(machine, randn(2, 5000) * 4, [512, 100], 512)


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


def ranked(tokens, log_probs, totals, count):
    """`BeamSearch`'s."""
    sums = log_probs + totals[:, None]
    beams = np.repeat(np.arange(len(tokens)), tokens.shape[1])
    order = np.lexsort((tokens.ravel(), beams, -sums.ravel()))[: count + tokens.shape[1]]
    return [array.ravel()[order] for array in (tokens, beams, sums, log_probs)]


def merge(machine, lists, counts, totals, firsts, kept, vocab_size):
    num_requests = len(firsts) - 1
    outputs = [
        machine.empty((num_requests, kept), dtype)
        for dtype in (torch.int32, torch.int32, torch.float32, torch.float32)
    ]
    given = (
        *lists,
        torch.tensor(counts, dtype=torch.int32),
        torch.from_numpy(totals),
        torch.tensor(firsts, dtype=torch.int32),
    )
    merge_beams(machine.launcher, *outputs, *map(machine.tensor, given), vocab_size)
    return [output.cpu().numpy() for output in outputs]


def check_merge(machine, widths, vocab_size, rows_of=None, scale=3.0):
    """Requests of `widths` beams, of which 1 is passed over; `rows_of`: beams that there are."""
    rows_of = rows_of or widths
    counts = [
        0 if width == 1 else 2 * width
        for width, num_rows in zip(widths, rows_of, strict=True)
        for _ in range(num_rows)
    ]
    firsts, most = np.cumsum([0, *rows_of]).tolist(), 2 * max(widths)
    logits = (randn(len(counts), vocab_size) * scale).round(decimals=1)  # sums that tie
    totals = -np.arange(len(counts), dtype=np.float32) % 3
    lists = best(machine, logits, counts, most)
    kept = 2 * most
    got = merge(machine, lists, counts, totals, firsts, kept, vocab_size)
    for request, width in enumerate(widths):
        part = slice(firsts[request], firsts[request + 1])
        size = min(2 * width, vocab_size) if width > 1 else 0
        own = [array[part, :size].numpy() for array in lists]
        expected = ranked(*own, totals[part], 2 * width) if size else [np.zeros(0)] * 4
        for found, array, nothing in zip(got, expected, (-1, -1, -np.inf, -np.inf), strict=True):
            assert found[request, : len(array)].tolist() == array.tolist()
            assert (found[request, len(array) :] == nothing).all()


def test_mixed_widths(machine):
    check_merge(machine, [3, 1, 2, 8, 4], 200)
    check_merge(machine, [3, 1, 4], 200, rows_of=[1, 1, 1])  # after the context
    check_merge(machine, [4, 2], 5)  # a vocabulary of fewer than two a beam
    check_merge(machine, [4, 2], 64, scale=0.0)


def test_dead_beams_rank_last(machine):
    lists = [torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), torch.zeros(2, 2)]
    totals = np.array([-np.inf, -5.0], dtype=np.float32)
    tokens, beams, sums, _ = merge(machine, lists, [2, 2], totals, [0, 2], 4, 10)
    assert tokens.tolist() == [[3, 4, 1, 2]] and beams.tolist() == [[1, 1, 0, 0]]
    assert sums.tolist() == [[-5.0, -5.0, -np.inf, -np.inf]]


def test_equal_sums_rank_by_beam_then_token(machine):
    lists = [torch.tensor([[5, 7], [4, 3], [1, 9]], dtype=torch.int32), torch.zeros(3, 2)]
    lists[1][1] = torch.tensor([1.0, 1.0 - 2.0**-24])  # equal once the total is added
    lists[0][1] = torch.tensor([4, 3])
    totals = np.array([16.0, 15.0, 16.0], dtype=np.float32)
    tokens, beams, sums, _ = merge(machine, lists, [2] * 3, totals, [0, 3], 4, 10)
    assert beams.tolist() == [[0, 0, 1, 1]] and tokens.tolist() == [[5, 7, 3, 4]]
    assert (sums == 16.0).all()


def test_there_is_no_race(checked_machine):
    check_merge(checked_machine, [3, 1, 2], 700)
    check(checked_machine, torch.zeros(1, 2100), [3], 4)


def test_too_many_a_row(machine):
    ids, table = machine.empty((1,), torch.int32), machine.empty((1, 56), torch.uint8)
    logits, tokens = machine.empty((1, 8), torch.float32), machine.empty((1, 513), torch.int32)
    with pytest.raises(ValueError, match="room for 513 a row, the limit is 512"):
        best_of_rows(machine.launcher, tokens, tokens.float(), logits, table, ids, ids)
