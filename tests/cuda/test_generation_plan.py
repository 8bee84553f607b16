"""How generation attention is cut. How long that takes: benchmarks/test_generation_plans.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from requirements import skip

from gptmanager.cuda.attention.generation_attention import PROGRAM, find_places, resident_blocks
from gptmanager.cuda.attention.generation_plan import PASS, Places, max_num_items, plan_generation
from gptmanager.cuda.device import compiler
from gptmanager.cuda.device.launch import EmulatorLauncher
from gptmanager.errors import ConfigError
from gptmanager.kernels.attention.attention_arguments import AttentionShape

H200 = Places(132, 3)


def check(plan, lengths, num_kv_heads, places, window=None, sink=0, chunked=False):
    """Each row's positions once, in blocks that all have a place; items in the order of rows."""
    places = max(places.multiprocessors * places.resident, num_kv_heads)
    assert (len(plan.block_starts) - 1) * num_kv_heads <= places
    assert plan.block_starts[0] == 0 and plan.block_starts[-1] == len(plan.items)
    assert (np.diff(plan.block_starts) >= 0).all()
    for row, length in enumerate(lengths):
        own = plan.items[plan.items[:, 0] == row]
        first = 0 if window is None else max(0, length - window)
        if window is not None and chunked:
            first = length - 1 - (length - 1) % window
        if first <= sink:
            first = 0
        seen = [at for _, begin, end, _ in own.tolist() for at in range(begin, end)]
        assert seen == [*range(min(sink, first)), *range(first, length)]
        assert (own[:, 1] < own[:, 2]).all()
        inner = own[1:, 1][own[1:, 1] == own[:-1, 2]]
        assert not (inner % PASS).any(), "cut where a block's warps end together"
        begin, end = plan.partial_starts[row : row + 2].tolist()
        assert own[:, 3].tolist() == ([*range(begin, end)] if len(own) > 1 else [-1])
        assert (end > begin) == (len(own) > 1)
    assert (np.diff(plan.items[:, 0]) >= 0).all() and len(plan.partial_starts) == len(lengths) + 1


@given(
    lengths=st.lists(st.integers(1, 3000), max_size=70),
    window=st.none() | st.integers(1, 2000),
    sink=st.integers(0, 700),
    num_kv_heads=st.sampled_from([1, 2, 3, 8, 32]),
    places=st.builds(Places, st.sampled_from([1, 4, 20, 114, 132]), st.integers(1, 5)),
    chunked=st.booleans(),
)
def test_plans_of_any_rows(lengths, window, sink, num_kv_heads, places, chunked):
    size, options = (num_kv_heads, places), {"window": window, "sink": sink}
    plan = plan_generation(np.array(lengths, np.int32), *size, **options, chunked=chunked)
    check(plan, lengths, *size, **options, chunked=chunked)
    most = max_num_items(len(lengths), *size, **options)
    assert len(plan.items) <= most
    padded = plan.padded(most, len(lengths) + 2)
    assert np.array_equal(padded.items[: len(plan.items)], plan.items)
    assert (padded.items[len(plan.items) :] == -1).all()
    assert len(padded.partial_starts) == len(lengths) + 3
    assert padded.num_partials == plan.num_partials


def test_the_most_items_that_there_can_be():
    """Recordings have room for so many, and no plan has use for less."""
    lengths = np.full(60, 5000, np.int32)
    assert len(plan_generation(lengths, 8, H200).items) > 0.9 * max_num_items(60, 8, H200)
    longest = np.full(60, 60_000, np.int32)
    seen = {"window": 50_000, "sink": 4000}
    items = plan_generation(longest, 8, H200, **seen).items
    assert len(items) > 0.9 * max_num_items(60, 8, H200, **seen)
    assert max_num_items(0, 8, H200) == 0


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    window=st.none() | st.integers(1, 2000),
    sink=st.integers(0, 700),
    stretch=st.sampled_from([64, 192, 1024]),
)
def test_a_fixed_stretch_cuts_a_row_alike_in_any_company(lengths, window, sink, stretch):
    options = {"window": window, "sink": sink}
    plan = plan_generation(np.array(lengths, np.int32), 8, H200, stretch=stretch, **options)
    check(plan, lengths, 8, H200, **options)
    alone = plan_generation(
        np.array(lengths[:1], np.int32), 2, Places(4, 1), stretch=stretch, **options
    )
    own = plan.items[plan.items[:, 0] == 0]
    assert np.array_equal(own, alone.items)
    inner = own[1:, 1][own[1:, 1] == own[:-1, 2]]
    assert not (inner % stretch).any()


