from __future__ import annotations

import numpy as np
import pytest
import torch
from fuzz import FUZZ
from generation_cases import PLACES, attend, check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_values import DTYPES
from paged_rows import PagedRows, crossings

from gptmanager.cuda.attention.generation_plan import Places, plan_generation
from gptmanager.cuda.attention.paged_kernels import HEAD_DIMS
from gptmanager.kernels.attention.attention_arguments import AttentionShape

pytestmark = pytest.mark.every(7)

SCALES = torch.tensor([[0.5, 0.7], [3.0, 0.25]])
LENGTHS = (1, 15, 16, 17, 64, 65, 200)


def one_token_each(*lengths):
    return [(1, length) for length in lengths]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stretch", [64, 256])
def test_lengths_around_tiles_and_blocks(machine, dtype, stretch):
    check(machine, PagedRows(one_token_each(*LENGTHS), 8, 2, 128, 16, dtype), stretch=stretch)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_head_dimensions(machine, head_dim, dtype):
    check(machine, PagedRows(one_token_each(70, 3), 4, 2, head_dim, 64, dtype))


@pytest.mark.parametrize("group", [1, 3, 8, 9, 16])
def test_groups(machine, group):
    check(machine, PagedRows(one_token_each(70, 3), 2 * group, 2, 64))


@pytest.mark.parametrize("tokens_per_block", [1, 3, 32, 64])
def test_blocks_of_any_size(machine, tokens_per_block):
    check(machine, PagedRows(one_token_each(67, 5), 4, 2, 64, tokens_per_block))


@pytest.mark.parametrize("sink", [0, 3, 70])
@pytest.mark.parametrize("window", [1, 16, 40, 100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_windows_and_sinks(machine, window, sink, dtype):
    rows = PagedRows(one_token_each(5, 64, 250), 4, 2, 64, 16, dtype)
    rows.lose_unseen_blocks(window, sink)
    check(machine, rows, window=window, sink=sink)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("softcap", [0.5, 1.5])
def test_softcap(machine, softcap, dtype):
    check(machine, PagedRows(one_token_each(100), 4, 2, 64, dtype=dtype), softcap=softcap)


# A head whose score is above all others, one whose score is nothing, and ordinary ones.
HEAD_SCORES = torch.tensor([30.0, -torch.inf, 0.5, -2.0, 4.0, 1.0])


@pytest.mark.parametrize("stretch", [64, 256])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 64)]
)
def test_heads_with_sinks(machine, dtype, head_dim, stretch):
    """Each row counts them once, whether it has one item or several."""
    rows = PagedRows(one_token_each(1, 17, 200), 6, 2, head_dim, 16, dtype)
    rows.sinks = HEAD_SCORES.to(dtype)
    check(machine, rows, stretch=stretch)
    check(machine, rows, stretch=stretch, window=70, sink=3)


