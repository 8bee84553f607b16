"""Rows that compiled functions write to panels: the bits that torch's operations give."""

from __future__ import annotations

import pytest
import torch

from gptmanager.kernels.gemm.int4_groups import Groups
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.packed_matrix import PackedMatrix
from gptmanager.kernels.gemm.weight_quantization import round_to_int8

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(37, 33), (16, 64), (3, 1)])
def test_rows_in_8_bits(rows: int, columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(rows, columns, generator=generator).to(dtype)
    given[1] = 0
    matrix = PackedMatrix(rows, columns, torch.float32, quantized=True)
    matrix.values.fill_(5)  # what a new load overwrites
    for start in range(0, rows, 10):
        matrix.copy_(given[start : start + 10], start)

    integers, scales = round_to_int8(given)
    assert torch.equal(matrix.unpacked(), integers * scales.unsqueeze(1))
    assert matrix.holds(given)


@pytest.mark.parametrize("first", [0, 1, 6])
@pytest.mark.parametrize(("skipped", "columns"), [(0, 46), (0, 33), (1, 46), (2, 44)])
def test_rows_in_bfloat16_are_the_same_in_pairs(first: int, skipped: int, columns: int) -> None:
    given = torch.randn(37, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    own = slice(skipped, skipped + columns)
    matrix, expected = (PackedMatrix(40, 56, torch.bfloat16) for _ in range(2))
    for start in (0, 5, 30):
        rows = given[start:][: 25 if start == 5 else 7]
        matrix.copy_(rows, 3 + start, first, own)
        expected.copy_(rows.float(), 3 + start, first, own)  # element by element

    assert torch.equal(matrix.values, expected.values)
    assert torch.equal(matrix.unpacked()[3:40, first : first + columns], given[:, own])


def test_a_part_of_the_columns_has_the_scales_of_whole_rows() -> None:
    given = torch.randn(20, 100, generator=torch.Generator().manual_seed(2))
    matrix = PackedMatrix(20, 40, torch.float32, quantized=True)
    matrix.copy_(given.t().contiguous().t(), columns=slice(31, 71))

    integers, scales = round_to_int8(given)
    assert torch.equal(matrix.unpacked(), (integers * scales.unsqueeze(1))[:, 31:71])


def test_a_row_that_is_not_finite_has_the_scale_nan() -> None:
    given = torch.ones(4, 40)
    given[1, 39], given[2, 0] = torch.inf, torch.nan
    matrix = PackedMatrix(4, 40, torch.float32, quantized=True)
    matrix.copy_(given)

    assert matrix.unpacked().isfinite().all(1).tolist() == [True, False, False, True]


@pytest.mark.parametrize(("rows", "columns"), [(37, 40), (16, 64), (3, 1)])
def test_rows_in_4_bits(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    scales = torch.rand(rows, -(-columns // 32), generator=generator).half()
    matrix = Int4Matrix(rows, columns, torch.float32)
    for own in (slice(0, 5), slice(5, rows)):
        matrix.copy_(Groups(values[own], scales[own]), own.start or 0)

    found = matrix.groups()
    assert torch.equal(found.values, values) and torch.equal(found.scales, scales)
