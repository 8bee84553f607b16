from __future__ import annotations

import numpy as np
import pytest
import torch
from context_cases import attend, check, choosing
from kernel_values import DTYPES
from paged_rows import PagedRows, crossings

from gptmanager.cuda.attention.context_attention import context_attention, plan_context
from gptmanager.cuda.attention.paged_kernels import HEAD_DIMS
from gptmanager.kernels.attention.attention_arguments import AttentionShape

pytestmark = pytest.mark.every(7)

SCALES = torch.tensor([[0.5, 0.7], [3.0, 0.25]])
# A whole prompt, a chunk behind earlier ones, a single token, nothing, and tiles' borders.
ROWS = [(65, 65), (7, 90), (1, 33), (0, 5), (64, 128)]


@pytest.fixture(params=["mma", "warpgroups"])
def either(machine, request, monkeypatch):
    """A machine that chooses kernels with products of warpgroups, or does not."""
    return choosing(machine, request.param, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prompts_chunks_and_single_tokens(either, dtype):
    check(either, PagedRows(ROWS, 4, 2, 64, 16, dtype))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rows", [(1, 640), (200, 385), (129, 129), (64, 256), (20, 1000)], ids=str)
@pytest.mark.every(11)
def test_any_number_of_tiles(either, rows, head_dim):
    check(either, PagedRows([rows], 1, 1, head_dim, dtype=torch.float16))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dimensions(machine, head_dim):
    check(machine, PagedRows([(70, 100)], 2, 1, head_dim))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dimensions_in_float32(machine, head_dim):
    check(machine, PagedRows([(9, 20)], 2, 1, head_dim, dtype=torch.float32))


@pytest.mark.parametrize("group", [1, 3, 16])
def test_groups(either, group):
    check(either, PagedRows([(20, 50), (3, 3)], 2 * group, 2, 64))


@pytest.mark.parametrize("tokens_per_block", [1, 3, 64])
def test_blocks_of_any_size(either, tokens_per_block):
    check(either, PagedRows([(20, 67), (5, 5)], 4, 2, 64, tokens_per_block))


@pytest.mark.every(7)
@pytest.mark.parametrize("sink", [0, 3, 70])
@pytest.mark.parametrize("window", [1, 16, 70])
def test_windows_and_sinks(either, window, sink):
    rows = PagedRows([(70, 70), (10, 250), (1, 200)], 2, 1, 64)
    rows.lose_unseen_blocks(window, sink)
    check(either, rows, window=window, sink=sink)


@pytest.mark.parametrize(("window", "sink"), [(1, 0), (32, 0), (64, 3), (128, 0)])
def test_chunks(either, window, sink):
    """A window begins at a multiple of its size, also within the tokens of a row."""
    rows = PagedRows([(70, 70), (10, 250), (1, 200), (40, 164)], 2, 1, 64)
    rows.lose_unseen_blocks(window, sink, chunked=True)
    check(either, rows, window=window, sink=sink, chunked=True)


def test_chunks_in_float32(machine):
    rows = PagedRows([(70, 70), (10, 250)], 2, 1, 64, 16, torch.float32)
    rows.lose_unseen_blocks(32, 0, chunked=True)
    check(machine, rows, window=32, chunked=True)


@pytest.mark.parametrize(("window", "sink"), [(1, 3), (16, 0), (16, 70), (70, 3)])
def test_windows_and_sinks_in_float32(machine, window, sink):
    rows = PagedRows([(70, 70), (10, 250), (1, 200)], 2, 1, 64, 16, torch.float32)
    rows.lose_unseen_blocks(window, sink)
    check(machine, rows, window=window, sink=sink)


@pytest.mark.every(7)
@pytest.mark.parametrize("sink", [0, 128, 130])
@pytest.mark.parametrize(("head_dim", "window"), [(64, 128), (128, 130)])
def test_windows_and_sinks_of_whole_tiles(either, head_dim, window, sink):
    rows = PagedRows([(40, 700), (2, 256)], 2, 1, head_dim)
    rows.lose_unseen_blocks(window, sink)
    check(either, rows, window=window, sink=sink)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_sinks_with_heads_of_any_dimension(machine, head_dim):
    rows = PagedRows([(90, 100)], 2, 1, head_dim)
    check(machine, rows, window=20, sink=5)
    check(machine, rows, window=20, sink=5, softcap=1.5)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_softcap_with_and_without_sinks(either, head_dim):
    rows = PagedRows([(90, 300)], 2, 1, head_dim)
    check(either, rows, softcap=0.5)
    check(either, rows, window=200, sink=5, softcap=1.5)


# A head whose score is above all others, one whose score is nothing, and ordinary ones.
HEAD_SCORES = torch.tensor([30.0, -torch.inf, 0.5, -2.0, 4.0, 1.0])


def with_sinks(rows):
    rows.sinks = HEAD_SCORES.repeat(rows.heads // 6).to(rows.dtype)
    return rows


@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_with_sinks(either, head_dim):
    rows = with_sinks(PagedRows([(30, 90), (3, 3)], 6, 2, head_dim))
    check(either, rows)
    check(either, rows, window=20, sink=5)


def test_heads_with_sinks_in_float32(machine):
    rows = with_sinks(PagedRows([(9, 20), (3, 3)], 6, 2, 64, dtype=torch.float32))
    check(machine, rows)
    check(machine, rows, window=5, sink=3)


def test_heads_with_sinks_and_8_bit_pages(machine):
    check(machine, with_sinks(PagedRows([(9, 90)], 18, 2, 64, cache_scales=SCALES)))


def test_heads_of_128_with_sinks_on_devices_with_less_shared_memory(machine, monkeypatch):
    monkeypatch.setattr(machine.launcher, "max_shared_mem", 99 << 10)
    check(machine, with_sinks(PagedRows([(9, 90)], 6, 2, 128)))


@pytest.mark.parametrize("kind", ["mma", "warpgroups"])
def test_heads_with_sinks_have_no_race(checked_machine, kind, monkeypatch):
    rows = with_sinks(PagedRows([(9, 150), (2, 2)], 6, 1, 64))
    check(choosing(checked_machine, kind, monkeypatch), rows)


CROSSED = list(crossings([(20, 110), (3, 3)], seed=1, count=24))


@pytest.mark.every(11)
@pytest.mark.parametrize(("rows", "options"), CROSSED, ids=map(str, (rows for rows, _ in CROSSED)))
def test_all_of_it_crossed(machine, rows, options):
    check(machine, rows, **options)


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        (PagedRows([(3, 3)], 4, 2, 64), "warpgroup_attention<__nv_bfloat16, 64, false, false>"),
        (
            PagedRows([(3, 3)], 4, 2, 128, dtype=torch.float16),
            "warpgroup_attention<__half, 128, false, false>",
        ),
        (PagedRows([(3, 3)], 4, 2, 96), "context_attention<__nv_bfloat16, 96, false, false>"),
        (PagedRows([(3, 3)], 4, 2, 64, dtype=torch.float32), "context_attention_float<64>"),
        (
            PagedRows([(3, 3)], 4, 2, 64, cache_scales=torch.ones(2, 2)),
            "context_attention<__nv_bfloat16, 64, false, false, __nv_fp8_e4m3>",
        ),
    ],
    ids=str,
)
def test_products_of_warpgroups_where_there_are_such(machine, rows, chosen, monkeypatch):
    choosing(machine, "warpgroups", monkeypatch)
    asked = []
    find = machine.launcher.kernel
    monkeypatch.setattr(
        machine.launcher, "kernel", lambda *given: asked.append(given[1]) or find(*given)
    )
    check(machine, rows)
    monkeypatch.setattr(machine.launcher, "has_warpgroups", False)
    check(machine, rows)
    assert asked == [chosen, chosen.replace("warpgroup_", "context_")]


