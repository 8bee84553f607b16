"""Low-rank adapters on a device, against dense weights in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from adapter_cases import LAYER, expected, new_case, qkv_layout
from kernel_values import DTYPES, close, randn

from gptmanager.cuda.gemm.lora import MAX_MODULES, add_adapters, covers
from gptmanager.cuda.kernels import CudaKernels
from gptmanager.kernels.lora.adapter_arguments import AdapterModule

pytestmark = pytest.mark.every(4)

WIDTH, Q, KV = 136, 130, 33  # parts of a chunk, of a block, and a border of modules inside of it
COLUMNS = Q + 2 * KV
# Of the whole matrix, then of its three parts; nothing at all; an adapter that no token has.
RANKS = [(0, 8, 8, 8), (1, 0, 0, 0), (5, 64, 1, 17), (0, 0, 0, 0), (70, 3, 0, 16), (7, 7, 7, 7)]
MIXED = [2, 2, 2, -1, 0, 4, 0, 4, 4, 4, -1, 3, 1, *[2] * 9, 0, 0, -1]


def on_machine(machine, case, rows):
    adapters = case.with_rows(rows)
    tensors = (machine.tensor(it) for it in (adapters.pool, adapters.rows, adapters.table))
    return replace(adapters, **dict(zip(("pool", "rows", "table"), tensors, strict=True)))


def add(machine, case, rows, result, x):
    adapters, result = on_machine(machine, case, rows), machine.tensor(result.clone())
    add_adapters(machine.launcher, result, machine.tensor(x), adapters, LAYER, case.layout)
    return result.cpu()


def check_adapters(machine, dtype, rows, gap=8, ranks=RANKS):
    case = new_case(qkv_layout(WIDTH, Q, KV), ranks, dtype, gap)
    x, before = randn(len(rows), WIDTH, dtype=dtype), randn(len(rows), COLUMNS, dtype=dtype, seed=1)
    got = add(machine, case, rows, before, x)
    without = torch.tensor([slot < 0 for slot in rows], dtype=torch.bool)
    assert torch.equal(got[without], before[without])
    close(got, expected(case, rows, before, x))


@pytest.mark.parametrize("gap", [8, 1], ids=["aligned", "anywhere"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adapters_are_as_merged_weights(machine, dtype, gap):
    check_adapters(machine, dtype, MIXED, gap)
    check_adapters(machine, dtype, MIXED[:1], gap)
    check_adapters(machine, dtype, [], gap)


def test_ranks_that_leave_weights_aligned(machine):
    ranks = [(0, 8, 16, 64), (24, 0, 0, 72)]
    check_adapters(machine, torch.bfloat16, [0, 0, 0, 1, 1, -1, 0], ranks=ranks)
    check_adapters(machine, torch.float32, [0, 0, 0, 1, 1, -1, 0], ranks=ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_have_no_race(checked_machine, dtype):
    check_adapters(checked_machine, dtype, [*[0] * 16, 2, -1, 0, 2])


def test_a_matrix_with_fewer_modules_than_a_launch_has_room_for(checked_machine):
    """The last token has an adapter, and there is nothing behind its h."""
    case, rows = new_case((AdapterModule(0, 1, 6, 8),), [(3,)]), [0, -1, 0]
    x, before = randn(3, 8), randn(3, 7)
    close(add(checked_machine, case, rows, before, x), expected(case, rows, before, x))


def test_a_rank_after_the_last_is_not_read(checked_machine):
    """It would lie behind the pool, whose end is that of the adapter."""
    case = new_case((AdapterModule(0, 1, 2, 64),), [(1,)], gap=0)
    x, before = randn(1, 64), randn(1, 3)
    close(add(checked_machine, case, [0], before, x), expected(case, [0], before, x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_alone_and_in_any_company(machine, dtype):
    case = new_case(qkv_layout(WIDTH, Q, KV), RANKS, dtype)
    x, before = randn(len(MIXED), WIDTH, dtype=dtype), randn(len(MIXED), COLUMNS, dtype=dtype)
    together = add(machine, case, MIXED, before, x)
    for first, last in ((0, 1), (4, 5), (9, 10), (1, 7), (14, 25)):
        part = slice(first, last)
        alone = add(machine, case, MIXED[part], before[part], x[part])
        assert torch.equal(alone, together[part])
    order = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(2))
    mixed = add(machine, case, [MIXED[n] for n in order], before[order], x[order])
    assert torch.equal(mixed, together[order])


def test_many_tokens_are_as_few(machine):
    """Where there are many, a block takes more of them."""
    case = new_case((AdapterModule(0, 1, 6, 8),), [(2,), (3,)], torch.bfloat16)
    rows = [token // 11 % 3 - 1 for token in range(1030)]
    x, before = randn(1030, 8, dtype=torch.bfloat16), randn(1030, 7, dtype=torch.bfloat16)
    together = add(machine, case, rows, before, x)
    close(together, expected(case, rows, before, x))
    assert torch.equal(add(machine, case, rows[:40], before[:40], x[:40]), together[:40])


def test_other_adapters_at_the_same_launch(machine):
    """All that differs between steps is in tensors, whose sizes stay."""
    case = new_case(qkv_layout(WIDTH, Q, KV), RANKS)
    adapters, x, before = on_machine(machine, case, [0, 0, -1]), randn(3, WIDTH), randn(3, COLUMNS)
    result, tokens, kernels = (
        machine.tensor(before),
        machine.tensor(x),
        CudaKernels(machine.launcher),
    )
    kernels.add_adapters(result, tokens, adapters, LAYER, "qkv")
    close(result, expected(case, [0, 0, -1], before, x))
    result.copy_(machine.tensor(before))
    adapters.rows.copy_(machine.tensor(torch.tensor([-1, 4, 1], dtype=torch.int32)))
    kernels.add_adapters(result, tokens, adapters, LAYER, "qkv")
    close(result, expected(case, [-1, 4, 1], before, x))
    kernels.add_adapters(result, tokens, adapters, LAYER, "down")
    close(result, expected(case, [-1, 4, 1], before, x))


def test_what_no_kernel_covers_is_computed_by_the_reference(machine):
    layout = (AdapterModule(0, 2, 5, 9),)
    case = new_case(layout, [(3,)])
    x, before, adapters = randn(2, 9), randn(2, 8), on_machine(machine, case, [0, -1])
    result, tokens = machine.tensor(before), machine.tensor(x)
    assert not covers(result, tokens, adapters, layout)
    with pytest.raises(ValueError, match="1 modules over rows of 9 torch.float32 are not covered"):
        add_adapters(machine.launcher, result, tokens, adapters, LAYER, layout)
    CudaKernels(machine.launcher).add_adapters(result, tokens, adapters, LAYER, "qkv")
    close(result, expected(case, [0, -1], before, x))


def test_tensors_that_do_not_fit(machine):
    case = new_case(qkv_layout(WIDTH, Q, KV), RANKS)
    result, x = machine.tensor(randn(2, COLUMNS)), machine.tensor(randn(2, WIDTH))
    adapters = on_machine(machine, case, [0, 1])
    with pytest.raises(ValueError, match=r"rows is torch.int32 \[2\], expected .* \[1\]"):
        add_adapters(machine.launcher, result[:1], x[:1], adapters, LAYER, case.layout)
    with pytest.raises(ValueError, match="pool is torch.float32"):
        half = machine.tensor(randn(2, WIDTH, dtype=torch.float16))
        out = machine.tensor(randn(2, COLUMNS, dtype=torch.float16))
        add_adapters(machine.launcher, out, half, adapters, LAYER, case.layout)
    many = (*case.layout, case.layout[0])
    assert len(many) > MAX_MODULES and not covers(result, x, adapters, many)
