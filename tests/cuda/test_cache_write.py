from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_values import DTYPES, close, randn

from gptmanager.cuda.attention.cache_write import locate_tokens, rope_and_write
from gptmanager.cuda.attention.paged_kernels import HEAD_DIMS
from gptmanager.kernels.attention.attention_arguments import Pages, RowSpans
from gptmanager.kernels.reference import Kernels

pytestmark = pytest.mark.every(3)

ROWS = [(1, 1), (5, 5), (0, 3), (7, 20), (1, 17)]  # new tokens, KV length


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def paged_rows(rows, tokens_per_block, seed=0):
    """row_starts, kv_lengths, slots, block_tables, blocks: in no order; entries unused are -7."""
    blocks = [-(-length // tokens_per_block) for _, length in rows]
    order = np.random.default_rng(seed).permutation(sum(blocks) + 2).astype(np.int32)
    tables = torch.full((len(rows) + 1, max(blocks) + 1), -7, dtype=torch.int32)
    slots = torch.arange(len(rows), 0, -1, dtype=torch.int32)
    for row, (end, count) in enumerate(zip(np.cumsum(blocks), blocks, strict=True)):
        tables[slots[row], :count] = torch.from_numpy(order[end - count : end])
    starts = ints(*np.cumsum([0, *(new for new, _ in rows)]))
    return starts, ints(*(length for _, length in rows)), slots, tables, len(order)


def positions_of(rows):
    return torch.cat([torch.arange(length - new, length) for new, length in rows])


def check_write(
    machine, dtype, head_dim, heads, kv_heads, rotary, norms, tokens_per_block=16, **kind
):
    # Given
    starts, lengths, slots, tables, num_blocks = paged_rows(ROWS, tokens_per_block)
    positions = positions_of(ROWS)
    tokens = len(positions)
    qkv = randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    qkv[3] = 0  # its root mean square is that of eps
    qkv[4] *= 1e-3  # its mean square is about as large as eps
    angles = torch.arange(30).unsqueeze(1) * randn(1, (rotary or 0) // 2)
    cos_sin = 1.25 * torch.cat([angles.cos(), angles.sin()], dim=1) if rotary else None
    q_norm = randn(head_dim, dtype=dtype, seed=1) if norms else None
    k_norm = randn(head_dim, dtype=dtype, seed=2) if norms else None
    shape = (num_blocks, kv_heads, tokens_per_block, head_dim)
    pages = [torch.full(shape, -3.0, dtype=dtype) for _ in range(2)]
    optional = {"cos_sin": cos_sin, "q_norm": q_norm, "k_norm": k_norm}
    # When
    cells = machine.empty((tokens + 3,), torch.int32)
    rows = (starts, lengths, slots, tables)
    locate_tokens(machine.launcher, cells, RowSpans(*map(machine.tensor, rows)), tokens_per_block)
    queries = machine.empty((tokens, heads, head_dim), dtype)
    keys, values = map(machine.tensor, pages)
    rope_and_write(
        machine.launcher,
        *(queries, machine.tensor(qkv), machine.tensor(positions), cells[:tokens]),
        Pages(keys.mT, values),
        **{name: it if it is None else machine.tensor(it) for name, it in optional.items()},
        eps=1e-6,
        **kind,
    )
    # Then: as the reference, in float64
    assert cells[tokens:].tolist() == [-1, -1, -1]
    wide = [it if it is None else it.double() for it in (qkv, cos_sin, q_norm, k_norm)]
    expected_keys = torch.full(shape, -3.0, dtype=torch.float64).transpose(2, 3)
    expected_values = torch.full(shape, -3.0, dtype=torch.float64)
    expected = Kernels().rope_and_write(
        *(wide[0], positions, *wide[1:], 1e-6),
        *(Pages(expected_keys, expected_values), RowSpans(*rows)),
        norm_last=kind.get("late", False),
        plus_one=kind.get("plus_one", False),
    )
    scale = 4 if norms else 1  # the scale of values, and so of an absolute error
    close(queries, expected, 1e-4 * scale)
    close(keys, expected_keys.transpose(2, 3), 1e-4 * scale)
    assert torch.equal(values.cpu(), expected_values.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
def test_rope_and_write(machine, dtype, norms):
    check_write(machine, dtype, 128, 8, 2, 128, norms)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dimensions(machine, head_dim):
    check_write(machine, torch.bfloat16, head_dim, 4, 2, head_dim, norms=True)


@pytest.mark.parametrize(("rotary", "block"), [(None, 16), (32, 64), (20, 3)])
def test_parts_of_a_head_and_blocks_of_any_size(machine, rotary, block):
    check_write(machine, torch.float32, 80, 3, 3, rotary, False, block)


@pytest.mark.parametrize("kind", ["late", "plus_one"])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "rotary"),
    [(torch.float32, 32, 32), (torch.float32, 32, 20), (torch.bfloat16, 128, 64)],
)
def test_norms_after_the_rotation_and_weights_that_are_stored_less_1(
    machine, dtype, head_dim, rotary, kind
):
    check_write(machine, dtype, head_dim, 3, 1, rotary, norms=True, **{kind: True})


def test_norms_after_the_rotation_have_no_race(checked_machine):
    check_write(checked_machine, torch.bfloat16, 128, 3, 1, 64, norms=True, late=True)


def test_writes_have_no_race(checked_machine):
    check_write(checked_machine, torch.bfloat16, 80, 4, 2, 80, norms=True)


def written(machine, qkv, kv_heads, head_dim, scales):
    """Keys and values of tokens in one page each, as 8-bit elements, and the queries."""
    tokens, heads = len(qkv), qkv.shape[1] // head_dim - 2 * kv_heads
    pages = torch.zeros(tokens, kv_heads, 1, head_dim).to(torch.float8_e4m3fn)
    queries = machine.empty((tokens, heads, head_dim), qkv.dtype)
    keys, values = machine.tensor(pages), machine.tensor(pages)
    at = torch.arange(tokens)
    given = map(machine.tensor, (qkv, at, at.int()))
    pages = Pages(keys.mT, values, machine.tensor(scales))
    rope_and_write(machine.launcher, queries, *given, pages)
    return queries.cpu(), keys.cpu(), values.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_8_bit_pages(machine, dtype):
    scales = torch.tensor([[0.01, 3.0], [1.0, 0.3]])
    qkv = randn(6, 8 * 64, dtype=dtype)
    qkv[2, 4 * 64 : 4 * 64 + 5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 4.6, -300.0])
    queries, keys, values = written(machine, qkv, 2, 64, scales)
    expected = [torch.zeros(6, 2, 64, 1).to(torch.float8_e4m3fn), torch.zeros_like(values)]
    table, starts = torch.arange(6).int()[:, None], torch.arange(7).int()
    again = Kernels().rope_and_write(
        *(qkv, torch.arange(6), None, None, None, 0.0, Pages(*expected, scales)),
        RowSpans(starts, torch.ones(6).int(), torch.arange(6).int(), table),
    )
    assert torch.equal(queries, again)
    for own, other in ((keys, expected[0].mT), (values, expected[1])):  # a NaN's sign is free
        close(own.float(), other.double(), 0)
    assert keys[2, 0, 0, 1:5].tolist() == [448, -448, 448, -448]
    assert keys[2, 0, 0, 0].isnan()


def test_writes_of_8_bit_pages_have_no_race(checked_machine):
    written(checked_machine, randn(3, 4 * 80, dtype=torch.bfloat16), 1, 80, torch.ones(2, 1))


def test_tensors_that_do_not_fit(machine):
    queries = machine.empty((1, 2, 72), torch.float32)
    tokens = machine.empty((1, 1, 4, 72), torch.float32)
    pages = Pages(tokens.mT, tokens)
    qkv, ids = machine.empty((1, 4 * 72), torch.float32), machine.tensor(ints(0))
    with pytest.raises(ValueError, match=r"head dimension 72 must be one of \(32"):
        rope_and_write(machine.launcher, queries, qkv, ids.long(), ids, pages)
    tokens = machine.empty((1, 1, 4, 64), torch.float32)
    own = machine.empty((1, 2, 64), torch.float32), machine.empty((1, 4 * 64), torch.float32)
    with pytest.raises(ValueError, match="a norm after the rotation has no kernel for weights"):
        pages64 = Pages(tokens.mT, tokens)
        rope_and_write(machine.launcher, *own, ids.long(), ids, pages64, late=True, plus_one=True)
    with pytest.raises(ValueError, match="positions is torch.int32"):
        rope_and_write(machine.launcher, queries, qkv, ids, ids, pages)