def test_items_that_do_nothing(either):
    rows = PagedRows([(3, 20), (2, 2)], 4, 2, 128)
    shape = rows.shape(0.09)
    num_new = np.array([3, 2], dtype=np.int32)
    plan = plan_context(num_new, rows.kv_lengths.numpy(), shape)
    items = torch.from_numpy(np.concatenate([plan, np.full((3, 4), -1, np.int32)]))
    out = either.empty(rows.queries.shape, rows.dtype)
    context_attention(
        *(either.launcher, out, either.tensor(rows.queries)),
        *(rows.pages_on(either), rows.spans_on(either), either.tensor(items), shape),
    )
    assert torch.equal(out.cpu(), attend(either, rows))


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_heads_of_128_on_devices_with_less_shared_memory(machine, dtype, monkeypatch):
    monkeypatch.setattr(machine.launcher, "max_shared_mem", 99 << 10)
    asked = []
    find = machine.launcher.kernel
    monkeypatch.setattr(
        machine.launcher, "kernel", lambda *given: asked.append(given[1:]) or find(*given)
    )
    check(machine, PagedRows([(70, 200), (3, 3)], 4, 1, 128, dtype=dtype))
    check(machine, PagedRows([(70, 200)], 4, 1, 128, dtype=dtype), window=40)
    check(machine, PagedRows([(70, 200)], 4, 1, 128, dtype=dtype), window=40, sink=5)
    check(machine, PagedRows([(70, 200)], 4, 1, 128, dtype=dtype), softcap=1.5)
    assert all(shared < 98 << 10 for _, shared in asked)
    assert [name.endswith("true>") for name, _ in asked] == [True, True, True, False]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (PagedRows([(20, 200)], 2, 1, 128), {"window": 30, "sink": 5}),
        (PagedRows([(9, 150)], 2, 1, 256), {}),
        (PagedRows([(9, 150)], 2, 1, 80), {"softcap": 1.5}),
        (PagedRows([(9, 150)], 16, 1, 96, 3, torch.float16), {}),
    ],
    ids=str,
)
def test_there_is_no_race_in_others(checked_machine, rows, options):
    check(checked_machine, rows, **options)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (PagedRows([(70, 700)], 2, 1, 64), {}),
        (PagedRows([(20, 600)], 2, 1, 128), {"window": 150, "sink": 129}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_there_is_no_race_between_warpgroups(checked_machine, rows, options, monkeypatch):
    check(choosing(checked_machine, "warpgroups", monkeypatch), rows, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_there_is_no_race(checked_machine, dtype):
    # Three tiles of keys: the third goes where the first was.
    check(checked_machine, PagedRows([(9, 150), (2, 2)], 2, 1, 64, 16, dtype))


def test_a_token_is_the_same_bits_in_any_company(either):
    together = PagedRows([(70, 100), (5, 9)], 2, 1, 64)
    alone = PagedRows([(70, 100)], 2, 1, 64)
    alone.queries = together.queries[:70]
    assert torch.equal(attend(either, together)[:70], attend(either, alone))


def test_the_first_token_after_a_sink_is_not_read(either):
    rows, options = PagedRows([(8, 250)], 2, 1, 64), {"window": 20, "sink": 5}
    expected = attend(either, rows, **options)
    rows.put(0, 5, keys=torch.full((1, 64), torch.nan), values=torch.full((1, 64), torch.nan))
    assert torch.equal(attend(either, rows, **options), expected)


def test_a_query_that_is_not_a_number_stays_its_own(either):
    rows = PagedRows([(70, 100)], 2, 1, 64)
    expected = attend(either, rows)
    rows.queries[3, 1] = torch.nan
    got = attend(either, rows)
    assert got[3, 1].isnan().all()
    got[3, 1] = expected[3, 1]
    assert torch.equal(got, expected)


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(("group", "head_dim"), [(4, 32), (1, 64), (3, 128), (8, 256)])
def test_a_plan_covers_what_each_query_sees(window, group, head_dim):
    num_new = np.array([1, 0, 300, 64, 7], np.int32)
    lengths = num_new + np.array([0, 9, 0, 1000, 31], np.int32)
    shape = AttentionShape(group, 1, head_dim, scale=1.0, window=window)
    items = plan_context(num_new, lengths, shape)
    tile = 64 if head_dim == 256 else 128
    seen = set()
    for row, first_query, first, last in items.tolist():
        for packed in range(first_query, min(first_query + tile, num_new[row] * group)):
            position = lengths[row] - num_new[row] + packed // group
            seen.add((row, packed))
            assert first <= (0 if window is None else max(0, position + 1 - window))
            assert last > position
    assert len(seen) == num_new.sum() * group
    assert (np.diff(items[:, 3] - items[:, 2]) <= 0).all()


@pytest.mark.every(7)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_8_bit_pages(machine, head_dim, dtype):
    check(machine, PagedRows([(70, 90), (5, 5)], 4, 2, head_dim, 16, dtype, SCALES))


@pytest.mark.every(7)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "options",
    [{"window": 20, "sink": 3}, {"softcap": 1.5}, {"window": 20, "sink": 3, "softcap": 1.5}],
    ids=str,
)
def test_8_bit_pages_in_float16(machine, options, head_dim):
    rows = PagedRows([(70, 90), (5, 5)], 18, 2, head_dim, 3, torch.float16, SCALES)
    check(machine, rows, **options)


def test_8_bit_pages_have_no_race(checked_machine):
    rows = PagedRows([(9, 150), (2, 2)], 2, 1, 64, cache_scales=SCALES[:, :1].contiguous())
    check(checked_machine, rows)


def test_8_bit_pages_without_scales(machine):
    rows = PagedRows([(9, 150), (2, 2)], 2, 2, 64, cache_scales=SCALES)
    rows.cache_scales = None
    with pytest.raises(ValueError, match="pages of torch.float8_e4m3fn need cache_scales"):
        attend(machine, rows)


def test_a_shape_of_other_pages(machine):
    rows = PagedRows([(9, 150), (2, 2)], 2, 2, 64, cache_scales=SCALES)
    rows.shape = lambda scale: AttentionShape(2, 2, 64, scale, fp8=False)
    with pytest.raises(
        ValueError, match="pages of torch.float8_e4m3fn do not match fp8 = False in"
    ):
        attend(machine, rows)


def test_tensors_that_do_not_fit(machine):
    rows = PagedRows([(3, 3)], 2, 2, 64)
    rows.kv_lengths = rows.kv_lengths.long()
    with pytest.raises(ValueError, match=r"kv_lengths is torch.int64 \[1\], expected torch.int32"):
        attend(machine, rows)
