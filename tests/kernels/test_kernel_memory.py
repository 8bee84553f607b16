"""What kernels of the CPU touch, and how threads share their work: no result tells.

A kernel that touches what lies behind a tensor ends the whole process, and pytest says in which
test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_cases import LAYER, expected, new_case
from kernel_cases import CPU, Sizes, new_pages, randn, rope_arguments
from torch import Tensor

from gptmanager.cuda.emulator import arrays
from gptmanager.kernels import PackedMatrix
from gptmanager.kernels.attention import paged_attention
from gptmanager.kernels.attention.attention_arguments import Pages, RowSpans
from gptmanager.kernels.gemm.int4_activations import (
    BLOCK_HEAD,
    block_bytes,
    quantize_rows_in_groups,
)
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.matmul_plan import Instructions
from gptmanager.kernels.gemm.quantized_activations import quantize_rows, row_bytes
from gptmanager.kernels.lora.adapter_arguments import AdapterModule

WIDTH = 20  # no whole vectors
ROWS = [(1, 1), (17, 17), (3, 70)]

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def empty(shape: Any, dtype: torch.dtype) -> Tensor:
    """Behind its last byte, or 15 bytes further, nothing can be read or written."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.from_numpy(arrays.empty(size, "uint8")).view(dtype).reshape(shape)


def guarded(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        return guarded(tensor.mT).mT
    return empty(tensor.shape, tensor.dtype).copy_(tensor)


def new_matrix(kind: str, width: int, dtype: torch.dtype) -> PackedMatrix:
    """Sixteen rows."""
    if kind == "int4":
        return Int4Matrix(16, width, dtype)
    return PackedMatrix(16, width, dtype, kind == "int8")


@pytest.fixture
def guarded_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def new_empty(like: Tensor, *shape: int) -> Tensor:
        return empty(shape, like.dtype)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty_like", lambda x: empty(x.shape, x.dtype))
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype=torch.float32: empty(shape, dtype))


@dtypes
@pytest.mark.usefixtures("guarded_results")
def test_norms_and_activations_touch_nothing_after_a_tensor(dtype: torch.dtype) -> None:
    x, residual, weight, bias = (
        guarded(randn(*shape, seed=len(shape)).to(dtype))
        for shape in ((3, 2 * WIDTH), (3, 2 * WIDTH), (2 * WIDTH,), (2 * WIDTH,))
    )
    CPU.rms_norm(x, weight, 1e-5)
    CPU.add_layer_norm(x, residual, weight, bias, 1e-5)
    CPU.silu_mul(x)
    CPU.gelu(x)
    CPU.gelu(x, "tanh")
    CPU.activate_times(x[:, :WIDTH], "silu", residual[:, WIDTH:])
    CPU.xielu(x, guarded(torch.tensor([0.3, -1.2]).to(dtype)))
    CPU.scale_rows(x, guarded(torch.ones(3, 1, dtype=dtype)))
    CPU.scale_rows(x, guarded(torch.ones(1)))
    CPU.clamp(x, 1.0)
    one = guarded(weight[:WIDTH]), guarded(bias[:WIDTH])
    CPU.layer_norm_heads(x, range(WIDTH, 2 * WIDTH), WIDTH, *one, 1e-5)


@dtypes
@pytest.mark.usefixtures("guarded_results")
def test_heads_touch_nothing_after_a_tensor(dtype: torch.dtype) -> None:
    for tokens, columns in ((1, WIDTH), (3, 64), (3, 1)):
        x = guarded(randn(tokens, 2, WIDTH).to(dtype))
        weight = guarded(randn(2, WIDTH, columns).to(dtype))
        found = CPU.linear_heads(x, weight)
        wanted = torch.einsum("thi,hio->tho", x.double(), weight.double())
        torch.testing.assert_close(found.double(), wanted, rtol=0.01, atol=0.01)
        assert torch.equal(CPU.joined(x[..., 3:], x)[..., WIDTH - 3 :], x)


