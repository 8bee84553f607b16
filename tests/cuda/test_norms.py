from __future__ import annotations

import pytest
import torch
from kernel_values import DTYPES, close, randn

from gptmanager.cuda.norms import norm, norm_heads

pytestmark = pytest.mark.every(5)

EPS = 1e-5


def textbook(y, weight, bias, centered):
    y = y.double()
    if centered:
        y = y - y.mean(-1, keepdim=True)
    y = y / torch.sqrt(y.square().mean(-1, keepdim=True) + EPS) * weight.double()
    return y if bias is None else y + bias.double()


def check_norm(machine, dtype, tokens, width, centered, add, plus_one=False):
    x, before = randn(tokens, width, dtype=dtype) * 3 + 1, randn(tokens, width, dtype=dtype, seed=1)
    weight, bias = randn(width, dtype=dtype, seed=2), randn(width, dtype=dtype, seed=3)
    out, residual = machine.empty((tokens, width), dtype), machine.tensor(before)
    arguments = [out, machine.tensor(x), machine.tensor(weight)]
    arguments += [machine.tensor(bias) if centered else None, EPS, residual if add else None]
    norm(machine.launcher, *arguments, centered=centered, plus_one=plus_one)

    summed = x + before if add else x
    assert torch.equal(residual.cpu(), summed if add else before)
    factors = weight.double() + plus_one
    close(out, textbook(summed, factors, bias if centered else None, centered))


def check_heads(machine, dtype, columns, width, stride, centered):
    x, weight = randn(3, stride, dtype=dtype) * 3 + 1, randn(len(columns), dtype=dtype, seed=2)
    out = machine.tensor(x)
    given = columns, width, machine.tensor(weight), EPS
    norm_heads(machine.launcher, out, *given, centered=centered)
    own = slice(columns.start, columns.stop)
    heads = textbook(x[:, own].reshape(3, -1, width), torch.ones(width), None, centered)
    expected = x.double()
    expected[:, own] = heads.flatten(1) * weight.double()
    close(out, expected)
    out = out.cpu()
    out[:, own] = x[:, own]
    assert torch.equal(out, x)  # other columns are unchanged


@pytest.mark.parametrize("add", [False, True], ids=["", "add"])
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(machine, dtype, centered, add):
    for tokens, width in [(3, 64), (2, 1000), (1, 4096), (0, 64)]:
        check_norm(machine, dtype, tokens, width, centered, add)


@pytest.mark.parametrize("add", [False, True], ids=["", "add"])
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_weights_that_are_stored_less_1(machine, centered, add):
    """A sum that is rounded to bfloat16 would miss the bound."""
    check_norm(machine, torch.bfloat16, 3, 64, centered, add, plus_one=True)
    check_norm(machine, torch.float32, 2, 63, centered, add, plus_one=True)


@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_of_heads(machine, dtype, centered):
    check_heads(machine, dtype, range(0, 128), 32, 256, centered)
    check_heads(machine, dtype, range(128, 192), 64, 256, centered)
    check_heads(machine, dtype, range(3, 3 + 63), 21, 67, centered)


def test_norms_of_all_heads_together(machine):
    check_heads(machine, torch.bfloat16, range(64, 64 + 5000), 5000, 5128, centered=False)


def test_norms_of_heads_have_no_race(checked_machine):
    check_heads(checked_machine, torch.bfloat16, range(64, 64 + 1000), 500, 1128, centered=True)


@pytest.mark.parametrize("width", [1, 63, 4099, 8191, 8192, 14336, 32768])
def test_rows_of_any_width(machine, width):
    check_norm(machine, torch.bfloat16, 2, width, centered=False, add=True)


@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_norms_have_no_race(checked_machine, centered):
    check_norm(checked_machine, torch.bfloat16, 2, 1000, centered, add=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_rows_that_are_smaller_than_epsilon(machine, dtype, centered):
    """Zeros, a row of one number, and squares that epsilon is a hundred times as large as."""
    x = torch.stack([torch.zeros(64), torch.full((64,), 3.0), 3e-4 * randn(64)]).to(dtype)
    weight, bias = randn(64, dtype=dtype, seed=2), randn(64, dtype=dtype, seed=3)
    out = machine.empty((3, 64), dtype)
    given = [out, *map(machine.tensor, (x, weight, bias))]
    given = given if centered else [*given[:3], None]
    norm(machine.launcher, *given, EPS, centered=centered)
    close(out, textbook(x, weight, bias if centered else None, centered))


def test_a_result_in_place_of_its_argument(machine):
    x, weight = randn(2, 256), randn(256, seed=1)
    place = machine.tensor(x)
    norm(machine.launcher, place, place, machine.tensor(weight), None, EPS)
    close(place, textbook(x, weight, None, centered=False))


def test_tensors_that_do_not_fit(machine):
    x, weight = machine.tensor(randn(2, 64)), machine.tensor(randn(63))
    with pytest.raises(ValueError, match=r"weight is torch.float32 \[63\], expected .* \[64\]"):
        norm(machine.launcher, x, x, weight, None, EPS)
    for columns, width in ((range(0, 64), 30), (range(2, 66), 32)):
        with pytest.raises(ValueError, match="within 64 columns, of step 1, that divides into"):
            norm_heads(machine.launcher, x, columns, width, machine.tensor(randn(64)), EPS)
    with pytest.raises(ValueError, match="rows of 99999 elements: at most"):
        wide = machine.tensor(randn(1, 99999))
        norm(machine.launcher, wide, wide, wide[0], None, EPS)
