"""Matrices in 4 bits: how they are rounded, kept and multiplied, by each kind of instructions that
this machine has, against float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gptmanager.errors import ConfigError
from gptmanager.kernels import CpuKernels
from gptmanager.kernels.gemm import int4_matmul, int4_tiles, int8_tiles, matmul_plan
from gptmanager.kernels.gemm.int4_groups import GROUP, Groups
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.matmul_task import MATMUL_TASK
from gptmanager.kernels.gemm.packed_matrix import PackedMatrix, Quantized
from gptmanager.kernels.gemm.unit import unit_matmul
from gptmanager.kernels.gemm.unit.int8_unit_tiles import has_int8_unit
from gptmanager.kernels.simd.lanes import task_at

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (7, 33), (96, 300), (130, 64), (70, 544))
ROWS = (1, 2, 3, 4, 5, 7, 9, 16, 33, 70, 193)
needs_dots = pytest.mark.skipif(
    not int4_tiles.has_byte_dots(), reason="this processor has no dot products of bytes (VNNI)"
)
WIDE = pytest.param(
    "wide",
    marks=pytest.mark.skipif(
        not int8_tiles.has_int8_dots(), reason="this processor has no AVX-512 VNNI"
    ),
)
UNIT = pytest.param(
    "unit",
    marks=pytest.mark.skipif(
        not has_int8_unit(), reason="this processor has no matrix unit for bytes"
    ),
)
if int4_tiles.has_byte_dots():
    _narrow_few, _narrow_many = (int4_matmul._share_by_dots(n, False) for n in (2, 1))
else:
    _narrow_few = _narrow_many = int4_matmul._share_by_lanes


def narrow_few(address: int) -> None:
    _narrow_few(task_at(address, MATMUL_TASK), address)


def narrow_many(address: int) -> None:
    _narrow_many(task_at(address, MATMUL_TASK), address)


needs_both = pytest.mark.skipif(
    not (int4_tiles.has_byte_dots() and has_int8_unit()),
    reason="this processor has no matrix unit for bytes, or no dots",
)


@needs_both
@pytest.mark.parametrize(("kind", "bodies"), [("int8", 2), ("int4", 3)])
def test_a_processor_with_both_takes_dots_for_fewer_rows_than_its_unit(
    kind: Quantized, bodies: int
) -> None:
    products = CpuKernels()
    matrix = products.new_matrix(64, 64, torch.float32, kind)
    assert isinstance(matrix, PackedMatrix)
    plan, _ = products._plan(matrix)
    assert len({it.body for it in plan.instructions}) == bodies
    few, unit = plan.instructions[:2]
    assert few.most_rows < unit.most_rows and few.quantize is None and unit.quantize is not None
    for rows in (1, few.most_rows, few.most_rows + 1, unit_matmul.SEVERAL_ROWS + 1, 200):
        assert plan.for_rows(rows).most_rows >= rows


@needs_both
@pytest.mark.parametrize("minima", [False, True], ids=["symmetric", "minima"])
def test_the_unit_has_the_bits_of_the_dots(monkeypatch: pytest.MonkeyPatch, minima: bool) -> None:
    for (outs, depth), num_rows in itertools.product(SHAPES, (9, 11, 15, 16)):
        matrix, x = packed(any_groups(outs, depth, minima)), randn(num_rows, depth, seed=2)
        by_unit = CpuKernels().linear(x, matrix)
        with monkeypatch.context() as patched:
            patched.setattr(matmul_plan, "has_int8_unit", lambda: False)
            matrix.plans.clear()
            assert torch.equal(CpuKernels().linear(x, matrix), by_unit), (outs, depth, num_rows)


@pytest.fixture(params=["lanes", UNIT, WIDE, pytest.param("narrow", marks=needs_dots)])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kind: str = request.param
    monkeypatch.setattr(matmul_plan, "has_int8_unit", lambda: kind == "unit")
    monkeypatch.setattr(matmul_plan, "has_byte_dots", lambda: kind in ("wide", "narrow"))
    if kind == "narrow":
        monkeypatch.setattr(int4_matmul, "multiply_int4_by_int16", narrow_few)
        monkeypatch.setattr(int4_matmul, "multiply_int4_by_int8", narrow_many)
    return kind


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def any_groups(rows: int, columns: int, minima: bool, seed: int = 0) -> Groups:
    """Scales of both signs and many sizes, as files may have them."""
    made, count = torch.Generator().manual_seed(seed), -(-columns // GROUP)
    values = torch.randint(0, 16, (rows, columns), generator=made, dtype=torch.uint8)
    scales, lowest = (torch.randn(rows, count, generator=made).half() for _ in range(2))
    return Groups(values, scales * 0.1, lowest if minima else None)


def packed(groups: Groups, dtype: torch.dtype = torch.float32) -> Int4Matrix:
    matrix = Int4Matrix(*groups.values.shape, dtype)
    matrix.copy_(groups)
    return matrix


def tolerance(kind: str, num_rows: int) -> float:
    """Return the error, relative to a result's norm, from rounding activations or both factors."""
    if kind == "lanes":
        return 2e-6
    if kind == "unit":
        return 1e-2 if num_rows <= unit_matmul.SEVERAL_ROWS else 6e-3
    return 1e-4 if num_rows <= int4_matmul.FEW_ROWS else 1e-2


