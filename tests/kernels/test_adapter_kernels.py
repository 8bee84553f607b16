"""Low-rank adapters on packed tokens, against dense weights in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from adapter_cases import LAYER, Case, expected, new_case, qkv_layout
from torch import Tensor

from gptmanager.kernels import CpuKernels, Kernels
from gptmanager.kernels.lora import adapter_plan
from gptmanager.kernels.lora.adapter_arguments import AdapterModule
from gptmanager.kernels.simd.pairs import has_pairs

pytestmark = pytest.mark.usefixtures("one_thread")
both_kernels = pytest.mark.parametrize("kernels", [Kernels(), CpuKernels()], ids=["torch", "cpu"])
exact_kernels = pytest.mark.parametrize(
    "kernels", [Kernels(deterministic=True), CpuKernels()], ids=["torch", "cpu"]
)
DTYPES = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Of the whole matrix, then of its three parts; nothing at all; an adapter that no token has.
RANKS = [
    (0, 8, 8, 8),
    (1, 0, 0, 0),
    (5, 64, 1, 17),
    (0, 0, 33, 0),
    (16, 3, 0, 12),
    (0, 0, 0, 0),
    (7, 7, 7, 7),
]
MIXED = [2, 2, 2, -1, 0, 4, 0, 4, 4, 4, 4, 4, -1, -1, 3, 5, 5, 1, *[2] * 40, 0, 3, *[0] * 7]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def add(kernels: Kernels, case: Case, rows: Sequence[int], result: Tensor, x: Tensor) -> Tensor:
    result = result.clone()
    kernels.add_adapters(result, x, case.with_rows(rows), LAYER, "qkv")
    return result


def check(kernels: Kernels, case: Case, rows: Sequence[int], dtype: torch.dtype) -> None:
    width = case.layout[0].width
    columns = max(it.first_column + it.num_columns for it in case.layout)
    x, before = randn(len(rows), width, dtype=dtype), randn(len(rows), columns, dtype=dtype, seed=1)
    got, wanted = add(kernels, case, rows, before, x), expected(case, rows, before, x)
    without = torch.tensor([slot < 0 for slot in rows], dtype=torch.bool)
    assert torch.equal(got[without], before[without])
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=max(1e-5, tolerance / 50))


@both_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("width", "q", "kv"), [(83, 70, 33), (256, 256, 64), (16, 1, 300)], ids=str
)
def test_adapters_are_as_merged_weights(
    kernels: Kernels, dtype: torch.dtype, width: int, q: int, kv: int
) -> None:
    case = new_case(qkv_layout(width, q, kv), RANKS, dtype)
    check(kernels, case, MIXED, dtype)
    check(kernels, case, MIXED[:1], dtype)
    check(kernels, case, [], dtype)


@pytest.fixture(params=[True, False], ids=["pairs", "lanes"])
def by_pairs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether A in bfloat16 is multiplied in pairs, on whatever processor."""
    if request.param and not has_pairs():
        pytest.skip("this processor has no dot products of bfloat16 pairs")
    monkeypatch.setattr(adapter_plan, "has_fast_pairs", lambda: request.param)
    return request.param


@pytest.mark.parametrize("width", [31, 32, 47, 48, 63, 65, 160, 256])
def test_products_by_pairs_and_by_lanes(by_pairs: bool, width: int) -> None:
    case = new_case(qkv_layout(width, 70, 33), RANKS, torch.bfloat16)
    order = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(2))
    check(CpuKernels(), case, MIXED, torch.bfloat16)
    check(CpuKernels(), case, [MIXED[place] for place in order], torch.bfloat16)


def test_a_row_by_pairs_is_the_same_in_any_company(by_pairs: bool) -> None:
    test_a_row_is_the_same_alone_and_in_any_company(CpuKernels(), torch.bfloat16)


