"""Kernel benchmark cases for the experts of a layer of Qwen3-30B-A3B.

The tokens of a step choose the experts in order, so that the number of experts that the step reads
is known. A case with few tokens has several sets of inputs: all sets use the same weights, but the
tokens of each set choose other experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmanager.bench.kernels.cases import (
    Case,
    Contender,
    Goal,
    Mixture,
    Prepared,
    Rig,
    Sizes,
    largest_error,
    tolerance,
)
from gptmanager.cuda import moe
from gptmanager.cuda.gemm.byte_rows import Int8Rows
from gptmanager.kernels.experts.mixture import ExpertMatrices
from gptmanager.kernels.experts.routing import Routing, choose_experts
from gptmanager.kernels.gemm.packed_matrix import plain

_TIMES_ROOFLINE = 1.5  # besides both matmuls there are a choice, a sort and a weighted sum
_CHOSEN = 4.0  # added to the logits of the experts to choose, to make them the largest


class _Group(NamedTuple):
    """The tokens of an expert, and their weights float32 `[n, 1]`."""

    expert: int
    tokens: Tensor
    weights: Tensor


def expert_cases(sizes: Sizes) -> list[Case]:
    """Return the cases for all numbers of tokens of `sizes.others.mixture`."""
    return [
        _case(sizes, tokens, stored)
        for tokens in sizes.others.mixture.tokens
        for stored in (None, "int8")
    ]


def _case(sizes: Sizes, tokens: int, stored: Literal["int8"] | None) -> Case:
    own, itemsize = sizes.others.mixture, sizes.dtype.itemsize
    num_read = min(own.number, tokens * own.per_token)
    weights = num_read * 3 * own.width * own.hidden * (1 if stored else itemsize)
    kind = f", {stored}" if stored else ""
    return Case(
        "experts",
        f"{tokens} x {own.hidden}, {own.per_token} of {own.number} x {own.width}{kind}",
        weights + 2 * tokens * own.hidden * itemsize,
        partial(_prepare, tokens, stored),
        2 * tokens * own.per_token * 3 * own.width * own.hidden,
        (Goal("roofline", _TIMES_ROOFLINE), Goal("peer", 1.0, "torch")),
        quick=stored is None or tokens == own.tokens[0],
    )


def _prepare(num_tokens: int, stored: Literal["int8"] | None, rig: Rig) -> Prepared:
    own, dtype = rig.sizes.others.mixture, rig.sizes.dtype
    routing = Routing(own.per_token, renormalize=True)
    x = rig.randn(num_tokens, own.hidden)
    up = rig.randn(own.number * 2 * own.width, own.hidden, scale=own.hidden**-0.5)
    down = rig.randn(own.number * own.hidden, own.width, scale=own.width**-0.5)
    read = [_rounded(it) for it in (up, down)] if stored else [up, down]
    experts = ExpertMatrices(read[0], None, read[1], None, "silu", True, 0, own.number)
    logits = _logits(rig, own, num_tokens)

    def ours(number: int) -> Tensor:
        return moe.experts(rig.launcher, x, logits[number], None, routing, experts)

    def by_torch() -> Contender:
        groups = [_groups(it, routing) for it in logits]
        return lambda number: _mixed(x, groups[number], up, down, dtype)

    wide_up, wide_down = (plain(it) for it in read)
    expected = _mixed(x.float(), _groups(logits[0], routing), wide_up, wide_down, torch.float32)
    error, peers = largest_error(expected), {"torch": by_torch}
    return Prepared(len(logits), ours, error, tolerance(dtype), peers)


def _logits(rig: Rig, own: Mixture, num_tokens: int) -> list[Tensor]:
    """Return the logits of each set of inputs.

    Each token chooses the `per_token` experts after those of the token before, also across sets.
    """
    slots = num_tokens * own.per_token
    found = []
    for number in range(max(1, own.number // slots)):
        chosen = (number * slots + torch.arange(slots)) % own.number
        first = torch.zeros(num_tokens, own.number)
        first.scatter_(1, chosen.view(num_tokens, -1), _CHOSEN)
        noise = rig.randn(num_tokens, own.number, dtype=torch.float32, scale=0.3)
        found.append(first.to(rig.device) + noise)
    return found


def _groups(logits: Tensor, routing: Routing) -> list[_Group]:
    chosen, weights = choose_experts(logits, routing, None)
    numbers = chosen.cpu()
    found = []
    for expert in sorted({*numbers.flatten().tolist()}):
        tokens, places = (it.to(logits.device) for it in torch.where(numbers == expert))
        found.append(_Group(expert, tokens, weights[tokens, places, None]))
    return found


def _mixed(
    x: Tensor, groups: Sequence[_Group], up: Tensor, down: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the weighted sums by torch, one expert after another, with matmuls in `dtype`."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    hidden = x.shape[1]
    width = down.shape[1]
    for expert, tokens, weights in groups:
        rows = up[expert * 2 * width : (expert + 1) * 2 * width].to(dtype)
        gate, wide = F.linear(x[tokens], rows).chunk(2, dim=1)
        rows = down[expert * hidden : (expert + 1) * hidden].to(dtype)
        out.index_add_(0, tokens, F.linear(F.silu(gate) * wide, rows).float() * weights)
    return out.to(x.dtype)


def _rounded(weight: Tensor) -> Int8Rows:
    rows, columns = weight.shape
    found = Int8Rows(rows, columns, weight.dtype, weight.device)
    found.copy_(weight)
    return found
