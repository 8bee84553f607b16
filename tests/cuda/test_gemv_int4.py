from __future__ import annotations

import pytest
import torch
from kernel_values import close, exact, on, randn

from gptmanager.cuda.gemm.gemv_int4 import covers, multiply
from gptmanager.kernels.gemm.int4_groups import Groups
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix

DTYPES = (torch.float16, torch.bfloat16)
# Rows of x, of the weight, and elements of both: parts of tiles, of panels and of groups, an odd
# number of panels, more groups than all warps load ahead, and blocks that take several items.
SHAPES = [(1, 8, 64), (3, 17, 36), (16, 33, 2084), (20, 260, 132), (0, 8, 8)]


def matrix(width, depth, dtype, has_minima):
    found = Int4Matrix(width, depth, dtype)
    found.copy_(randn(width, depth, seed=1) / depth**0.5)
    if has_minima:
        own = found.groups()
        minima = own.scales * (randn(*own.scales.shape, seed=3) - 7)
        found.copy_(Groups(own.values, own.scales, minima.half()))
    return found


def check(machine, dtype, rows, width, depth, has_minima, has_bias=True):
    weight, x = matrix(width, depth, dtype, has_minima), randn(rows, depth, dtype=dtype)
    bias = randn(width, dtype=dtype, seed=2) if has_bias else None
    out = machine.empty((rows, width), dtype)
    multiply(machine.launcher, out, machine.tensor(x), on(machine, weight), on(machine, bias))
    expected = x.double() @ exact(weight).T
    close(out, expected if bias is None else expected + bias.double(), absolute=2e-3)


@pytest.mark.parametrize("has_minima", [False, True], ids=["centered", "minima"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemv_of_4_bits(machine, dtype, has_minima):
    for number, shape in enumerate(SHAPES):
        check(machine, dtype, *shape, has_minima, has_bias=number % 2 == 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_is_exact(machine, dtype):
    weight = Int4Matrix(16, 32, dtype)
    values = torch.arange(16).unsqueeze(1).repeat(1, 32).to(torch.uint8)
    weight.copy_(Groups(values, torch.ones(16, 1, dtype=torch.float16)))
    x, out = torch.eye(32)[:16].to(dtype), machine.empty((16, 16), dtype)
    multiply(machine.launcher, out, machine.tensor(x), on(machine, weight))
    assert torch.equal(out.cpu().float(), torch.arange(-8.0, 8).expand(16, 16))


@pytest.mark.slow
def test_products_have_no_race(checked_machine):
    check(checked_machine, torch.bfloat16, 9, 70, 132, has_minima=True)


@pytest.mark.parametrize("has_minima", [False, True], ids=["centered", "minima"])
def test_a_row_is_the_same_alone_and_next_to_others(machine, has_minima):
    weight = on(machine, matrix(40, 200, torch.bfloat16, has_minima))
    x = machine.tensor(randn(37, 200, dtype=torch.bfloat16))
    whole = machine.empty((37, 40), torch.bfloat16)
    multiply(machine.launcher, whole, x, weight)
    for first, last in ((0, 1), (36, 37), (5, 9), (2, 18)):
        part = machine.empty((last - first, 40), torch.bfloat16)
        multiply(machine.launcher, part, machine.tensor(x[first:last].cpu().clone()), weight)
        assert torch.equal(part.cpu(), whole[first:last].cpu())


def test_tensors_that_do_not_fit(machine):
    weight = on(machine, matrix(8, 30, torch.bfloat16, has_minima=False))
    x, out = machine.empty((2, 30), torch.bfloat16), machine.empty((2, 8), torch.bfloat16)
    assert not covers(x, weight) and not covers(machine.empty((2, 32), torch.float32), weight)
    with pytest.raises(ValueError, match="2 rows of 30 torch.bfloat16 are not covered"):
        multiply(machine.launcher, out, x, weight)
    with pytest.raises(ValueError, match=r"scales is torch.float16 \[1, 1, 16\], expected"):
        multiply(machine.launcher, out, machine.empty((2, 64), torch.bfloat16), weight)
