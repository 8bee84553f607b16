"""Rows that compiled functions write to panels: the bits that torch's operations give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gptmanager.kernels.gemm.int4_groups import Groups
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.packed_matrix import PackedMatrix
from gptmanager.kernels.gemm.panels.code_loops import E2M1, FOUR_BITS, NAMED
from gptmanager.kernels.gemm.panels.codes import Codes
from gptmanager.kernels.gemm.panels.word_loops import AWQ_ORDER
from gptmanager.kernels.gemm.panels.words import PackedGroups
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


def in_panels(rows: Tensor, group: int) -> Tensor:
    """Whole panels, made from all their rows and positions by torch."""
    return rows.unflatten(0, (-1, 16)).unflatten(2, (-1, group)).transpose(1, 2).contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("given_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("first", [0, 1, 6])
@pytest.mark.parametrize(("skipped", "columns"), [(0, 46), (0, 33), (1, 46), (2, 44)])
def test_rows_of_floats(
    skipped: int, columns: int, first: int, given_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    given = torch.randn(71, 64, generator=torch.Generator().manual_seed(4)).to(given_dtype)
    own = slice(skipped, skipped + columns)
    matrix, expected = PackedMatrix(80, 56, dtype), torch.zeros(80, 64, dtype=dtype)
    for start, stop in [(0, 7), (5, 62), (62, 71)]:
        matrix.copy_(given[start:stop], 3 + start, first, own)
    expected[3:74, first : first + columns] = given[:, own].to(dtype)

    group = matrix.values.shape[3]
    assert torch.equal(matrix.values, in_panels(expected[:, : matrix.depth], group))
    assert torch.equal(matrix.unpacked(), expected[:, :56])


KINDS = {
    "uint8": {},
    "int8": {},
    "e4m3": {},
    "zeros": {"zeros": torch.randn(70, 3, generator=torch.Generator().manual_seed(6))},
    "one zero": {"zeros": 8.0, "factor": 0.3},
    "minima": {"minima": torch.randn(70, 3, generator=torch.Generator().manual_seed(8))},
    "index": {"index": torch.arange(100) % 3},
    "four bits": {"kind": FOUR_BITS},
    "e2m1": {"kind": E2M1},
    "table": {"kind": NAMED, "table": torch.linspace(-2, 1, 16), "high_first": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "block"), [(100, 48), (64, 32), (66, 33), (1, 16)])
def test_codes_become_the_int8_of_their_floats(kind: str, columns: int, block: int) -> None:
    generator = torch.Generator().manual_seed(5)
    num_bytes = -(-columns // 2) if KINDS[kind].get("kind") else columns
    codes = torch.randint(0, 120, (70, num_bytes), generator=generator, dtype=torch.uint8)
    codes = codes.view({"int8": torch.int8, "e4m3": torch.float8_e4m3fn}.get(kind, torch.uint8))
    options: dict[str, Any] = dict(KINDS[kind])
    blocks = 3 if "index" in options else -(-columns // block)
    scales = torch.rand(70, blocks, generator=generator)
    scales[4] = 0
    for name in {"zeros", "minima"} & options.keys():
        if isinstance(options[name], Tensor):
            options[name] = options[name][:, :blocks]
    if "index" in options:
        options["index"] = options["index"][:columns]
    given = Codes(codes=codes, scales=scales, block=block, columns=columns, **options)
    for own in (slice(None), slice(columns // 3, columns)):
        matrix, expected = (
            PackedMatrix(80, len(range(columns)[own]), torch.float32, quantized=True)
            for _ in range(2)
        )
        for start, stop in [(0, 3), (3, 41), (41, 70)]:
            matrix.copy_(given.rows(slice(start, stop)), 5 + start, columns=own)
            expected.copy_(given.floats()[start:stop], 5 + start, columns=own)
        assert torch.equal(matrix.values, expected.values)
        assert matrix.scales is not None and expected.scales is not None
        assert torch.equal(matrix.scales, expected.scales)
    assert matrix.holds(given, 5, columns=own)


def integers_of(words: Tensor, bits: int) -> Tensor:
    """The integers of each row of words, by torch's operations."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.unsqueeze(2) >> shifts & (1 << bits) - 1).flatten(1)


