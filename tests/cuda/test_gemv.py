from __future__ import annotations

import functools

import pytest
import torch
from kernel_values import DTYPES, close, exact, on, randn, rounded

from gptmanager.cuda.device.launch import EmulatorLauncher
from gptmanager.cuda.gemm.byte_rows import FP8, Fp8Rows, Int8Rows
from gptmanager.cuda.gemm.gemv import FEW_ROWS, covers, multiply

pytestmark = pytest.mark.every(3)

# Rows of x, of the weight, and elements of both: odd numbers, parts of tiles and of chunks, more
# than a round, and so many items that blocks take several.
SHAPES = [(1, 8, 64), (3, 17, 8), (9, 70, 40), (16, 33, 2056), (8, 240, 136), (0, 8, 8)]


def product(x, weight, bias):
    result = x.double() @ exact(weight).T
    return result if bias is None else result + bias.double()


def tensors(rows, width, depth, dtype, scale=1.0):
    x, weight = randn(rows, depth, dtype=dtype), randn(width, depth, dtype=dtype, seed=1)
    return x, (weight * scale / depth**0.5).to(dtype), randn(width, dtype=dtype, seed=2)


def check_multiply(machine, dtype, rows, width, depth, has_bias=True, stored=lambda it: it):
    x, weight, bias = tensors(rows, width, depth, dtype)
    weight = stored(weight)
    bias = bias if has_bias else None
    out = machine.empty((rows, width), dtype)
    on_machine = [on(machine, it) for it in (x, weight, bias)]
    multiply(machine.launcher, out, *on_machine)
    close(out, product(x, weight, bias))


