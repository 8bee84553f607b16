"""Attention where a mistake in it would hide: at borders, and where many results matter alike."""

from __future__ import annotations

import context_cases as context
import generation_cases as generation
import numpy as np
import pytest
import torch
from kernel_values import DTYPES
from paged_rows import PagedRows

pytestmark = pytest.mark.every(7)

BOTH = {"generation": (generation, 1), "context": (context, 8)}  # and new tokens of a row
SCALES = torch.tensor([[0.5, 0.7], [3.0, 0.25]])
both = pytest.mark.parametrize(("attention", "num_new"), BOTH.values(), ids=BOTH)


def basis(length, scale):
    """The unit vectors, times `scale`."""
    return scale * torch.eye(length)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_all_of_many_partial_results_matter(machine, dtype):
    """More than a warp has lanes, and more than twice as many. Each has its own values, and later
    ones weigh more, so that the largest score rises from one of them to the next.
    """
    rows = PagedRows([(1, 33 * 64), (1, 70 * 64 - 5)], 2, 1, 32, 64, dtype)
    for row, (_, length) in enumerate(rows.rows):
        stretch = torch.arange(length) // 64
        values = rows.history[row][1].to(dtype) + stretch[:, None, None].to(dtype)
        rows.history[row][1] = values.double()
        for place in range(0, length, 64):
            block = rows.block_tables[rows.slots[row], place // 64]
            rows.values[block, 0, : length - place] = values[place : place + 64, 0]
            rows.keys[block, 0, : length - place, 0] = place / 640
        rows.history[row][0][:, 0, 0] = (torch.arange(length) // 64 / 10).to(dtype).double()
    rows.queries[..., 0] = 4
    generation.check(machine, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_largest_score_of_each_token_of_a_tile(machine, dtype):
    """Head h sees token 16 r + h of row r, and beside it nothing: every lane of every warp has the
    largest score of a query, and a second stretch.
    """
    rows = PagedRows([(1, 80)] * 5, 16, 1, 64, 16, dtype)
    rows.queries[:] = basis(64, 8)[:16]
    seen = []
    for row in range(5):
        for position in range(80):
            head = position - 16 * row
            key = basis(64, 300)[head] if 0 <= head < 16 else torch.zeros(64)
            rows.put(row, position, keys=key[None])
        seen.append(rows.history[row][1][16 * row : 16 * row + 16, 0])
    assert torch.equal(generation.attend(machine, rows).double(), torch.stack(seen))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [0, 64])
def test_the_largest_score_of_each_column(machine, dtype, first):
    """Every query of a tile sees another token of a tile of keys, and beside it nothing."""
    order = np.random.default_rng(0).permutation(64).tolist()
    rows = PagedRows([(64, 192)], 2, 1, 64, 16, dtype)
    rows.queries[:, 0] = basis(64, 8)
    rows.queries[:, 1] = basis(64, 8).flip(0)
    for position in range(192):
        here = first <= position < first + 64
        key = basis(64, 300)[order[position - first]] if here else torch.zeros(64)
        rows.put(0, position, keys=key[None])
    values = rows.history[0][1][first : first + 64, 0]
    seen = values[np.argsort(order)]
    got = context.attend(machine, rows).double()
    assert torch.equal(got, torch.stack([seen, seen.flip(0)], dim=1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_8_bit_pages_of_more_tiles_than_shared_memory_has_places(machine, dtype):
    rows = PagedRows([(1, 400), (1, 193), (1, 177)], 4, 2, 80, 16, dtype, SCALES)
    rows.queries *= 4
    generation.check(machine, rows, stretch=512)


def test_8_bit_pages_of_more_tiles_have_no_race(checked_machine):
    rows = PagedRows([(1, 330)], 2, 2, 80, 16, torch.float16, SCALES)
    generation.check(checked_machine, rows, stretch=512)


@pytest.mark.every(10)
@both
@pytest.mark.parametrize("softcap", [0.0, 100.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_windows_that_begin_at_the_first_key_of_a_tile(
    machine, attention, num_new, head_dim, softcap
):
    """Or one before it, or one behind it; for the row's last query, or for its first one. Whoever
    sees that key sees nothing else. All other scores are far below 0, which a key that was not
    copied would have.
    """
    for dtype in (torch.bfloat16, torch.float32) if head_dim == 64 else (torch.bfloat16,):
        rows = PagedRows([(num_new, 140)], 2, 1, head_dim, 16, dtype)
        rows.queries[..., 0] = 8
        for position in range(140):
            rows.put(0, position, keys=basis(head_dim, 300 if position == 64 else -50)[:1])
        for window in {75, 76, 77, 76 - num_new, 77 - num_new}:
            attention.check(machine, rows, window=window, softcap=softcap)


@pytest.mark.every(6)
@both
@pytest.mark.parametrize("sink", [16, 32, 64, 128])
def test_sinks_of_whole_blocks(machine, attention, num_new, sink):
    """The first key behind the sink is hidden, and would outweigh all others."""
    for dtype in (torch.bfloat16, torch.float32):
        rows = PagedRows([(num_new, 250), (num_new, sink + 30)], 4, 2, 64, 16, dtype)
        rows.queries[..., 0] = 8
        rows.put(0, sink, keys=basis(64, 300)[:1].expand(2, -1))
        for window in (20, 70):
            attention.check(machine, rows, window=window, sink=sink)
        rows.lose_unseen_blocks(20, sink)
        attention.check(machine, rows, window=20, sink=sink)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_context_items_that_do_nothing(checked_machine, monkeypatch, dtype):
    rows = PagedRows([(9, 70), (5, 5)], 2, 1, 64, 16, dtype)
    expected = context.attend(checked_machine, rows)
    plan = context.plan_context

    def padded(*given):
        return np.concatenate([plan(*given), np.full((3, 4), -1, np.int32)])

    monkeypatch.setattr(context, "plan_context", padded)
    assert torch.equal(context.attend(checked_machine, rows), expected)


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_result_between_two_numbers_is_the_even_one(machine, attention, num_new, dtype):
    """The result is the mean of two neighbors with equal scores."""
    rows = PagedRows([(1, 2)], 2, 1, 64, 16, dtype)
    rows.queries.zero_()
    unit = torch.finfo(dtype).eps
    values = 1 + unit * torch.arange(64)
    rows.put(0, 0, values=values[None])
    rows.put(0, 1, values=(values + unit)[None])
    expected = (values + unit / 2).to(dtype).expand(1, 2, 64)
    assert torch.equal(attention.attend(machine, rows), expected)