def test_pairs_add_up_in_single_precision(by_pairs: bool) -> None:
    """What a sum in bfloat16 would lose; x in float32 is not rounded to it either."""
    case = new_case(qkv_layout(64, 16, 16), [(1, 0, 0, 0)], torch.bfloat16)
    own = case.adapters.table[0, LAYER]
    pool, start = case.adapters.pool, int(own[own[:, 1] > 0, 0])
    pool[start : start + 64], pool[start + 64 : start + 64 + 48] = 1.0, 2.0**-7
    x = torch.full((1, 64), 1 / 64)
    x[0, 63] = 128
    narrow = add(CpuKernels(), case, [0], torch.zeros(1, 48), x.bfloat16())
    assert narrow.tolist() == [[(128 + 63 / 64) / 128] * 48]
    x[0, 0] += 2.0**-16
    wide = add(CpuKernels(), case, [0], torch.zeros(1, 48), x)
    assert wide.tolist() == [[(128 + 63 / 64 + 2.0**-16) / 128] * 48]


@both_kernels
def test_any_rank_and_any_order(kernels: Kernels) -> None:
    case = new_case(qkv_layout(40, 24, 20), [(0, n, 65 - n, n % 7) for n in range(1, 65)])
    order = torch.randperm(130, generator=torch.Generator().manual_seed(1)) % 65 - 1
    check(kernels, case, order.tolist(), torch.float32)


@both_kernels
def test_inputs_that_are_narrower_than_a_vector(kernels: Kernels) -> None:
    check(kernels, new_case(qkv_layout(5, 6, 3), RANKS), MIXED, torch.float32)


@both_kernels
def test_a_pool_of_another_dtype(kernels: Kernels) -> None:
    check(kernels, new_case(qkv_layout(40, 24, 20), RANKS, torch.bfloat16), MIXED, torch.float32)


@both_kernels
def test_steps_without_adapters_stay_as_they_are(kernels: Kernels) -> None:
    case = new_case(qkv_layout(40, 24, 20), RANKS)
    x, before = randn(40, 40) * torch.nan, randn(40, 64)
    assert torch.equal(add(kernels, case, [-1] * 40, before, x), before)
    assert torch.equal(add(kernels, case, [5] * 40, before, x), before), "of no module"
    result = before.clone()
    kernels.add_adapters(result, x, case.with_rows([0] * 40), LAYER, "down")
    assert torch.equal(result, before), "no module adds to that matrix"


@both_kernels
def test_sums_are_rounded_once(kernels: Kernels) -> None:
    """Two modules, each of which adds a third of what is between two numbers."""
    case = new_case(qkv_layout(16, 16, 1), [(1, 1, 0, 0)])
    case.adapters.pool.zero_()
    for index in (4, 0):
        start = int(case.adapters.table[0, LAYER, index, 0])
        case.adapters.pool[start] = 1
        case.adapters.pool[start + 16 : start + 32] = 2.0**-7 / 3
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    x[0, 0] = 1
    got = add(kernels, case, [0], torch.ones(1, 18, dtype=torch.bfloat16), x)
    assert got[0, :16].tolist() == [1 + 2.0**-7] * 16


@exact_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_the_same_alone_and_in_any_company(kernels: Kernels, dtype: torch.dtype) -> None:
    case = new_case(qkv_layout(83, 70, 33), RANKS, dtype)
    x, before = randn(len(MIXED), 83, dtype=dtype), randn(len(MIXED), 136, dtype=dtype)
    together = add(kernels, case, MIXED, before, x)
    for token, slot in enumerate(MIXED):
        alone = add(kernels, case, [slot], before[token : token + 1], x[token : token + 1])
        assert torch.equal(alone[0], together[token])
    for first in range(1, 60, 7):
        part = slice(first, first + first % 9 + 2)
        assert torch.equal(add(kernels, case, MIXED[part], before[part], x[part]), together[part])
    order = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(2))
    mixed = add(kernels, case, [MIXED[n] for n in order], before[order], x[order])
    assert torch.equal(mixed, together[order])


@exact_kernels
def test_a_step_that_began_has_the_same_bits(kernels: Kernels) -> None:
    """Also where a module's number is larger than a number has bits."""
    case = new_case(qkv_layout(83, 70, 33), RANKS)
    x, before, step = randn(len(MIXED), 83), randn(len(MIXED), 136), case.with_rows(MIXED)
    many = torch.zeros(*step.table.shape[:2], 200, 2, dtype=torch.int64)
    many[:, :, torch.tensor([0, 5, 2, 4]) + 60] = step.table[:, :, [0, 5, 2, 4]]
    layout = tuple(it._replace(number=it.number + 60) for it in case.layout)
    far = replace(step, table=many, layout={"qkv": layout})
    alone = add(kernels, case, MIXED, before, x)
    for own in (step, far):
        begun = kernels.begin_adapters(own)
        assert begun is not None
        for _ in range(2):
            result = before.clone()
            kernels.add_adapters(result, x, begun, LAYER, "qkv")
            assert torch.equal(result, alone)
            kernels.add_adapters(result, x, begun, LAYER, "down")
            assert torch.equal(result, alone), "no module adds to that matrix"