def check_multiply_silu(machine, dtype, rows, width, depth, has_bias=True, stored=lambda it: it):
    x, weight, bias = tensors(rows, 2 * width, depth, dtype, scale=2.0)
    weight = stored(weight)
    bias = bias if has_bias else None
    out = machine.empty((rows, width), dtype)
    on_machine = [on(machine, it) for it in (x, weight, bias)]
    multiply(machine.launcher, out, *on_machine, silu=True)
    gate, up = product(x, weight, bias).chunk(2, dim=1)
    close(out, gate * gate.sigmoid() * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemv(machine, dtype):
    for number, shape in enumerate(SHAPES):
        check_multiply(machine, dtype, *shape, has_bias=number % 2 == 0)
        check_multiply_silu(machine, dtype, *shape, has_bias=number % 2 == 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemv_of_int8_weights(machine, dtype):
    for number, (rows, width, depth) in enumerate(SHAPES):
        own = rows, width, depth // 16 * 16 + 16
        check_multiply(machine, dtype, *own, has_bias=number % 2 == 0, stored=rounded)
        check_multiply_silu(machine, dtype, *own, has_bias=number % 2 == 1, stored=rounded)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_integer_of_a_weight_is_exact(machine, dtype):
    """A row of x has a single one, so that the result is a row of the weight."""
    weight = Int8Rows(256, 16, dtype)
    weight.values.copy_(torch.arange(-128, 128).unsqueeze(1))
    weight.scales.fill_(1)
    x, out = torch.eye(16).to(dtype), machine.empty((16, 256), dtype)
    multiply(machine.launcher, out, machine.tensor(x), on(machine, weight))
    assert torch.equal(out.cpu().float(), torch.arange(-128.0, 128).expand(16, 256))


@pytest.mark.parametrize("dtype", DTYPES[::-1], ids=str)  # float32 each day: no other test has it
def test_every_8_bit_float_of_a_weight_is_exact(machine, dtype):
    weight, every = Fp8Rows(256, 16, dtype), torch.arange(256, dtype=torch.uint8).view(FP8)
    weight.values.view(torch.uint8).copy_(every.view(torch.uint8).unsqueeze(1))
    weight.scales.fill_(1)
    x, out = torch.eye(16).to(dtype), machine.empty((16, 256), dtype)
    multiply(machine.launcher, out, machine.tensor(x), on(machine, weight))
    torch.testing.assert_close(
        out.cpu().float(), every.float().expand(16, 256), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemv_of_8_bit_floats(machine, dtype):
    stored = functools.partial(rounded, kind=Fp8Rows)
    check_multiply(machine, dtype, 9, 70, 48, stored=stored)
    check_multiply_silu(machine, dtype, 3, 17, 16, stored=stored)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.every(5)
def test_products_have_no_race(checked_machine, dtype):
    check_multiply(checked_machine, dtype, 9, 40, 136)
    check_multiply(checked_machine, dtype, 16, 96, 136)
    check_multiply_silu(checked_machine, dtype, 2, 20, 72)
    check_multiply(checked_machine, dtype, 9, 40, 144, stored=rounded)


@pytest.mark.parametrize("silu", [False, True], ids=["plain", "silu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_alone_and_next_to_others(machine, dtype, silu):
    """Whatever number of rows there is, wherever it stands."""
    num_rows, width, depth = 37, 104 if dtype is torch.float16 else 24, 520
    columns = 2 * width if silu else width
    x, weight, _ = tensors(num_rows, columns, depth, dtype)
    x, weight = machine.tensor(x), machine.tensor(weight)
    whole = machine.empty((num_rows, width), dtype)
    multiply(machine.launcher, whole, x, weight, silu=silu)
    for first, last in ((0, 1), (36, 37), (5, 9), (2, 18)):
        part = machine.empty((last - first, width), dtype)
        rows = machine.tensor(x[first:last].cpu().clone())
        multiply(machine.launcher, part, rows, weight, silu=silu)
        assert torch.equal(part.cpu(), whole[first:last].cpu())


class Wide(EmulatorLauncher):
    num_multiprocessors = 132


def test_the_bits_do_not_depend_on_the_device(toolchain):
    x, weight, bias = tensors(16, 200, 264, torch.bfloat16)
    results = []
    for launcher in (EmulatorLauncher(), Wide()):
        results.append(torch.empty(16, 200, dtype=torch.bfloat16))
        multiply(launcher, results[-1], x, weight, bias)
    assert torch.equal(*results)


def test_what_is_not_there_is_not_multiplied(machine):
    """A weight that is infinite makes its own column so, and no other."""
    x, weight, _ = tensors(2, 40, 72, torch.bfloat16)
    weight[39, 70] = torch.inf
    x[1] = 0
    out = machine.empty((2, 40), torch.bfloat16)
    multiply(machine.launcher, out, machine.tensor(x), machine.tensor(weight))
    assert out.cpu()[0].isfinite().tolist() == [True] * 39 + [False]
    assert out.cpu()[1].tolist()[:39] == [0.0] * 39


def test_tensors_that_do_not_fit(machine):
    x, weight, _ = map(machine.tensor, tensors(2, 8, 12, torch.bfloat16))
    out = machine.empty((2, 8), torch.bfloat16)
    assert not covers(x, weight)
    with pytest.raises(ValueError, match="a multiple of 16 bytes, .* rows of 12 torch.bfloat16"):
        multiply(machine.launcher, out, x, weight)
    x, weight, bias = tensors(2, 8, 16, torch.bfloat16)
    assert covers(x, weight) and covers(x[1:], weight) and not covers(x, weight.T)
    assert not covers(x.flatten()[1:17].view(1, 16), weight) and FEW_ROWS == 16
    x, weight, bias = map(machine.tensor, (x, weight, bias))
    with pytest.raises(ValueError, match=r"bias is torch.bfloat16 \[7\], expected .* \[8\]"):
        multiply(machine.launcher, out, x, weight, bias[:7])
    with pytest.raises(ValueError, match=r"weight is torch.bfloat16 \[8, 16\], expected .* \[16,"):
        multiply(machine.launcher, out, x, weight, silu=True)
