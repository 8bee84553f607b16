"""Products with packed matrices against float64, at every shape where a tile, a panel or a unit of
the depth is not full; by each kind of instructions that this machine has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from torch import Tensor

from gptmanager.kernels import CpuKernels, PackedMatrix, plain
from gptmanager.kernels.gemm import (
    int8_tiles,
    int16_tiles,
    matmul,
    matmul_plan,
    matrix_tiles,
    quantized_activations,
)
from gptmanager.kernels.gemm.matrix_tiles import has_matrix_unit
from gptmanager.kernels.gemm.packed_matrix import Quantized
from gptmanager.kernels.gemm.unit.int8_unit_tiles import has_int8_unit
from gptmanager.kernels.simd import pairs
from gptmanager.kernels.simd.lanes import loop_named
from gptmanager.kernels.simd.pairs import has_fast_pairs

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((64, 32), (1, 1), (7, 5), (33, 33), (96, 300), (130, 64), (256, 96))
ROWS = (1, 2, 3, 5, 6, 7, 15, 16, 17, 31, 32, 33, 95, 96, 97, 130, 191, 192, 193, 225)
PAIRS = pytest.param(
    "pairs",
    marks=pytest.mark.skipif(
        not pairs.has_pairs(), reason="this processor has no dot products of bfloat16 pairs"
    ),
)
UNIT = pytest.param(
    "unit",
    marks=pytest.mark.skipif(not has_matrix_unit(), reason="this processor has no matrix unit"),
)
BYTES = pytest.param(
    "bytes",
    marks=pytest.mark.skipif(
        not int8_tiles.has_int8_dots(), reason="this processor has no int8 dot products"
    ),
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(values: Tensor, quantized: bool = False) -> PackedMatrix:
    matrix = PackedMatrix(*values.shape, values.dtype, quantized)
    matrix.copy_(values)
    return matrix


@pytest.fixture(params=["lanes", PAIRS, UNIT, BYTES])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    """Return kernels of one kind.

    Without quantization, bytes are computed as lanes; with quantization, pairs are.
    """
    in_unit = request.param == "unit"
    monkeypatch.setattr(matmul_plan, "has_matrix_unit", lambda: in_unit)
    monkeypatch.setattr(matmul_plan, "has_int8_unit", lambda: in_unit and has_int8_unit())
    monkeypatch.setattr(matmul_plan, "has_fast_pairs", lambda: request.param == "pairs")
    monkeypatch.setattr(matmul_plan, "has_int8_dots", lambda: request.param == "bytes")
    return CpuKernels()


def close(found: Tensor, wanted: Tensor, depth: int) -> None:
    """Within the rounding of a result, and of sums of `depth` products of normal numbers."""
    eps = torch.finfo(found.dtype).eps
    allowed = wanted.abs() * eps + depth**0.5 * 4e-6
    assert ((found.double() - wanted).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.every(3)
def test_products_are_right_at_every_edge(products: CpuKernels, dtype: torch.dtype) -> None:
    for (outs, depth), num_rows in itertools.product(SHAPES, ROWS):
        weight, bias = randn(outs, depth).to(dtype), randn(outs, seed=1).to(dtype)
        x = randn(num_rows, depth, seed=2).to(dtype)
        wanted = x.double() @ weight.double().T
        close(products.linear(x, packed(weight), None), wanted, depth)
        close(products.linear(x, packed(weight), bias), wanted + bias.double(), depth)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gate_and_up_are_one_matmul(products: CpuKernels, dtype: torch.dtype) -> None:
    for outs, num_rows in itertools.product((32, 64, 96, 160), (1, 6, 33, 193)):
        weight, bias = randn(outs, 48).to(dtype), randn(outs, seed=1).to(dtype)
        x = randn(num_rows, 48, seed=2).to(dtype)
        gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, dim=-1)
        found = products.linear_silu_mul(x, packed(weight), bias)
        wanted = F.silu(gate) * up
        allowed = wanted.abs() * torch.finfo(dtype).eps + 1e-4
        assert ((found.double() - wanted).abs() <= allowed).all()


def test_a_gate_that_ends_within_a_panel_is_computed_apart() -> None:
    weight, x = randn(2 * 24, 16), randn(5, 16, seed=1)
    gate, up = (x @ weight.T).chunk(2, dim=-1)
    found = CpuKernels().linear_silu_mul(x, packed(weight))
    torch.testing.assert_close(found, F.silu(gate) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_quantized_matrix_multiplies_as_what_it_holds(
    products: CpuKernels, dtype: torch.dtype
) -> None:
    for (outs, depth), num_rows in itertools.product(SHAPES, ROWS):
        weight, x = randn(outs, depth).to(dtype), randn(num_rows, depth, seed=2).to(dtype)
        matrix = packed(weight, quantized=True)
        held = held_by(matrix)
        exact = x
        if num_rows <= int16_tiles.FEW_ROWS or matmul_plan.has_int8_unit():
            exact = as_int16(x) if int16_tiles.has_int16_dots() else x
        elif matmul_plan.has_int8_dots():
            exact = as_int8(x)
        close(products.linear(x, matrix, None), exact.double() @ held.T, depth)


@pytest.mark.parametrize("quantized", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["bytes", pytest.param("unit", marks=UNIT.marks)])
def test_rows_have_the_dtype_of_the_matrix_before_they_are_quantized(
    monkeypatch: pytest.MonkeyPatch, kind: str, quantized: Quantized
) -> None:
    monkeypatch.setattr(matmul_plan, "has_int8_unit", lambda: kind == "unit")
    products = CpuKernels()
    matrix = products.new_matrix(40, 96, torch.bfloat16, quantized)
    assert isinstance(matrix, PackedMatrix)
    matrix.copy_(randn(40, 96))
    for it in products._plan(matrix)[0].instructions:
        x = randn(min(it.most_rows, 20), 96, seed=1)
        if it.dtype is torch.bfloat16:
            found = products.linear(x, matrix)
            assert torch.equal(found, products.linear(x.bfloat16(), matrix)), it.most_rows


def rounded(x: Tensor, positions: int, most: int, outlier: float = torch.inf) -> Tensor:
    """To whole numbers, the largest of so many positions to `most`; as float32 computes it. What
    is left of them, too, where that one is `outlier` times their mean magnitude.
    """
    parts, limit = [], torch.tensor(float(most))  # a number divided by a tensor is rounded twice
    for part in x.float().split(positions, dim=1):
        largest = part.abs().amax(dim=1, keepdim=True)
        scaled, factor = part * (limit / largest), (largest / limit).double()
        whole, left = scaled.round(), ((scaled - scaled.round()) * 254).round() / 254
        far = largest > outlier * part.abs().mean(dim=1, keepdim=True)
        parts.append((whole + left * far) * factor)
    return torch.cat(parts, dim=1)


def as_int16(x: Tensor) -> Tensor:
    """What few rows are as whole numbers of 16 bits, each stretch times its own factor; and what
    all rows are for a matrix unit.
    """
    return rounded(x, quantized_activations.MAX_POSITIONS, 127 * 256)


def as_int8(x: Tensor) -> Tensor:
    """What many rows are as whole numbers of 8 bits."""
    return rounded(x, quantized_activations.STRETCH, 127, quantized_activations.OUTLIER)


def held_by(matrix: PackedMatrix) -> Tensor:
    """The quantized rows, in float64."""
    assert matrix.scales is not None
    (rows, depth), whole = matrix.shape, matrix.values.transpose(1, 2).flatten(0, 1).flatten(1)
    return whole[:rows, :depth].double() * matrix.scales[:rows, None].double()


@pytest.mark.skipif(
    not int16_tiles.has_int16_dots(), reason="this processor has no int16 dot products (AVX-512)"
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("depth", [32, 512, 513, 800, 1500])
def test_few_rows_with_a_quantized_matrix_are_rounded_to_16_bits(
    dtype: torch.dtype, depth: int
) -> None:
    """Each stretch by its own largest number: a small one is not lost beside a large one."""
    matrix = packed(randn(70, depth).to(dtype), quantized=True)
    sizes = torch.logspace(-3, 2, -(-depth // 512)).repeat_interleave(512)[:depth]
    for num_rows in (1, 2, 3, 4, *((5, 33) if has_int8_unit() else ())):
        x = (randn(num_rows, depth, seed=2) * sizes).to(dtype)
        wanted = as_int16(x) @ held_by(matrix).T
        # of what lies between two numbers one or two go the other way
        step = x.double().abs().max() * held_by(matrix).abs().max() / 32767
        allowed = 2 * step + torch.finfo(dtype).eps * wanted.abs()
        found = CpuKernels().linear(x, matrix, None).double()
        assert ((found - wanted).abs() <= allowed).all()


@pytest.mark.parametrize("num_rows", [4, 5])
def test_the_largest_whole_numbers_add_up(products: CpuKernels, num_rows: int) -> None:
    """All of one sign, as large as they may be, for as long as a sum may be; and those that are
    nothing, or next to it.
    """
    values = torch.full((16, 1024), 2.0)
    values[1] = -2.0
    matrix = packed(values, quantized=True)
    x = torch.full((num_rows, 1024), 3.0)
    x[1], x[2], x[3] = -3.0, 0.0, 1e-38
    found = products.linear(x, matrix, None)
    assert found[0, :2].tolist() == pytest.approx([6144.0, -6144.0], rel=1e-6)
    assert found[1, :2].tolist() == pytest.approx([-6144.0, 6144.0], rel=1e-6)
    assert found[2:4].abs().max() < 1e-30


@pytest.mark.skipif(
    not int8_tiles.has_int8_dots(), reason="this processor has no int8 dot products"
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("depth", [32, 64, 65, 97, 256, 300, 1500])
def test_many_rows_with_a_quantized_matrix_are_rounded_to_8_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, depth: int
) -> None:
    """Each stretch by its own largest number: a small one is not lost beside a large one."""
    monkeypatch.setattr(matmul_plan, "has_int8_unit", lambda: False)
    matrix = packed(randn(70, depth).to(dtype), quantized=True)
    sizes = torch.logspace(-3, 3, -(-depth // 64)).repeat_interleave(64)[:depth]
    for num_rows in (5, 6, 7, 12):
        x = (randn(num_rows, depth, seed=2) * sizes).to(dtype)
        close_ends = x.double().abs().max() * depth**0.5 * 4e-6
        wanted = as_int8(x) @ held_by(matrix).T
        allowed = wanted.abs() * torch.finfo(dtype).eps + close_ends
        for own in (x, x.T.contiguous().T):
            found = CpuKernels().linear(own, matrix, None).double()
            assert ((found - wanted).abs() <= allowed).all()


@pytest.mark.skipif(
    not int8_tiles.has_int8_dots(), reason="this processor has no int8 dot products"
)
@pytest.mark.parametrize("factor", [1, 30, 1000])
@pytest.mark.parametrize("num_rows", [5, 33])
def test_an_outlier_costs_the_other_channels_no_precision(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, factor: float
) -> None:
    """Three channels are so many times as large in all tokens but one, and have no weight."""
    monkeypatch.setattr(matmul_plan, "has_int8_unit", lambda: False)
    channels = [3, 70, 299]
    weight, x = randn(70, 300), randn(num_rows, 300, seed=2)
    weight[:, channels] = 0
    x[:-1, channels] *= factor
    matrix = packed(weight, quantized=True)
    wanted = x.double() @ held_by(matrix).T
    found = CpuKernels().linear(x, matrix)
    assert (found - wanted).norm() < 0.012 * wanted.norm()


def test_rows_of_whole_numbers_are_rows_as_others_are(products: CpuKernels) -> None:
    matrix = packed(randn(40, 96), quantized=True)
    x = torch.arange(-96, 96 * 9).reshape(10, 96) % 7
    found = products.linear(x.to(torch.int8), matrix)
    assert torch.equal(found, products.linear(x.float(), matrix))


def test_a_matrix_without_rows_has_an_empty_result(products: CpuKernels) -> None:
    for num_rows in (0, 1, 7):
        for quantized in (False, True):
            matrix = packed(randn(0, 64), quantized)
            assert products.linear(randn(num_rows, 64), matrix).shape == (num_rows, 0)


@pytest.mark.parametrize("kind", ["floats", "int8", "deterministic int8"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_row_is_the_same_bits_in_any_company(dtype: torch.dtype, kind: str) -> None:
    """With int8, unless deterministic, only a matrix unit has for many rows the bits of few."""
    products = CpuKernels(deterministic=kind.startswith("deterministic"))
    matrix = packed(randn(100, 330).to(dtype), kind.endswith("int8"))
    x = randn(230, 330, seed=1).to(dtype)
    together, (plan, _) = products.linear(x, matrix, None), products._plan(matrix)
    for count, start in itertools.product((1, 2, 4, 5, 6, 7, 16, 17, 33, 192, 193), (0, 3, 33)):
        if plan.for_rows(count) != plan.for_rows(len(x)) and not has_int8_unit():
            assert kind == "int8" and count <= int16_tiles.FEW_ROWS
            continue
        alone = products.linear(x[start : start + count], matrix, None)
        assert torch.equal(alone, together[start : start + count]), (count, start)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("quantized", [False, True], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("num_rows", [1, 4, 6, 7, 200])
@pytest.mark.usefixtures("restored_threads")
def test_threads_share_a_matmul(products: CpuKernels, num_rows: int, quantized: bool) -> None:
    """In parts of several groups where rows are few, of which the last one has less."""
    matrix = packed(randn(1952, 200).bfloat16(), quantized)
    held = held_by(matrix) if quantized else matrix.unpacked().double()
    x = randn(num_rows, 200, seed=1).bfloat16()
    found = {}
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found[threads] = products.linear(x, matrix), products.linear_silu_mul(x, matrix)
    gate, up = (x.double() @ held.T).chunk(2, dim=-1)
    for own, wanted in zip(
        found[1], (torch.cat((gate, up), dim=1), F.silu(gate) * up), strict=True
    ):
        assert (own.double() - wanted).norm() < 0.01 * wanted.norm()
    for threads in (2, 3):
        assert all(map(torch.equal, found[threads], found[1]))


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_not_finite_stays_in_its_row(
    products: CpuKernels, dtype: torch.dtype, number: float
) -> None:
    for num_rows in (3, 6):
        x, weight = torch.ones(num_rows, 40, dtype=dtype), torch.ones(20, 40, dtype=dtype)
        x[1, 39] = number
        found = products.linear(x, packed(weight), None)
        assert (found[[0, 2]] == 40).all()
        assert not found[1].isfinite().any()
        found = products.linear(x, packed(weight, quantized=True), None)
        torch.testing.assert_close(found[[0, 2]], torch.full((2, 20), 40, dtype=dtype))
        assert not found[1].isfinite().any()


@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    data=st.data(),
    dtype=st.sampled_from(FLOATS),
)
def test_what_is_written_is_read_back(
    rows: int, columns: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    wanted, matrix = torch.zeros(rows, columns, dtype=dtype), PackedMatrix(rows, columns, dtype)
    for seed in range(3):
        row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
        num_rows = data.draw(st.integers(1, rows - row))
        num_columns = data.draw(st.integers(1, columns - column))
        values = randn(num_columns, num_rows, seed=seed).t()  # a transposed checkpoint
        matrix.copy_(values, row, column)
        wanted[row : row + num_rows, column : column + num_columns] = values.to(dtype)
    assert torch.equal(matrix.unpacked(), wanted) and torch.equal(plain(matrix), wanted)
    assert matrix.holds(wanted) and not matrix.holds(wanted + 1)
    first = data.draw(st.integers(0, rows - 1))
    assert torch.equal(matrix.unpacked(slice(first, None)), wanted[first:])
    ids = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), max_size=5)), dtype=torch.int64)
    assert torch.equal(CpuKernels().embedding(ids, matrix), wanted[ids])


def test_rows_of_a_quantized_matrix_are_within_half_a_step() -> None:
    values = randn(50, 60) * torch.logspace(-20, 10, 50).unsqueeze(1)
    values[7] = 0
    matrix = packed(values, quantized=True)
    step = values.abs().amax(dim=1, keepdim=True) / 127
    assert ((matrix.unpacked() - values).abs() <= step * 0.501).all()
    rows = CpuKernels().embedding(torch.tensor([7, 49]), matrix)
    assert torch.equal(rows, matrix.unpacked()[[7, 49]])
    assert matrix.holds(values) and not matrix.holds(values * 2)
    assert matrix.nbytes < values.nbytes / 2


def test_where_it_does_not_pay_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    products = CpuKernels()
    assert products.new_matrix(4, 4, torch.float64) is None
    monkeypatch.setattr(matmul_plan, "packing_pays", lambda: False)
    assert products.new_matrix(4, 4, torch.float32) is None
    assert products.new_matrix(4, 4, torch.float32, "int8") is not None


def test_no_two_functions_have_one_name() -> None:
    """Machine code is linked by names, also that of other processes, which count otherwise."""
    kinds = ("float32", "bfloat16", "bfloat16 pairs", "float16", "int8")
    rows = {matrix_tiles.over_rows(kind).__qualname__ for kind in kinds}
    shares = [matmul._share_by_lanes(kind) for kind in kinds]
    shares += [matmul._share_by_int16(), matmul._share_by_int8()]
    assert len(rows) == len(kinds) and len({share.__qualname__ for share in shares}) == 7
    assert matrix_tiles.over_rows("bfloat16 pairs") is matrix_tiles.over_rows("bfloat16 pairs")


@pytest.mark.parametrize("rows, across", [(1, 4), (2, 2), (2, 4), (4, 1), (6, 1), (6, 4)])
@pytest.mark.every(5)
def test_a_tile_is_the_same_bits_with_any_number_of_registers(rows: int, across: int) -> None:
    own = matrix_tiles.tile(rows, "float32", across)

    @loop_named(f"tile_of_{rows}_by_{across}")
    def by_tile(
        c: int, a: int, a_stride: int, b0: int, b1: int, b2: int, b3: int,
        steps: int, add: bool, rows: int,
    ) -> None:  # fmt: skip
        own(c, a, a_stride, b0, b1, b2, b3, steps, add)

    call = njit(lambda loop, given: loop(*given))
    panels, x = randn(4, 9, 16), randn(rows, 9, seed=1)
    found = []
    for one in (by_tile, matrix_tiles.over_rows("float32")):
        sums = randn(rows, 4, 16, seed=2)
        addresses = sums.data_ptr(), x.data_ptr(), 4 * 9, *(panel.data_ptr() for panel in panels)
        call(one, (*addresses, 9, True, rows))
        found.append(sums)
    assert torch.equal(*found)
    wanted = randn(rows, 4, 16, seed=2) + torch.einsum("rk,pkn->rpn", x, panels)
    torch.testing.assert_close(found[0], wanted)


@pytest.mark.parametrize(
    ("has_them", "name", "fast"),
    [
        (True, "znver4", True),
        (True, "znver5", True),
        (False, "znver3", False),
        (True, "cooperlake", False),
    ],
)
def test_pairs_are_fast_on_processors_of_amd(
    monkeypatch: pytest.MonkeyPatch, has_them: bool, name: str, fast: bool
) -> None:
    features = {"avx512bf16": has_them}
    monkeypatch.setattr(pairs, "cpu_features", lambda: features)
    monkeypatch.setattr(pairs.binding, "get_host_cpu_name", lambda: name)
    assert has_fast_pairs.__wrapped__() is fast


@pytest.mark.parametrize(
    ("unit", "pairs", "told"),
    [
        (True, False, "a matrix unit for bfloat16"),
        (False, True, "fast dot products of bfloat16 pairs"),
        (False, False, "no matrix unit"),
    ],
)
def test_the_log_says_what_multiplies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, unit: bool, pairs: bool,
    told: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(matmul_plan, "has_matrix_unit", lambda: unit)
    monkeypatch.setattr(matmul_plan, "has_fast_pairs", lambda: pairs)
    with caplog.at_level("INFO", logger="gptmanager"):
        matmul_plan.packing_pays.__wrapped__()
    assert caplog.messages[-1].endswith(f"and {told}")


@pytest.mark.parametrize(
    ("features", "told"),
    [
        (("avx512f", "avx2", "fma"), "packed: the processor has AVX-512, and"),
        (("avx2", "fma"), "packed: the processor has AVX2, and"),
        (("avx2",), "not packed: the processor has no AVX2 with FMA, and"),
        ((), "not packed: the processor has no AVX2 with FMA, and"),
    ],
    ids=str,
)
def test_weights_are_packed_where_there_are_lanes(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    features: tuple[str, ...],
    told: str,
) -> None:
    has = dict.fromkeys(features, True)
    monkeypatch.setattr(matmul_plan, "cpu_features", lambda: has)
    monkeypatch.setattr(matmul_plan, "has_matrix_unit", lambda: False)
    monkeypatch.setattr(matmul_plan, "has_fast_pairs", lambda: False)
    with caplog.at_level("INFO", logger="gptmanager"):
        pays = matmul_plan.packing_pays.__wrapped__()
    assert pays is not told.startswith("not")
    assert f"weights on the CPU are {told} no" in caplog.messages[-1]