@pytest.mark.parametrize("minima", [False, True], ids=["symmetric", "minima"])
@pytest.mark.every(2)
def test_matmuls_are_right_at_every_edge(kind: str, minima: bool) -> None:
    ops = CpuKernels()
    for (outs, depth), num_rows in itertools.product(SHAPES, ROWS):
        groups, bias = any_groups(outs, depth, minima), randn(outs, seed=1)
        matrix, x = packed(groups), randn(num_rows, depth, seed=2)
        wanted = x.double() @ groups.floats().double().T
        allowed = tolerance(kind, num_rows) * max(wanted.norm(), x.norm() * groups.floats().norm())
        found = ops.linear(x, matrix).double()
        assert (found - wanted).norm() <= allowed, (outs, depth, num_rows)
        found = ops.linear(x, matrix, bias).double()
        assert (found - wanted - bias).norm() <= allowed, (outs, depth, num_rows)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gate_and_up_are_one_matmul(kind: str, dtype: torch.dtype) -> None:
    for outs, num_rows in itertools.product((32, 96, 160), (1, 6, 33)):
        groups = any_groups(outs, 64, True)
        x, bias = randn(num_rows, 64, seed=2).to(dtype), randn(outs, seed=1).to(dtype)
        gate, up = (x.double() @ groups.floats().double().T + bias.double()).chunk(2, dim=-1)
        found = CpuKernels().linear_silu_mul(x, packed(groups, dtype), bias).double()
        wanted = F.silu(gate) * up
        assert (found - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@needs_dots
def test_few_rows_lose_nothing_next_to_an_outlier(dtype: torch.dtype, minima: bool) -> None:
    """A channel is 1,000 times as large as others and has no weight."""
    groups = any_groups(64, 96, minima)
    groups.values[:, 70] = 8
    if groups.minima is not None:
        groups.minima[:, 2] = groups.scales[:, 2] * -8
    floats = groups.floats().double()
    x = randn(3, 96, seed=1)
    x[:, 70] *= 1000
    wanted = x.to(dtype).double() @ floats.T
    found = CpuKernels().linear(x.to(dtype), packed(groups, dtype)).double()
    assert (found - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_row_is_the_same_bits_in_any_company(
    kind: str, dtype: torch.dtype, deterministic: bool
) -> None:
    """Only other instructions have other bits, and deterministic ones are the same for all rows."""
    ops, matrix = CpuKernels(deterministic), packed(any_groups(100, 330, True), dtype)
    x, (plan, _) = randn(200, 330, seed=1).to(dtype), ops._plan(matrix)
    assert len(plan.instructions) == 1 or not deterministic
    known = [ops.linear(x[: it.most_rows], matrix) for it in plan.instructions]
    for count, start in itertools.product((1, 3, 4, 5, 6, 16, 33, 65, 193), (0, 1, 7)):
        alone = ops.linear(x[start : start + count], matrix)
        together = known[plan.instructions.index(plan.for_rows(count))]
        shared = min(start + count, len(together)) - start
        assert torch.equal(alone[:shared], together[start : start + shared])


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("num_rows", [3, 9])
def test_what_is_not_finite_stays_in_its_row(kind: str, num_rows: int, number: float) -> None:
    matrix = packed(any_groups(20, 40, False))
    x = torch.ones(num_rows, 40)
    wanted = CpuKernels().linear(x, matrix)
    x[1, 39] = number
    found = CpuKernels().linear(x, matrix)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[2:], wanted[2:])
    assert not found[1].isfinite().any()


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 100),
    data=st.data(),
    dtype=st.sampled_from(FLOATS),
    minima=st.booleans(),
)
def test_groups_are_kept_and_looked_up_as_they_are(
    rows: int, columns: int, data: st.DataObject, dtype: torch.dtype, minima: bool
) -> None:
    wanted, matrix = any_groups(rows, columns, minima), Int4Matrix(rows, columns, dtype)
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=3))})
    for first, end in itertools.pairwise(cuts):
        matrix.copy_(wanted.rows(slice(first, end)), first)
    found = matrix.groups()
    assert torch.equal(found.values, wanted.values) and torch.equal(found.scales, wanted.scales)
    assert torch.equal(found.offsets, wanted.offsets)
    assert matrix.holds(wanted) and torch.equal(matrix.unpacked(), wanted.floats().to(dtype))
    assert not matrix.holds(replace(wanted, values=wanted.values ^ 1))
    ids = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), max_size=5)), dtype=torch.int64)
    assert torch.equal(CpuKernels().embedding(ids, matrix), wanted.floats().to(dtype)[ids])
    start = GROUP * data.draw(st.integers(0, (columns - 1) // GROUP))
    part = Int4Matrix(rows, columns - start, dtype)
    part.copy_(wanted, columns=slice(start, columns))
    assert torch.equal(part.unpacked(), matrix.unpacked()[:, start:])


def test_minima_appear_with_the_first_groups_that_have_them() -> None:
    matrix, ops, x = Int4Matrix(32, 64, torch.float32), CpuKernels(), randn(2, 64)
    first, second = any_groups(16, 64, False), any_groups(16, 64, True)
    matrix.copy_(first)
    before, size = ops.linear(x, matrix), matrix.nbytes
    matrix.copy_(second, 16)
    assert matrix.minima is not None and matrix.nbytes == size + 32 * 2 * 2
    assert torch.equal(matrix.unpacked(), torch.cat((first.floats(), second.floats())))
    after = ops.linear(x, matrix)
    torch.testing.assert_close(after[:, :16], before[:, :16], rtol=1e-4, atol=1e-4)
    assert not torch.equal(after[:, 16:], before[:, 16:])


def test_a_scale_without_a_minimum_in_float16_is_refused() -> None:
    wide = any_groups(16, 64, False)
    wide.scales[3, 1] = 9000.0
    for first, second in ((wide, any_groups(16, 64, True)), (any_groups(16, 64, True), wide)):
        matrix = Int4Matrix(32, 64, torch.float32)
        matrix.copy_(first)
        assert torch.equal(matrix.unpacked(slice(16)), first.floats())
        with pytest.raises(ConfigError, match="a scale of more than 8188"):
            matrix.copy_(second, 16)


def test_groups_with_minima_of_their_own_may_have_any_scale() -> None:
    large = any_groups(16, 64, True)
    large.scales[3, 1] = 9000.0
    assert torch.equal(packed(large).unpacked(), large.floats())


def test_parts_are_views_with_their_scales() -> None:
    matrix, x = packed(any_groups(64, 64, True)), randn(5, 64)
    whole = CpuKernels().linear(x, matrix)
    parts = [CpuKernels().linear(x, part) for part in matrix.parts(2)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert matrix.parts(4)[3].scales.data_ptr() > matrix.scales.data_ptr()


def test_no_two_functions_have_one_name() -> None:
    shares = [int4_matmul._share_by_dots(*own) for own in itertools.product((1, 2), (False, True))]
    assert len({share.__qualname__ for share in shares}) == 4


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_compiled_bodies_are_those_that_are_used(
    monkeypatch: pytest.MonkeyPatch, kind: str, deterministic: bool
) -> None:
    used: list[object] = []
    monkeypatch.setattr(matmul_plan, "compiled", lambda body: used.append(body) or 1)
    matrix = Int4Matrix(32, 32, torch.float32)
    matmul_plan.plan_matmul(matrix, silu=False, deterministic=deterministic)
    assert set(used) == {*matmul_plan.matmul_bodies(matrix.values.dtype, deterministic)}


def test_a_processor_without_float16_packs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(CpuKernels().new_matrix(4, 4, torch.float32, "int4"), Int4Matrix)
    monkeypatch.setattr(matmul_plan, "HAS_FLOAT16", False)
    assert CpuKernels().new_matrix(4, 4, torch.float32, "int4") is None