def test_a_step_that_needs_nothing_is_none() -> None:
    case = new_case(qkv_layout(40, 24, 20), RANKS)
    case.adapters.table[:, [0, 2], :, 1] = 0  # only other layers have rows
    for rows in ([-1] * 5, [5, -1, 5], []):
        assert CpuKernels().begin_adapters(case.with_rows(rows)) is None
    assert CpuKernels().begin_adapters(case.with_rows([5, 0])) is not None
    assert CpuKernels().begin_adapters(None) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_gated_matmul_with_adapters(dtype: torch.dtype) -> None:
    """Tokens without one have the bits of the product alone; the others those in any company."""
    width = 64
    layout = (AdapterModule(1, 0, width, 32), AdapterModule(3, width, width, 32))
    case = new_case(layout, [(8, 8), (0, 0), (0, 3), (16, 0)], dtype)
    x, weight = randn(7, 32, dtype=dtype), randn(2 * width, 32, dtype=dtype)
    kernels = CpuKernels(deterministic=True)
    matrix = kernels.new_matrix(2 * width, 32, dtype)
    matrix = weight if matrix is None else matrix
    matrix.copy_(weight)

    def matmul(rows: Sequence[int], x: Tensor) -> Tensor:
        own = case.with_rows(rows)
        return kernels.linear_silu_mul_adapted(x, matrix, None, own, LAYER, "qkv")

    without = kernels.linear_silu_mul(x, matrix)
    for rows in ([0, -1, 0, 0, -1, 0, 2], [2] * 7, [0, -1, 1, 2, 0, -1, 3]):
        together = matmul(rows, x)
        for token, slot in enumerate(rows):
            part = slice(token, token + 1)
            assert torch.equal(matmul([slot], x[part])[0], together[token])
            assert torch.equal(without[token], together[token]) == (slot in (-1, 1))
    before = torch.nn.functional.linear(x.double(), weight.double())
    gate, up = expected(case, rows, before, x).chunk(2, dim=1)
    wanted = torch.nn.functional.silu(gate) * up
    tolerance = 4 * TOLERANCE.get(dtype, TOLERANCE[torch.float32])
    torch.testing.assert_close(together.double(), wanted, rtol=tolerance, atol=10 * tolerance)


def test_the_bits_do_not_depend_on_threads() -> None:
    case = new_case(qkv_layout(256, 512, 128), RANKS)
    x, before, kernels = randn(len(MIXED), 256), randn(len(MIXED), 768), CpuKernels()
    alone = add(kernels, case, MIXED, before, x)
    torch.set_num_threads(3)
    assert torch.equal(add(kernels, case, MIXED, before, x), alone)


def test_a_token_that_is_not_a_number_stays_alone() -> None:
    case, rows = new_case(qkv_layout(40, 24, 20), RANKS), [0, 0, 0, 2, 2]
    x, before = randn(5, 40), randn(5, 64)
    clean = add(CpuKernels(), case, rows, before, x)
    x[1] = torch.nan
    got = add(CpuKernels(), case, rows, before, x)
    assert got[1].isnan().all() and torch.equal(got[[0, 2, 3, 4]], clean[[0, 2, 3, 4]])


def test_memory_laid_out_otherwise_is_refused() -> None:
    case = new_case(qkv_layout(40, 24, 20), RANKS)
    adapters = replace(case.with_rows([0, 1]), rows=torch.tensor([0, 1]))
    with pytest.raises(TypeError, match=r"contiguous torch.int32 .* got a contiguous torch.int64"):
        CpuKernels().add_adapters(randn(2, 64), randn(2, 40), adapters, LAYER, "qkv")
    with pytest.raises(TypeError, match="got a strided"):
        wide = randn(2, 128)[:, ::2]
        CpuKernels().add_adapters(wide, randn(2, 40), case.with_rows([0, 1]), LAYER, "qkv")
