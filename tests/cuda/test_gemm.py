from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from kernel_values import close, exact, on, randn, rounded

from gptmanager.cuda.device.launch import EmulatorLauncher
from gptmanager.cuda.gemm import gemm as tiled_products
from gptmanager.cuda.gemm.byte_rows import Fp8Rows, Int8Rows
from gptmanager.cuda.gemm.gemm import covers, gemm, new_counters, plan_matmul

pytestmark = pytest.mark.every(3)

NARROW = (torch.float16, torch.bfloat16)


class Card:
    """An H200, or another card by its figures."""

    def __init__(self, num_multiprocessors=132, max_shared_mem=227 << 10):
        self.num_multiprocessors = num_multiprocessors
        self.max_shared_mem = max_shared_mem


class Small(EmulatorLauncher):
    max_shared_mem = 99 << 10


def tensors(rows, width, depth, dtype=torch.bfloat16, scale=1.0):
    x, weight = randn(rows, depth, dtype=dtype), randn(width, depth, dtype=dtype, seed=1)
    return x, (weight * scale / depth**0.5).to(dtype), randn(width, dtype=dtype, seed=2)


def expected(x, weight, bias, silu):
    result = x.double() @ exact(weight).T
    result = result if bias is None else result + bias.double()
    if not silu:
        return result
    gate, up = result.chunk(2, dim=1)
    return gate * gate.sigmoid() * up


def check(machine, rows, width, depth, dtype=torch.bfloat16, silu=False, has_bias=True, kind=None):
    launcher = machine.launcher
    x, weight, bias = tensors(rows, (1 + silu) * width, depth, dtype, 1.0 + silu)
    weight = weight if kind is None else rounded(weight, kind)
    bias = bias if has_bias else None
    out = machine.empty((rows, width), dtype)
    arrived = new_counters(launcher, out.device)
    on_machine = [on(machine, it) for it in (x, weight, bias)]
    gemm(launcher, out, *on_machine, arrived=arrived, silu=silu)
    close(out, expected(x, weight, bias, silu))
    assert not arrived.any()
    return plan_matmul(launcher, rows, width, depth, silu, kind is not None)