# rows, columns, first row, columns that are written, and whether panels are written from words
SIZES = [
    (64, 448, 16, slice(None), True),
    (32, 144, 0, slice(20, 132), True),
    (32, 140, 0, slice(None), True),  # a part of the last word
    (40, 144, 16, slice(None), False),
    (32, 144, 3, slice(None), False),
    (32, 144, 0, slice(1, 144), False),
    (32, 141, 0, slice(None), False),
]


@pytest.mark.every(5)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("is_by_row", [False, True])
@pytest.mark.parametrize("has_index", [False, True])
@pytest.mark.parametrize("zeros", ["of groups", "of rows", "one"])
@pytest.mark.parametrize(("rows", "columns", "first", "own", "is_direct"), SIZES)
def test_integers_in_words_become_the_int8_of_their_floats(
    rows: int, columns: int, first: int, own: slice, is_direct: bool, zeros: str,
    has_index: bool, is_by_row: bool, bits: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(rows + columns + bits)
    num_words = -(-columns * bits // 32)
    shape = (rows, num_words + 5) if is_by_row else (num_words, rows + 5)
    wide = torch.randint(-(2**31), 2**31, shape, generator=generator).int()[:, 2:-3]
    words = wide if is_by_row else wide.t()
    index = torch.randint(0, 5, (columns,), generator=generator)
    scales, middles = torch.rand(2, rows, 5, generator=generator)
    scales[3], scales[5], scales[7, 1] = 0, 1e-36 / 2**bits, -3
    given = Codes(
        codes=words,
        bits=bits,
        scales=scales,
        block=96,
        columns=columns,
        zeros={"of groups": middles * 9, "of rows": middles[:, :1] * 9, "one": 2.0}[zeros],
        index=index.int() if has_index else None,
    )
    group = index if has_index else torch.arange(columns) // 96
    middles = torch.as_tensor(given.zeros).expand(rows, 5)
    exact = (integers_of(words, bits)[:, :columns] - middles[:, group]) * scales[:, group]
    matrix, expected = (
        PackedMatrix(rows + 16, len(range(columns)[own]), torch.float32, quantized=True)
        for _ in range(2)
    )
    for it in (matrix, expected):
        it.values.fill_(5)
        it.panels.scales.fill_(5)
    matrix.copy_(given, first, columns=own)
    expected.copy_(exact, first, columns=own)

    assert torch.equal(given.floats(), exact)
    for found, wanted in zip(matrix.panels[:2], expected.panels[:2], strict=True):
        assert torch.equal(found, wanted)
    start, stop, _ = own.indices(columns)
    assert given.write_words(start, stop, *matrix.panels[:2], first) == is_direct


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_minima_are_added_to_scaled_integers_in_words(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    words = torch.randint(-(2**31), 2**31, (32, 4 * bits), generator=generator).int()
    scales, minima = torch.randn(2, 32, 4, generator=generator).bfloat16().float()
    given = Codes(codes=words, bits=bits, scales=scales, block=32, minima=minima)
    exact = integers_of(words, bits).unflatten(1, (4, 32)) * scales[..., None] + minima[..., None]
    matrix, expected = (PackedMatrix(32, 128, torch.float32, quantized=True) for _ in range(2))
    matrix.copy_(given)
    expected.copy_(exact.flatten(1))

    assert torch.equal(given.floats(), exact.flatten(1))
    for found, wanted in zip(matrix.panels[:2], expected.panels[:2], strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("bits", [0, 8])
def test_codes_with_a_scale_that_is_not_finite_have_the_scale_nan(bits: int) -> None:
    scales = torch.ones(32, 2)
    scales[3, 1], scales[18, 0], scales[20, 0] = torch.inf, torch.nan, -torch.inf
    matrix = PackedMatrix(32, 40, torch.float32, quantized=True)
    codes = torch.ones(32, 40, dtype=torch.int8)
    codes = codes.view(torch.int32) if bits else codes
    matrix.copy_(Codes(codes=codes, bits=bits, scales=scales, block=32))

    broken = [row for row, own in enumerate(matrix.panels.scales.isnan()) if own]
    assert broken == [3, 18, 20]
    assert not matrix.values.transpose(1, 2).flatten(0, 1)[broken].any()


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


LAYOUTS = ["rows", "columns", "awq"]


def packed_groups(layout: str, rows: int, columns: int, block: int, minima: bool) -> PackedGroups:
    generator = torch.Generator().manual_seed(rows + columns)
    order = AWQ_ORDER if layout == "awq" else ()
    shapes = {
        "rows": (rows, -(-columns // 8)),
        "columns": (-(-columns // 8), rows),
        "awq": (columns, -(-rows // 8)),
    }
    words = torch.randint(-(2**31), 2**31, shapes[layout], generator=generator).int()
    blocks = -(-columns // block)
    scales = torch.rand(rows, blocks, generator=generator).half()
    return PackedGroups(
        words=words if layout == "rows" else words.t(),
        columns=columns,
        scales=scales,
        width=block,
        minima=(scales * -3).half() if minima else None,
        order=order,
    )


def test_numbers_are_where_the_formats_have_them() -> None:
    """One number in each layout: of row 9 and column 13."""
    words = torch.zeros(16, 4, dtype=torch.int32)
    words[9, 1] = 11 << 4 * 5
    scales = torch.ones(16, 1, dtype=torch.float16)
    by_row = PackedGroups(words, 32, scales, 32)
    words = torch.zeros(4, 16, dtype=torch.int32)
    words[1, 9] = 11 << 4 * 5
    by_column = PackedGroups(words.t(), 32, scales, 32)
    words = torch.zeros(32, 2, dtype=torch.int32)
    words[13, 1] = 11 << 4 * 4  # the second of eight rows is at place 4
    awq = PackedGroups(words.t(), 32, scales, 32, order=AWQ_ORDER)
    for given in (by_row, by_column, awq):
        values = given.groups().values
        assert values[9, 13] == 11 and values.count_nonzero() == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "block", "is_direct"),
    [
        (128, 128, 128, True),
        (256, 384, 64, True),
        (640, 256, 32, True),
        (384, 128, 256, True),  # one scale for a row
        (128, 384, 256, True),  # the last block is a part
        (40, 128, 128, False),
        (128, 40, 40, False),
    ],
)
def test_words_are_written_as_their_groups(
    layout: str, rows: int, columns: int, block: int, is_direct: bool, minima: bool
) -> None:
    given = packed_groups(layout, rows, columns, block, minima)
    matrix, expected = (Int4Matrix(rows + 32, columns, torch.float32) for _ in range(2))
    for own in (matrix, expected):
        own.values.fill_(255)
    matrix.copy_(given, 16, columns=slice(0, columns))
    expected.copy_(given.groups(), 16)

    assert given.write(slice(None), matrix.values, 16) == is_direct
    for found, own in zip(matrix.panels, expected.panels, strict=True):
        assert (found is None and own is None) or torch.equal(found, own)
    assert matrix.holds(given, 16)


def test_words_that_do_not_fill_panels_are_unpacked() -> None:
    values = torch.zeros(20, 4, 4, 16, 4, dtype=torch.uint8)
    for layout in LAYOUTS:
        given = packed_groups(layout, 128, 128, 128, False)
        assert not given.write(slice(None), values, 8)
        assert not given.write(slice(32, None), values, 0)
    awq = packed_groups("awq", 128, 128, 128, False)
    assert not replace(awq, order=tuple(range(8))).write(slice(None), values, 0)
    moved = replace(awq, scales=awq.scales[3:], skipped=3)
    assert not moved.write(slice(None), values, 0)
    assert torch.equal(moved.groups().values, awq.groups().values[3:])