@dtypes
@pytest.mark.parametrize("kind", ["floats", "int8", "int4"])
@pytest.mark.usefixtures("guarded_results")
def test_embeddings_touch_nothing_after_a_tensor(dtype: torch.dtype, kind: str) -> None:
    """Nor a row that is not there: its token has NaN."""
    table, matrix = guarded(randn(16, WIDTH).to(dtype)), new_matrix(kind, WIDTH, dtype)
    matrix.copy_(table)
    matrix.values = guarded(matrix.values)
    if matrix.scales is not None:
        matrix.scales = guarded(matrix.scales)
    ids = guarded(torch.tensor([15, 0, 15, 16, -1]))
    for own, wanted in ((table, table), (matrix, matrix.unpacked())):
        rows = CPU.embedding(ids, own)
        assert torch.equal(rows[:3], wanted[ids[:3]]) and rows[3:].isnan().all()
    embedded = guarded(randn(5, WIDTH, seed=3).to(dtype))
    sums = embedded[:3] + table[ids[:3]]
    CPU.add_embedding(embedded, ids, table)
    assert torch.equal(embedded[:3], sums) and embedded[3:].isnan().all()


@dtypes
@pytest.mark.usefixtures("guarded_results")
def test_rows_of_another_dtype_touch_nothing_after_a_tensor(dtype: torch.dtype) -> None:
    x = guarded(randn(3, WIDTH).to(dtype))
    for other in (torch.float32, torch.bfloat16):
        for width in (WIDTH, WIDTH + 1, 33, 64):
            wide = CPU._converted(x, Instructions(9, 0, other, 0, 0, None), width)
            assert torch.equal(wide[:, :WIDTH], x.to(other)) and not wide[:, WIDTH:].any()
    for width in (32, 64, 96):
        own = Instructions(9, 0, torch.int8, 0, row_bytes(width), quantize_rows)
        bytes_ = CPU._converted(x, own, width)
        assert (bytes_[:, :WIDTH].abs().amax(dim=1) == 127).all()
        assert not bytes_[:, WIDTH:width].any()
        size = block_bytes(1)
        own = Instructions(9, 0, torch.int8, 0, width // 32 * size, quantize_rows_in_groups)
        blocks = CPU._converted(x, own, width)[:, :size]
        first = BLOCK_HEAD + WIDTH
        assert (blocks[:, BLOCK_HEAD:first].abs().amax(dim=1) == 127).all()
        assert not blocks[:, first:].any()


def in_pages(tensor: Tensor, dtype: torch.dtype, token_major: bool) -> Tensor:
    tensor = tensor.to(dtype)
    return guarded(tensor.mT).mT if token_major else guarded(tensor)


@dtypes
@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize(
    ("width", "norms", "rotary"),
    [(WIDTH, False, 12), (WIDTH, True, 12), (WIDTH, True, None), (41, False, 38)],
)
@pytest.mark.usefixtures("guarded_results")
def test_rotation_and_write_touch_nothing_after_a_tensor(
    dtype: torch.dtype, token_major: bool, width: int, norms: bool, rotary: int | None
) -> None:
    arguments = rope_arguments(Sizes(2, 1, width, 3), rotary, norms, ROWS)
    qkv, positions, cos_sin, q_norm, k_norm, eps, pages, rows = arguments
    own = (None if it is None else guarded(it.to(dtype)) for it in (qkv, q_norm, k_norm))
    qkv, q_norm, k_norm = own
    keys, values = in_pages(pages.keys, dtype, token_major), in_pages(pages.values, dtype, False)
    angles = None if cos_sin is None else guarded(cos_sin[: positions.max() + 1])
    CPU.rope_and_write(
        *(qkv, guarded(positions), angles, q_norm, k_norm, eps, Pages(keys, values)),
        RowSpans(*map(guarded, rows[:4])),
    )


@dtypes
@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("block", [3, 8, 64])
@pytest.mark.usefixtures("guarded_results")
def test_attention_touches_nothing_after_a_tensor(
    dtype: torch.dtype, token_major: bool, block: int
) -> None:
    pages = new_pages(Sizes(4, 2, WIDTH, block), ROWS)
    pages.keys = in_pages(pages.keys, dtype, token_major)
    pages.values, pages.q = in_pages(pages.values, dtype, False), guarded(pages.q.to(dtype))
    pages.block_tables = guarded(pages.block_tables)
    pages.attend_all(CPU)


@dtypes
@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize(("rank", "columns", "width"), [(5, 1, 200), (8, 63, 37), (16, 63, 37)])
def test_adapters_touch_nothing_after_a_tensor(
    dtype: torch.dtype, num_tokens: int, rank: int, columns: int, width: int
) -> None:
    """At the end of a pool: few columns behind a long A, or one less than is turned at once."""
    case = new_case((AdapterModule(0, 0, columns, width),), [(rank,)], dtype, gap=0)
    x, before = randn(num_tokens, width).to(dtype), randn(num_tokens, columns, seed=1).to(dtype)
    step, result = case.with_rows([0] * num_tokens), guarded(before)
    step = replace(
        step, **{name: guarded(getattr(step, name)) for name in ("pool", "rows", "table")}
    )
    CPU.add_adapters(result, guarded(x), step, LAYER, "qkv")
    wanted = expected(case, [0] * num_tokens, before, x)
    torch.testing.assert_close(result.double(), wanted, rtol=2.0**-7, atol=1e-4)


@dtypes
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.usefixtures("guarded_results")
def test_matmuls_touch_nothing_after_a_tensor(dtype: torch.dtype, quantized: bool) -> None:
    matrix = PackedMatrix(WIDTH, 64, dtype, quantized)
    matrix.copy_(randn(WIDTH, 64).to(dtype))
    matrix.values = guarded(matrix.values)
    for num_rows in range(1, 14):
        CPU.linear(guarded(randn(num_rows, 64).to(dtype)), matrix)


@pytest.mark.parametrize("num_parts", [1, 2, 5, 16])
def test_parts_of_attention_are_all_tiles_once_in_about_equal_shares(
    monkeypatch: pytest.MonkeyPatch, num_parts: int
) -> None:
    """Every thread gets one part here. The loops run as Python, over a task of lists."""
    task = SimpleNamespace(
        **dict(num_parts=num_parts, num_heads=8, num_kv_heads=2, num_rows=4, table_width=9),
        **dict(row_starts=[0, 1, 1, 70, 71], kv_lengths=[300, 5, 69, 64], slots=[2, 0, 1, 3]),
        **dict(block_tables=0, scratch=0, scratch_bytes=0, window=0, sink=0),
    )
    tile_at = paged_attention._tile_at.py_func  # type: ignore[attr-defined]
    total_cost = paged_attention._total_cost.py_func  # type: ignore[attr-defined]
    rows = {0: 0, 70: 3, **dict.fromkeys(range(1, 70, 8), 2)}  # the first token of each tile
    costs: list[list[int]] = []
    tiles = []

    def claims(part: int) -> Callable[[int, int], int]:
        values = iter([0, part, num_parts])  # the thread's number comes first
        return lambda address, counter: next(values)

    def attend(task: Any, areas: Any, token: int, *place: int) -> None:
        tiles.append((token, place[-1]))
        costs[-1].append(tile_at(task, rows[token], token)[2])

    for name, own in {
        **{"task_at": lambda address, kind: task, "areas_at": lambda task, scratch: ()},
        **{"get_int": lambda values, index: values[index], "_attend": attend},
        **{"_tile_at": tile_at, "_total_cost": total_cost},
    }.items():
        monkeypatch.setattr(paged_attention, name, own)
    for part in range(num_parts):
        monkeypatch.setattr(paged_attention, "claim", claims(part))
        costs.append([])
        paged_attention.attention(0)
    assert sorted(tiles) == [(token, kv_head) for token in sorted(rows) for kv_head in (0, 1)]
    shares, largest = [sum(own) for own in costs], max(max(own, default=0) for own in costs)
    assert max(shares) <= sum(shares) / num_parts + largest