def test_rows_that_fit_are_left_whole():
    assert (plan_generation(np.full(40, 4096, np.int32), 8, H200).items[:, 3] == -1).all()


def test_a_row_is_not_cut_into_more_than_it_pays_to_merge():
    assert len(plan_generation(np.array([131_072], np.int32), 1, H200).items) < 200


def test_plans_that_cannot_be():
    with pytest.raises(ValueError, match="stretch=100 must be a positive multiple of 64"):
        plan_generation(np.array([5], np.int32), 8, H200, stretch=100)
    with pytest.raises(ValueError, match="3 items of .* do not fit into 2 items"):
        plan_generation(np.array([5, 5, 5], np.int32), 8, H200).padded(2, 3)


# How many blocks run at a time --------------------------------------------------------------------

RESIDENT = {  # on a GPU with 227 KiB of shared memory for a block
    # head dimension: groups up to 8, up to 16, and the same of 8-bit pages
    32: (5, 4, 5, 4),
    64: (4, 3, 4, 3),
    80: (3, 3, 3, 3),
    96: (3, 2, 3, 2),
    128: (3, 2, 3, 2),
    256: (1, 1, 2, 2),
}


def shape_of(head_dim, tiles, fp8=False):
    return AttentionShape(16 * tiles - 8, 2, head_dim, 1.0, fp8=fp8)


def test_resident_blocks():
    kinds = [(1, False), (2, False), (1, True), (2, True)]
    for head_dim, expected in RESIDENT.items():
        shapes = [shape_of(head_dim, *kind) for kind in kinds]
        assert tuple(resident_blocks(shape, 227 << 10) for shape in shapes) == expected
    assert resident_blocks(shape_of(128, 1), 163 << 10) == 2  # sm_80
    assert resident_blocks(shape_of(128, 1), 99 << 10) == 1  # sm_120
    assert find_places(EmulatorLauncher(), shape_of(96, 1)) == Places(4, 3)


def shared_bytes(head_dim, is_fp8):
    """Tiles of a block's four warps, with rows padded to an odd number of 16."""
    row = head_dim * (1 if is_fp8 else 2) + 16
    return 4 * (3 if is_fp8 else 2) * 2 * 16 * row


@pytest.mark.gpu
def test_the_driver_finds_room_for_them(device_machine):
    """At least the planned number of blocks of each instantiation fits.

    More may fit for heads of 32 and 96, which may use fewer registers than they are allowed.
    """
    launcher = device_machine.launcher
    occupancy = launcher._cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
    for name in PROGRAM.kernels:
        _, head_dim, tiles, *cache = name.rstrip(">").partition("<")[2].split(", ")
        head_dim, tiles = int(head_dim), int(tiles)
        shared = shared_bytes(head_dim, bool(cache))
        if shared + 1024 > launcher.max_shared_mem:
            continue  # refused on this device
        kernel = launcher.kernel(PROGRAM, name, shared)
        found = occupancy(kernel._function.ptr, 128, shared)
        expected = resident_blocks(shape_of(head_dim, tiles, bool(cache)), launcher.max_shared_mem)
        assert expected <= found, name
        if launcher.arch == "sm_90a" and head_dim not in (32, 96):
            assert expected == found, name


@pytest.mark.parametrize(
    ("head_dim", "tiles", "is_fp8"),
    [  # the widest of each bound, and those that shared memory bounds
        *((32, 1, False), (32, 1, True), (32, 2, True), (64, 1, False), (64, 1, True)),
        *((80, 2, True), (128, 1, False), (128, 1, True), (128, 2, True), (256, 2, True)),
    ],
)
@pytest.mark.every(4)
def test_what_is_compiled_leaves_room_for_them(head_dim, tiles, is_fp8):
    """A multiprocessor of compute capability 9.0 has 64 Ki registers, which a warp gets by 256, and
    228 KiB of shared memory, of which CUDA takes one for each block.
    """
    try:
        compiler.find_nvrtc()
    except ConfigError as error:
        skip(str(error))
    cache = ", __nv_fp8_e4m3" if is_fp8 else ""
    name = f"generation_attention<__nv_bfloat16, {head_dim}, {tiles}{cache}>"
    figures = compiler.compile(PROGRAM.path, "sm_90a", [name]).figures[name]
    shared = shared_bytes(head_dim, is_fp8) + figures.shared_memory + 1024
    by_registers = 65536 // (4 * -(-figures.registers * 32 // 256) * 256)
    assert RESIDENT[head_dim][tiles - 1 + 2 * is_fp8] <= by_registers
    assert RESIDENT[head_dim][tiles - 1 + 2 * is_fp8] <= (228 << 10) // shared
    assert not figures.spill_stores
