"""Matrices in 4 bits: how they are rounded, kept and multiplied, by each kind of instructions that
this machine has, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from torch import Tensor

from gptmanager.errors import ConfigError
from gptmanager.kernels import CpuKernels
from gptmanager.kernels.gemm import (
    int4_matmul,
    int4_tiles,
    int8_tiles,
    matmul_plan,
    weight_quantization,
)
from gptmanager.kernels.gemm.int4_groups import CODEBOOKS, GROUP, Codebook, Groups, whole_groups
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.int4_tiles import GROUP_BYTES, SCALE_BYTES, widen_numbers_to_pairs
from gptmanager.kernels.gemm.matmul_task import MATMUL_TASK
from gptmanager.kernels.gemm.packed_matrix import PackedMatrix, Quantized
from gptmanager.kernels.gemm.panels.words import PackedGroups
from gptmanager.kernels.gemm.unit import unit_matmul
from gptmanager.kernels.gemm.unit.int8_unit_tiles import (
    SPAN_BYTES,
    SPAN_GROUPS,
    has_int8_unit,
    unpack_numbers,
)
from gptmanager.kernels.simd import byte_tables
from gptmanager.kernels.simd.byte_tables import BYTES, load_table, looked_up
from gptmanager.kernels.simd.lanes import intrinsic, long, nothing, task_at

Variety = Literal["symmetric", "minima", "e2m1", "iq4"]
VARIETIES: Sequence[Variety] = get_args(Variety)
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
    _few, _many, _few_numbers, _many_numbers = (
        int4_matmul._share_by_dots(levels, False, has_codebook)
        for has_codebook in (False, True)
        for levels in (2, 1)
    )
else:
    _few = _many = _few_numbers = _many_numbers = int4_matmul._share_by_lanes


def narrow_few(address: int) -> None:
    _few(task_at(address, MATMUL_TASK), address)


def narrow_many(address: int) -> None:
    _many(task_at(address, MATMUL_TASK), address)


def narrow_few_numbers(address: int) -> None:
    _few_numbers(task_at(address, MATMUL_TASK), address)


def narrow_many_numbers(address: int) -> None:
    _many_numbers(task_at(address, MATMUL_TASK), address)


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
@pytest.mark.parametrize("variety", VARIETIES)
def test_the_unit_has_the_bits_of_the_dots(
    monkeypatch: pytest.MonkeyPatch, variety: Variety
) -> None:
    for (outs, depth), num_rows in itertools.product(SHAPES, (9, 11, 15, 16)):
        matrix, x = packed(any_groups(outs, depth, variety)), randn(num_rows, depth, seed=2)
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
        monkeypatch.setattr(int4_matmul, "multiply_codebook_by_int16", narrow_few_numbers)
        monkeypatch.setattr(int4_matmul, "multiply_codebook_by_int8", narrow_many_numbers)
    return kind


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def any_groups(rows: int, columns: int, variety: Variety, seed: int = 0) -> Groups:
    """Scales of both signs and many sizes, as files may have them."""
    made, count = torch.Generator().manual_seed(seed), -(-columns // GROUP)
    values = torch.randint(0, 16, (rows, columns), generator=made, dtype=torch.uint8)
    scales, lowest = (torch.randn(rows, count, generator=made).half() for _ in range(2))
    codebook = variety if variety == "e2m1" or variety == "iq4" else None
    return Groups(values, scales * 0.1, lowest if variety == "minima" else None, codebook)


def packed(groups: Groups, dtype: torch.dtype = torch.float32) -> Int4Matrix:
    matrix = Int4Matrix(*groups.values.shape, dtype, codebook=groups.codebook)
    matrix.copy_(groups)
    return matrix


def tolerance(kind: str, num_rows: int) -> float:
    """Return the error, relative to a result's norm, from rounding activations or both factors."""
    if kind == "lanes":
        return 2e-6
    if kind == "unit":
        return 1e-2 if num_rows <= unit_matmul.SEVERAL_ROWS else 6e-3
    return 1e-4 if num_rows <= int4_matmul.FEW_ROWS else 1e-2