def test_heads_with_sinks_and_8_bit_pages(machine):
    rows = PagedRows(one_token_each(5, 130), 18, 2, 64, 3, torch.bfloat16, SCALES)
    rows.sinks = HEAD_SCORES.repeat(3).to(rows.dtype)
    check(machine, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_heads_with_sinks_have_no_race(checked_machine, dtype):
    rows = PagedRows(one_token_each(150, 5), 6, 1, 64, 16, dtype)
    rows.sinks = HEAD_SCORES.to(dtype)
    check(checked_machine, rows)


def test_items_that_do_nothing(machine):
    rows = PagedRows(one_token_each(100, 7), 4, 2, 64)
    assert torch.equal(attend(machine, rows, padding=3), attend(machine, rows))


def test_scores_of_any_size(machine):
    rows = PagedRows(one_token_each(100), 2, 2, 64)
    rows.keys[rows.block_tables[1, 6], 0, 3] = 1e4 * rows.queries[0, 0]
    got = attend(machine, rows)[0, 0]
    assert torch.equal(got, rows.values[rows.block_tables[1, 6], 0, 3])


CROSSED = list(crossings(one_token_each(130, 70, 3), seed=2, count=24))


@pytest.mark.parametrize(("rows", "options"), CROSSED, ids=map(str, (rows for rows, _ in CROSSED)))
def test_all_of_it_crossed(machine, rows, options):
    check(machine, rows, **options)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (PagedRows(one_token_each(150, 5), 16, 1, 128), {}),
        (PagedRows(one_token_each(90), 9, 1, 64, 3, torch.float16), {}),
        (PagedRows(one_token_each(150), 2, 1, 64), {"window": 40, "sink": 3, "softcap": 1.5}),
        (PagedRows(one_token_each(100), 2, 1, 256), {}),
    ],
    ids=str,
)
def test_there_is_no_race_in_others(checked_machine, rows, options):
    check(checked_machine, rows, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_there_is_no_race(checked_machine, dtype):
    # Five tiles for a warp: more than its shared memory has places.
    check(checked_machine, PagedRows(one_token_each(350, 5), 2, 1, 64, 16, dtype), stretch=320)


def test_a_row_is_the_same_bits_in_any_company_with_a_fixed_stretch(machine):
    together = PagedRows(one_token_each(200, 70, 5), 8, 2, 64)
    alone = PagedRows(one_token_each(200), 8, 2, 64)
    alone.queries = together.queries[:1]
    assert torch.equal(attend(machine, together)[:1], attend(machine, alone))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whichever_block_comes_last_the_bits_are_the_same(ordered_machines, dtype):
    """Some rows are shared by several blocks, and some blocks have several items."""
    rows = PagedRows(one_token_each(300, 7, 130), 6, 2, 64, 16, dtype)
    plan = plan_generation(rows.kv_lengths.numpy(), 2, PLACES, stretch=64)
    assert plan.block_starts.tolist() == [0, 1, 3, 4, 6, 7, 9]
    assert plan.items[:, 0].tolist() == [0, 0, 0, 0, 0, 1, 2, 2, 2]
    first, *others = (attend(machine, rows) for machine in ordered_machines)
    assert all(torch.equal(first, other) for other in others)
    check(ordered_machines[1], rows)


def test_of_more_partial_results_than_a_warp_has_lanes(ordered_machines):
    rows = PagedRows(one_token_each(33 * 64, 3, 32 * 64), 2, 1, 32)
    rows.keys[rows.block_tables[3, 129], 0, 5] = 30 * rows.queries[0, 0]  # in the last of them
    first, *others = (attend(machine, rows) for machine in ordered_machines)
    assert all(torch.equal(first, other) for other in others)
    rows.history[0][0][129 * 16 + 5] = rows.keys[rows.block_tables[3, 129], 0, 5].double()
    check(ordered_machines[0], rows)


@settings(
    max_examples=4 * FUZZ,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
    place=st.integers(0, 2),
)
def test_lengths_of_any_company(ordered_machines, lengths, seed, place):
    ((rows, options),) = crossings(one_token_each(*lengths), seed, 1)
    check(ordered_machines[place], rows, **options)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_8_bit_pages(machine, head_dim, dtype):
    rows = PagedRows(one_token_each(5, 64, 90), 4, 2, head_dim, 16, dtype, SCALES)
    check(machine, rows)


@pytest.mark.parametrize("options", [{"window": 20, "sink": 3}, {"softcap": 1.5}], ids=str)
def test_8_bit_pages_in_float16(machine, options):
    rows = PagedRows(one_token_each(5, 64, 90), 18, 2, 64, 3, torch.float16, SCALES)
    check(machine, rows, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_8_bit_elements(machine, dtype):
    """A token that is seen alone comes out as its values are."""
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    rows = PagedRows(one_token_each(1), 1, 1, 256, 16, dtype, torch.ones(2, 1))
    rows.values[rows.block_tables[1, 0], 0, 0] = codes
    torch.testing.assert_close(
        attend(machine, rows)[0, 0], codes.to(dtype), rtol=0, atol=0, equal_nan=True
    )


def test_8_bit_pages_have_no_race(checked_machine):
    rows = PagedRows(one_token_each(350, 5), 2, 1, 64, cache_scales=SCALES[:, :1].contiguous())
    check(checked_machine, rows, stretch=320)


def test_8_bit_pages_without_scales(machine):
    rows = PagedRows(one_token_each(350, 5), 2, 2, 64, cache_scales=SCALES)
    rows.cache_scales = None
    with pytest.raises(ValueError, match="pages of torch.float8_e4m3fn need cache_scales"):
        attend(machine, rows)


def test_tensors_that_do_not_fit(machine):
    with pytest.raises(ValueError, match=r"34 query heads .* groups of up to 16 for 2 KV heads"):
        attend(machine, PagedRows(one_token_each(3), 34, 2, 64))
    rows = PagedRows(one_token_each(3), 2, 2, 64)
    rows.sinks = torch.zeros(2, dtype=rows.dtype)
    with pytest.raises(ValueError, match="heads with sinks and a softcap are not supported"):
        attend(machine, rows, softcap=1.0)
    rows.shape = lambda scale: AttentionShape(2, 2, 64, scale)
    with pytest.raises(ValueError, match="sinks are given, which does not match sinks = False"):
        attend(machine, rows)
    with pytest.raises(ValueError, match="head dimension 72 must be one of"):
        attend(machine, PagedRows(one_token_each(3), 2, 2, 72))


# Plans of several kinds ---------------------------------------------------------------------------


@pytest.mark.parametrize(("multiprocessors", "kind"), [(4, "shares"), (40, "one each")])
def test_plans_without_a_stretch(machine, multiprocessors, kind):
    rows = PagedRows(one_token_each(*LENGTHS, 700), 4, 2, 64)
    places = Places(multiprocessors, 3)
    plan = plan_generation(rows.kv_lengths.numpy(), 2, places)
    assert (np.diff(plan.block_starts).max() == 1) == (kind == "one each")
    assert plan.num_partials > 1
    check(machine, rows, stretch=None, places=places)


def test_a_block_for_everything(machine):
    """On a device with fewer places for blocks than there are items."""
    for dtype in DTYPES:
        rows = PagedRows(one_token_each(*LENGTHS, 400), 4, 2, 64, 16, dtype)
        check(machine, rows, padding=7, places=Places(1, 1))


def test_blocks_that_take_several_items_have_no_race(checked_machine):
    # The row that is one item is followed by another: no merge of partial results is between them.
    rows = PagedRows(one_token_each(130, 5, 90), 16, 2, 64)
    check(checked_machine, rows, stretch=64, padding=3, places=Places(1, 3))