# Rows, columns, elements of the sums, and with an activation or not: each kind of tiles, parts of
# all of them, and what blocks share (of 4 multiprocessors).
SHAPES = {
    (17, 9, 8, False): "one part of a round",
    (32, 130, 648, False): "a block in the middle of each tile, and one for both",
    (18, 64, 400, True): "four blocks for one tile, all columns",
    (48, 129, 72, False): "the last tile has a column",
    (64, 66, 136, True): "all rows, two columns of the last tile",
    (40, 900, 40, False): "wide tiles",
    (33, 500, 72, True): "wide tiles of a gate",
    (65, 130, 136, False): "a row in the third matrix",
    (100, 63, 200, True): "an odd number of columns",
    (128, 900, 40, False): "wide tiles, all rows",
    (97, 500, 72, True): "wide tiles of a gate, a row in the fourth matrix",
    (130, 515, 72, False): "blocks of a tile and a half",
    (256, 70, 136, True): "all rows",
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.every(9)
def test_gemv(machine, shape):
    number = [*SHAPES].index(shape)
    *sizes, silu = shape
    check(machine, *sizes, dtype=NARROW[number % 2], silu=silu, has_bias=number % 3 > 0)


def in_8_bits(shape):
    """A shape whose weight has as many bytes in 8 bits."""
    rows, width, depth, silu = shape
    return rows, width, 2 * depth, silu


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.every(9)
def test_gemm_of_int8_weights(machine, shape):
    number = [*SHAPES].index(shape)
    rows, width, depth, silu = in_8_bits(shape)
    given = {"silu": silu, "has_bias": number % 3 > 0, "kind": Int8Rows}
    check(machine, rows, width, depth, dtype=NARROW[1 - number % 2], **given)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_gemm_of_8_bit_floats(machine, dtype):
    check(machine, 18, 70, 144, dtype=dtype, silu=dtype is torch.float16, kind=Fp8Rows)


@pytest.mark.parametrize("is_int8", [False, True], ids=["floats", "int8"])
def test_the_shapes_are_of_every_kind_and_every_way_to_share(toolchain, is_int8):
    shapes = map(in_8_bits, SHAPES) if is_int8 else SHAPES
    plans = {shape: plan_matmul(EmulatorLauncher(), *shape, is_int8) for shape in shapes}
    kinds = {(plan.kind.m, plan.kind.n, shape[3]) for shape, plan in plans.items()}
    assert len(kinds) == len(tiled_products.PROGRAM.kernels) / len(NARROW) / 3 == 12
    shared = {plan.blocks_of_a_tile for plan in plans.values()}
    assert shared >= {1, 2, 3}
    several = [plan for plan in plans.values() if plan.share > plan.rounds]
    assert {plan.blocks_of_a_tile for plan in several} >= {2}


@pytest.mark.slow
def test_products_have_no_race(checked_machine):
    for depth, kind in ((400, None), (1600, Int8Rows)):
        plan = check(checked_machine, 20, 24, depth, silu=True, kind=kind)
        assert plan.blocks_of_a_tile > 1


def test_it_does_not_matter_which_block_comes_last(ordered_machines):
    """A block has the end of one tile and the begin of another, and the last block of neither."""
    shape = 20, 130, 648
    x, weight, bias = tensors(*shape)
    results = []
    for machine in ordered_machines:
        launcher, out = machine.launcher, machine.empty(shape[:2], torch.bfloat16)
        own, arrived = map(machine.tensor, (x, weight, bias)), new_counters(launcher, out.device)
        gemm(launcher, out, *own, arrived=arrived)
        plan = plan_matmul(launcher, *shape)
        assert (plan.num_tiles, plan.rounds, plan.share) == (2, 11, 6)
        results.append(out.cpu())
    close(results[0], expected(x, weight, bias, False))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("silu", [False, True], ids=["plain", "silu"])
def test_a_row_is_the_same_next_to_any_others(machine, silu):
    """Whatever is in them, and however many there are of one kind's number."""
    width, depth = 40, 200
    x, weight, _ = tensors(64, (1 + silu) * width, depth)
    weight, arrived = machine.tensor(weight), new_counters(machine.launcher, torch.device("cpu"))
    arrived = machine.tensor(arrived)

    def product(rows):
        out = machine.empty((len(rows), width), torch.bfloat16)
        own = machine.tensor(rows.clone())
        gemm(machine.launcher, out, own, weight, arrived=arrived, silu=silu)
        return out.cpu()

    whole = product(x)
    for first, last in ((0, 33), (9, 64), (20, 60)):
        assert torch.equal(product(x[first:last]), whole[first:last])
    x[::2] = torch.nan
    found = product(x)
    assert torch.equal(found[1::2], whole[1::2]) and found[::2].isnan().all()


def test_what_is_not_there_is_not_multiplied(machine):
    """A weight that is infinite makes its own column so, and no other."""
    x, weight, _ = tensors(20, 40, 72)
    weight[39, 70] = torch.inf
    weight[38, 0] = torch.inf
    x[1] = 0
    x[2, 0] = torch.inf
    out = machine.empty((20, 40), torch.bfloat16)
    arrived = new_counters(machine.launcher, out.device)
    own = machine.tensor(x), machine.tensor(weight)
    gemm(machine.launcher, out, *own, arrived=arrived)
    assert out.cpu()[0].isfinite().tolist() == [True] * 38 + [False] * 2
    assert out.cpu()[0].isinf().tolist()[38:] == [True] * 2, "and not NaN: inf * 0"
    assert out.cpu()[1].tolist()[:38] == [0.0] * 38
    assert out.cpu()[2].isinf().tolist()[:38] == [True] * 38, "and not NaN: inf * 0"


def test_tensors_that_do_not_fit(machine):
    launcher = machine.launcher
    out = machine.empty((20, 8), torch.bfloat16)
    arrived = new_counters(launcher, out.device)
    x, weight, _ = map(machine.tensor, tensors(20, 8, 12))
    assert not covers(launcher, x, weight)
    with pytest.raises(ValueError, match="20 rows of 12 torch.bfloat16 are not covered"):
        gemm(launcher, out, x, weight, arrived=arrived)
    x, weight, bias = tensors(257, 8, 16)
    assert covers(launcher, x[:256], weight) and not covers(launcher, x, weight)
    assert not covers(launcher, x[:20].float(), weight.float())
    assert not covers(launcher, x.flatten()[1:17].view(1, 16), weight)
    x, weight, bias = machine.tensor(x[:20].clone()), machine.tensor(weight), machine.tensor(bias)
    with pytest.raises(ValueError, match=r"bias is torch.bfloat16 \[8\], expected .* \[16\]"):
        gemm(
            launcher,
            out,
            x,
            machine.tensor(weight.cpu().repeat(2, 1)),
            bias,
            arrived=arrived,
            silu=True,
        )
    gemm(launcher, out[:0], x[:0], weight, bias, arrived=arrived)


def test_a_card_with_less_shared_memory_has_fewer_rows(toolchain):
    launcher, (x, weight, bias) = Small(), tensors(129, 24, 72)
    assert covers(launcher, x[:128], weight) and not covers(launcher, x, weight)
    out, arrived = x.new_empty(128, 24), new_counters(launcher, x.device)
    gemm(launcher, out, x[:128], weight, bias, arrived=arrived)
    close(out, expected(x[:128], weight, bias, False))


LLAMA = {"QKV": (6144, 4096), "output": (4096, 4096), "down": (4096, 14336), "head": (128256, 4096)}
QWEN = {"QKV": (1152, 896), "output": (896, 896), "down": (896, 4864), "head": (151936, 896)}
CARDS = {
    "H200": Card(),
    "A100": Card(108, 163 << 10),
    "RTX 4090": Card(128, 99 << 10),
}


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_all_blocks_of_a_plan_run_at_once_and_share_evenly(card):
    sizes = [*LLAMA.values(), *QWEN.values(), (14336, 4096, True), (4864, 896, True), (8, 8)]
    for rows, size in ((rows, size) for rows in (17, 40, 128, 256) for size in sizes):
        if rows == 256 and card.max_shared_mem == 99 << 10:
            continue
        plan = plan_matmul(card, rows, *size)
        kind = plan.kind
        fits = (card.max_shared_mem + 1024) // (kind.shared_bytes + 1024)
        assert 1 <= plan.num_blocks <= card.num_multiprocessors * min(kind.resident, fits)
        assert rows <= kind.rows < max(2 * rows, 33)
        total = plan.num_tiles * plan.rounds
        shares = np.minimum(np.arange(plan.num_blocks + 1) * plan.share, total)
        assert shares[-1] == total and (np.diff(shares) > 0).all()
        # the most that blocks have of one tile
        starts = np.arange(plan.num_tiles) * plan.rounds
        of_tiles = (starts + plan.rounds - 1) // plan.share - starts // plan.share + 1
        assert of_tiles.max() <= plan.blocks_of_a_tile <= of_tiles.max() + 1
        assert plan.blocks_of_a_tile == 1 or of_tiles.max() > 1


def test_large_matmuls_keep_all_multiprocessors_at_work():
    """Most of the time, each has a block with rounds to multiply."""
    for rows in (32, 64, 128, 256):
        for width, depth, *silu in (*LLAMA.values(), (14336, 4096, True)):
            plan = plan_matmul(CARDS["H200"], rows, width, depth, *silu)
            rounds = plan.num_tiles * plan.rounds
            at_once = max(1, plan.num_blocks / 132)
            assert rounds / 132 > 0.88 * plan.share * at_once, (rows, width, plan)


def test_wide_tiles_are_for_weights_that_are_long_to_read():
    kinds = {
        size: [plan_matmul(CARDS["H200"], rows, *size).kind[:2] for rows in (32, 64, 128, 256)]
        for size in (LLAMA["head"], LLAMA["output"])
    }
    assert kinds[LLAMA["head"]] == [(1, 4), (2, 8), (4, 8), (8, 4)]
    assert kinds[LLAMA["output"]] == [(1, 4), (2, 4), (4, 4), (8, 4)]
    assert {kind for kind, _ in pairwise(kinds)} == {LLAMA["head"]}