@pytest.mark.parametrize("variety", VARIETIES)
@pytest.mark.every(2)
def test_matmuls_are_right_at_every_edge(kind: str, variety: Variety) -> None:
    ops = CpuKernels()
    for (outs, depth), num_rows in itertools.product(SHAPES, ROWS):
        groups, bias = any_groups(outs, depth, variety), randn(outs, seed=1)
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
        groups = any_groups(outs, 64, "minima")
        x, bias = randn(num_rows, 64, seed=2).to(dtype), randn(outs, seed=1).to(dtype)
        gate, up = (x.double() @ groups.floats().double().T + bias.double()).chunk(2, dim=-1)
        found = CpuKernels().linear_silu_mul(x, packed(groups, dtype), bias).double()
        wanted = F.silu(gate) * up
        assert (found - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.parametrize("variety", ["symmetric", "minima", "e2m1"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@needs_dots
def test_few_rows_lose_nothing_next_to_an_outlier(dtype: torch.dtype, variety: Variety) -> None:
    """A channel is 1,000 times as large as others and has no weight."""
    groups = any_groups(64, 96, variety)
    groups.values[:, 70] = 8  # in e2m1, 8 means 0, too
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
    ops, matrix = CpuKernels(deterministic), packed(any_groups(100, 330, "minima"), dtype)
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
    matrix = packed(any_groups(20, 40, "symmetric"))
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
    variety=st.sampled_from(VARIETIES),
)
def test_groups_are_kept_and_looked_up_as_they_are(
    rows: int, columns: int, data: st.DataObject, dtype: torch.dtype, variety: Variety
) -> None:
    wanted = any_groups(rows, columns, variety)
    matrix = Int4Matrix(rows, columns, dtype, codebook=wanted.codebook)
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
    assert torch.equal(matrix.gathered(ids), wanted.floats().to(dtype)[ids])
    start = GROUP * data.draw(st.integers(0, (columns - 1) // GROUP))
    part = Int4Matrix(rows, columns - start, dtype, codebook=wanted.codebook)
    part.copy_(wanted, columns=slice(start, columns))
    assert torch.equal(part.unpacked(), matrix.unpacked()[:, start:])


def test_minima_appear_with_the_first_groups_that_have_them() -> None:
    matrix, ops, x = Int4Matrix(32, 64, torch.float32), CpuKernels(), randn(2, 64)
    first, second = any_groups(16, 64, "symmetric"), any_groups(16, 64, "minima")
    matrix.copy_(first)
    before, size = ops.linear(x, matrix), matrix.nbytes
    matrix.copy_(second, 16)
    assert matrix.minima is not None and matrix.nbytes == size + 32 * 2 * 2
    assert torch.equal(matrix.unpacked(), torch.cat((first.floats(), second.floats())))
    after = ops.linear(x, matrix)
    torch.testing.assert_close(after[:, :16], before[:, :16], rtol=1e-4, atol=1e-4)
    assert not torch.equal(after[:, 16:], before[:, 16:])


def test_a_scale_without_a_minimum_in_float16_is_refused() -> None:
    wide = any_groups(16, 64, "symmetric")
    wide.scales[3, 1] = 9000.0
    other = any_groups(16, 64, "minima")
    for first, second in ((wide, other), (other, wide)):
        matrix = Int4Matrix(32, 64, torch.float32)
        matrix.copy_(first)
        assert torch.equal(matrix.unpacked(slice(16)), first.floats())
        with pytest.raises(ConfigError, match="a scale of more than 8188"):
            matrix.copy_(second, 16)


def test_groups_with_minima_of_their_own_may_have_any_scale() -> None:
    large = any_groups(16, 64, "minima")
    large.scales[3, 1] = 9000.0
    assert torch.equal(packed(large).unpacked(), large.floats())


@pytest.mark.parametrize("variety", ["minima", "iq4"])
def test_parts_are_views_with_their_scales(variety: Variety) -> None:
    matrix, x = packed(any_groups(64, 64, variety)), randn(5, 64)
    whole = CpuKernels().linear(x, matrix)
    parts = [CpuKernels().linear(x, part) for part in matrix.parts(2)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert matrix.parts(4)[3].scales.data_ptr() > matrix.scales.data_ptr()


def test_no_two_functions_have_one_name() -> None:
    both = (False, True)
    shares = [int4_matmul._share_by_dots(*own) for own in itertools.product((1, 2), both, both)]
    assert len({share.__qualname__ for share in shares}) == 8


@pytest.mark.parametrize("codebook", [None, "iq4"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_compiled_bodies_are_those_that_are_used(
    monkeypatch: pytest.MonkeyPatch, kind: str, deterministic: bool, codebook: Codebook | None
) -> None:
    used: list[object] = []
    monkeypatch.setattr(matmul_plan, "compiled", lambda body: used.append(body) or 1)
    matrix = Int4Matrix(32, 32, torch.float32, codebook=codebook)
    matmul_plan.plan_matmul(matrix, silu=False, deterministic=deterministic)
    known = matmul_plan.matmul_bodies(matrix.values.dtype, deterministic, codebook is not None)
    assert set(used) == {*known}


def test_a_processor_without_float16_packs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(CpuKernels().new_matrix(4, 4, torch.float32, "int4"), Int4Matrix)
    monkeypatch.setattr(matmul_plan, "HAS_FLOAT16", False)
    assert CpuKernels().new_matrix(4, 4, torch.float32, "int4") is None


def compiled_call(emit: Callable[..., object]) -> Callable[..., None]:
    """Compile an intrinsic with three addresses as its arguments."""
    called = intrinsic(nothing, long, long, long)(emit)

    @njit
    def run(first, second, third):  # type: ignore[no-untyped-def]
        called(first, second, third)

    return run  # type: ignore[no-any-return]


def test_each_kind_of_byte_shuffle_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processors have narrower shuffles, or none that LLVM knows by a name of ours."""
    table = torch.arange(-7, 9, dtype=torch.int8) * 16
    places = torch.randint(0, 16, (64,), dtype=torch.uint8)
    shuffles = [
        ("", 0),
        ("llvm.x86.ssse3.pshuf.b.128", 16),
        ("llvm.x86.avx2.pshuf.b", 32),
        ("llvm.x86.avx512.pshuf.b.512", 64),
    ]
    for own in shuffles[: 1 + shuffles.index(byte_tables._shuffle())]:
        monkeypatch.setattr(byte_tables, "_shuffle", lambda own=own: own)

        def look_up(builder: Any, numbers: Any, given: Any, result: Any) -> None:
            given, result = (builder.inttoptr(it, BYTES.as_pointer()) for it in (given, result))
            loaded, places = load_table(builder, numbers), builder.load(given, align=1)
            builder.store(looked_up(builder, loaded, places), result, align=1)

        found = torch.zeros(64, dtype=torch.int8)
        compiled_call(look_up)(table.data_ptr(), places.data_ptr(), found.data_ptr())
        assert torch.equal(found, table[places.int()]), own


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_panels_of_numbers_are_widened_and_unpacked(codebook: Codebook) -> None:
    """A matrix unit multiplies what this writes; few processors have one."""
    matrix = packed(any_groups(16, 64, codebook))
    numbers = CODEBOOKS[codebook]

    @njit
    def run(values, scales, table, pairs, span):  # type: ignore[no-untyped-def]
        for n in range(2):
            from_group, own = values + GROUP_BYTES * n, scales + SCALE_BYTES * n
            widen_numbers_to_pairs(pairs + 1024 * n, from_group, own, table)
        unpack_numbers(span, values, scales, table, 2)

    pairs = torch.zeros(32, 16, 2, dtype=torch.bfloat16)
    span = torch.zeros(SPAN_BYTES, dtype=torch.int8)
    addresses = (it.data_ptr() for it in (matrix.values, matrix.scales, numbers, pairs, span))
    run(*addresses)
    exact = matrix.unpacked()
    rounded = pairs.permute(1, 0, 2).flatten(1).float()
    torch.testing.assert_close(rounded, exact, rtol=2**-8, atol=0)
    found = span[: 2 * 512].view(16, 16, 4).permute(1, 0, 2).flatten(1)
    assert torch.equal(found, numbers[matrix.groups().values.int()])
    scales = span[SPAN_GROUPS * 512 :].view(torch.float32)[:32].view(2, 16).t()
    assert torch.equal(scales, matrix.groups().scales.float())


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_floats_are_rounded_to_the_nearest_number_of_a_codebook(
    codebook: Codebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, numbers = randn(9, 100), CODEBOOKS[codebook].float()
    rows[3, 32:64], rows[4, 99], rows[5, 1] = 0.0, torch.inf, 1e30
    matrix = Int4Matrix(9, 100, torch.float32, codebook=codebook)
    matrix.copy_(rows)
    found, scales = matrix.unpacked(), matrix.groups().scales.float()
    made: list[tuple[int, ...]] = []

    def whole(rows: Tensor) -> Tensor:
        made.append(tuple(rows.shape))
        return whole_groups(rows)

    monkeypatch.setattr(weight_quantization, "_AT_ONCE", 250)
    monkeypatch.setattr(weight_quantization, "whole_groups", whole)
    in_parts = weight_quantization.round_to_codebook(rows, codebook)
    assert torch.equal(in_parts.floats().nan_to_num(), found.nan_to_num())
    assert made == [(2, 100)] * 4 + [(1, 100)]  # only these have temporary tensors at once
    assert not found[4, 96:].isfinite().any() and torch.equal(found[3, 32:64], torch.zeros(32))
    for row, group in itertools.product((0, 1, 2, 3, 4, 5, 8), range(3)):
        own = slice(32 * group, 32 * group + 32)
        nearest = (rows[row, own, None] - scales[row, group] * numbers).abs().amin(1)
        torch.testing.assert_close((rows[row, own] - found[row, own]).abs(), nearest)
    assert (found[:3] - rows[:3]).norm() < 0.11 * rows[:3].norm()


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_floats_of_a_matrix_with_a_codebook_are_its_numbers_again(codebook: Codebook) -> None:
    """Also if no element of a group is the largest number of the codebook."""
    groups = any_groups(64, 96, codebook)
    groups.values[CODEBOOKS[codebook][groups.values.int()].abs() > 90] = 3
    groups.values[CODEBOOKS[codebook][groups.values.int()].abs() == 12] = 3
    matrix = packed(groups)
    matrix.copy_(groups.floats())
    assert torch.equal(matrix.unpacked(), groups.floats())


def test_groups_of_another_codebook_are_rounded() -> None:
    for one, other in itertools.permutations(VARIETIES, 2):
        groups, given = any_groups(16, 64, one), any_groups(16, 64, other)
        matrix = packed(groups)
        is_same = given.codebook == groups.codebook
        matrix.copy_(given)
        assert matrix.codebook == groups.codebook
        assert torch.equal(matrix.unpacked(), given.floats()) == is_same
        assert (matrix.unpacked() - given.floats()).norm() < 0.15 * given.floats().norm()
        assert is_same or not matrix.adopt(packed(given).panels)


@pytest.mark.parametrize("codebook", [None, "iq4"])
def test_packed_groups_of_another_codebook_are_rounded(codebook: Codebook | None) -> None:
    words = randn(16, 16).view(torch.int32)
    given = PackedGroups(words, 128, torch.ones(16, 4).half(), GROUP, codebook="e2m1")
    matrix = Int4Matrix(16, 128, torch.float32, codebook=codebook)
    matrix.copy_(given)
    assert (matrix.unpacked() - given.floats()).norm() < 0.15 * given.floats().norm()
