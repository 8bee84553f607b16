"""Floats rounded to groups of 4 bits: by the compiled loop, by plain torch, and by llama.cpp."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gptmanager.kernels.gemm.int4_groups import MIDDLE, MOST, Groups, whole_groups
from gptmanager.kernels.gemm.weight_quantization import STEPS, round_to_groups

LARGEST = torch.finfo(torch.float16).max


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def q4_0(rows: Tensor) -> Tensor:
    """What llama.cpp's reference makes of rows in blocks Q4_0."""
    wide = whole_groups(rows)
    scale = wide.gather(-1, wide.abs().argmax(-1, keepdim=True)) / -8
    values = torch.where(scale == 0, 0, wide / scale).add(8.5).floor().clamp(max=15) - 8
    return (values * scale.half().float()).flatten(1)[:, : rows.shape[1]]


def total(x: Tensor) -> Tensor:
    """Sum groups by halves, as the lanes of a register are summed."""
    while x.shape[-1] > 1:
        low, high = x.chunk(2, dim=-1)
        x = low + high
    return x


def rounded(rows: Tensor) -> Groups:
    """Round in plain torch."""
    wide = whole_groups(rows.float())
    largest = wide.gather(-1, wide.abs().argmax(dim=-1, keepdim=True))
    best = torch.full_like(largest, torch.nan)
    scales = torch.zeros_like(largest)
    for steps in STEPS:
        own, error = with_scale(wide, largest / -steps)
        is_better = best.isnan() | (error < best)
        best, scales = torch.where(is_better, error, best), torch.where(is_better, own, scales)
    is_whole = wide.isfinite().all(dim=-1)
    values = (integers(wide, scales) * is_whole.unsqueeze(-1) + MIDDLE).to(torch.uint8)
    own_scales = scales.squeeze(-1).masked_fill_(~is_whole, torch.nan)
    return Groups(values.flatten(1)[:, : rows.shape[1]], own_scales.to(torch.float16))


def integers(wide: Tensor, scales: Tensor) -> Tensor:
    inverse = torch.where(scales == 0, 0, 1 / scales)
    return (wide * inverse).nan_to_num_(0, 0, 0).round_().clamp_(-MIDDLE, MOST - MIDDLE)


def with_scale(wide: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    values = integers(wide, scale)
    squares, products = total(values * values), total(wide * values)
    fitted = torch.where(squares == 0, 0, products / squares)
    fitted = fitted.clamp(-LARGEST, LARGEST).to(torch.float16).float()
    left = wide - fitted * integers(wide, fitted)
    return fitted, total(left * left)


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 100),
    seed=st.integers(0, 99),
    span=st.integers(0, 40),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
)
def test_the_compiled_loop_rounds_as_torch(
    rows: int, columns: int, seed: int, span: int, dtype: torch.dtype
) -> None:
    values = randn(rows, columns, seed=seed) * 10.0 ** (randn(rows, columns, seed=seed + 1) * span)
    values = values.to(dtype)
    ours, plain = round_to_groups(values), rounded(values)
    assert torch.equal(ours.values, plain.values)
    assert torch.equal(ours.scales.view(torch.int16), plain.scales.view(torch.int16))


def test_all_threads_round_a_large_matrix() -> None:
    values = randn(300, 640)[:, 7:]
    values[:, 40:60] = values[:, 40:60].round()  # several elements are the largest
    ours, plain = round_to_groups(values), rounded(values)
    assert torch.equal(ours.values, plain.values) and torch.equal(ours.scales, plain.scales)


@given(rows=st.integers(1, 5), columns=st.integers(1, 100), seed=st.integers(0, 99))
def test_no_group_is_rounded_worse_than_to_q4_0(rows: int, columns: int, seed: int) -> None:
    values = randn(rows, columns, seed=seed) * torch.logspace(-4, 2, columns)
    errors = (
        whole_groups(values - own).square().sum(-1)
        for own in (round_to_groups(values).floats(), q4_0(values))
    )
    ours, theirs = errors
    assert (ours <= theirs * 1.0001).all()


def test_normal_numbers_are_rounded_a_tenth_better_than_to_q4_0() -> None:
    values = randn(64, 1024)
    ours, theirs = (
        (values - own).square().mean() for own in (round_to_groups(values).floats(), q4_0(values))
    )
    assert ours < 0.91 * theirs


def test_rounding_at_the_ends_of_numbers() -> None:
    values = torch.zeros(6, 64)
    values[1], values[2], values[3], values[4] = 1e30, 1e-30, -3.0, 1.0
    values[4, 3], values[5, 40] = torch.nan, torch.inf
    floats = round_to_groups(values).floats()
    assert not floats[0].any() and (floats[1] == 8 * LARGEST).all()
    assert floats[2].abs().max() < 1e-7
    torch.testing.assert_close(floats[3], values[3], rtol=1e-3, atol=0)
    assert floats[4, :32].isnan().all() and (floats[4, 32:] - 1).abs().max() < 1e-3
    assert floats[5, 32:].isnan().all() and not floats[5, :32].any()
