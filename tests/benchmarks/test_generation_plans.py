"""Plans of generation attention take about as long as their bytes: by a model, without a GPU.

The model knows places and blocks, and nothing of how a plan is made.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from model_generation_plans import (
    H100_PCIE,
    H200,
    LOADS,
    START_US,
    Card,
    default_plan,
    floor,
    microseconds,
    shape_of,
    table,
)

from gptmanager.cuda.attention.generation_plan import GenerationPlan, Places, plan_generation

CARDS = {"H200": H200, "H100 PCIe": H100_PCIE}
SHAPES = {
    "group of 4": shape_of(8),
    "group of 16": shape_of(8, group=16),
    "heads of 64": shape_of(8, head_dim=64),
    "heads of 256": shape_of(8, head_dim=256),
    "8 bits": shape_of(8, fp8=True),
}
LONG = {name: rows for name, rows in LOADS.items() if sum(rows) > 40_000}


def excess(lengths, shape, card, plan=None, **options):
    """Time by the time of the bytes and of one start."""
    plan = plan or default_plan(lengths, shape, card)
    return microseconds(plan, shape, card, **options) / (floor(lengths, shape, card) + START_US)


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("lengths", LONG.values(), ids=LONG)
def test_time_is_that_of_the_bytes(lengths, card):
    assert excess(lengths, SHAPES["group of 4"], card) < 1.08


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["32 x 4096", "16 x 128, 16 x 8064", "50 x 4096", "256 x 512"])
def test_of_all_kinds_of_heads(name, shape):
    # where a multiprocessor has one block nobody reads while it starts
    alone = shape.head_dim == 256 and name == "256 x 512"
    assert excess(LOADS[name], shape, H200) < (1.15 if alone else 1.08)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 16, 32])
def test_of_any_number_of_kv_heads(num_kv_heads):
    for length in (512, 4096):
        lengths = [length] * (2**17 * 8 // num_kv_heads // length)
        assert excess(lengths, shape_of(num_kv_heads), H200) < 1.1
    skewed = [128, 128, 8064] * (32 // num_kv_heads + 1)
    assert excess(skewed, shape_of(num_kv_heads), H200) < 1.15


def test_short_loads_start_once():
    assert excess(LOADS["32 x 1024"], shape_of(8), H200) < 1.03
    assert microseconds(default_plan([1024], shape_of(8), H200), shape_of(8), H200) < 8


@pytest.mark.parametrize("name", LONG)
def test_places_need_not_be_equally_fast(name):
    generator = random.Random(0)
    speeds = [generator.uniform(0.85, 1.15) for _ in range(132 * 3)]
    assert excess(LOADS[name], shape_of(8), H200, speeds=speeds) < 1.12


def test_a_few_blocks_too_many_take_long():
    """The grid was once rounded up: 400 blocks, of which 396 have a place."""
    lengths = np.array(LOADS["32 x 4096"], np.int32)
    fitting, too_many = (
        plan_generation(lengths, 8, Places(multiprocessors, 3), stretch=704)
        for multiprocessors in (132, 134)
    )
    assert [len(plan.block_starts) - 1 for plan in (fitting, too_many)] == [49, 50]
    assert excess(lengths, shape_of(8), H200, fitting) < 1.12
    assert excess(lengths, shape_of(8), H200, too_many) > 1.25


def test_what_the_model_takes_into_account():
    card = Card("slow", 1, 1e9)
    shape = shape_of(1)

    def plan(*items, starts, parts):
        return GenerationPlan(*(np.array(it, np.int32) for it in (items, starts, parts)))

    # one block, alone: a trip for each pass; two starts, and no result that waits for others
    alone = plan((0, 0, 640, -1), (1, 0, 64, -1), starts=[0, 2], parts=[0, 0, 0])
    assert microseconds(alone, shape, card) == pytest.approx(2 * 2.5 + 11 * 0.75)
    # two blocks on one place, one after the other, and on two
    both = plan((0, 0, 640, -1), (1, 0, 64, -1), starts=[0, 1, 2], parts=[0, 0, 0])
    assert microseconds(both, shape, card, num_places=1) == pytest.approx(5 + 11 * 0.75)
    assert microseconds(both, shape, card) == pytest.approx(2.5 + 10 * 0.75)
    # they share what there is: half of a block's rate each, and all of it when one has ended
    half = replace(card, copy=32768 / 0.75)
    assert microseconds(both, shape, half) == pytest.approx(2.5 + 11 * 0.75)
    assert microseconds(both, shape, half, speeds=[1, 0.1, 1]) == pytest.approx(2.5 + 11 * 0.75)
    # a result that is written, and two that are merged
    split = plan((0, 0, 64, 0), (0, 64, 128, 1), starts=[0, 1, 2], parts=[0, 2])
    assert microseconds(split, shape, card) == pytest.approx(2.5 + 0.75 + 1 + 2 * 0.7)


def test_the_page_has_the_table_of_today():
    page = Path(__file__).parents[2] / "docs/benchmarks/model_of_generation_attention.md"
    assert table(shape_of(8), H200) in page.read_text("utf-8")
