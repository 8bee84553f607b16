"""`Groups`: rows of a matrix in 4 bits, in groups of 32 positions with a scale for each.

An element is `scale * (value - 8)`, or `scale * value + minimum` where groups have minima. Scales
and minima are float16, so these are also the blocks Q4_0 and Q4_1 of GGUF files, number by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # positions with one scale
MIDDLE, MOST = 8, 15  # the value of zero without a minimum, and the largest value
# The largest magnitude of a group is one of these numbers of steps: see `round_to_groups`.
_STEPS = (8.0, 7.5, 7.0, 8.5, 9.5)
_PIECE = 1 << 15  # elements that are rounded at a time, so that temporaries stay in the cache
_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True)
class Groups:
    """`values`: uint8 `[n, columns]`; `scales`, `minima`: float16 `[n, groups]`; None: no minima.

    The last group of a row may have fewer than 32 positions.
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def offsets(self) -> Tensor:
        """Return what is added to `scale * value`, float32 `[n, groups]`."""
        return self.scales.float() * -MIDDLE if self.minima is None else self.minima.float()

    def rows(self, rows: slice) -> Groups:
        minima = None if self.minima is None else self.minima[rows]
        return Groups(self.values[rows], self.scales[rows], minima)

    def columns(self, columns: slice) -> Groups | None:
        """Return a part of each row; None if it does not begin with a group."""
        start, stop, _ = columns.indices(self.values.shape[1])
        if start % GROUP:
            return None
        own = slice(start // GROUP, -(-stop // GROUP))
        minima = None if self.minima is None else self.minima[:, own]
        return Groups(self.values[:, start:stop], self.scales[:, own], minima)

    def floats(self) -> Tensor:
        """Return the elements in float32, exact but for one rounding where there are minima."""
        count = self.values.shape[1]
        wide = whole_groups(self.values.float())
        wide = wide * self.scales.float().unsqueeze(-1) + self.offsets.unsqueeze(-1)
        return wide.flatten(1)[:, :count]


def joined(parts: Sequence[Groups]) -> Groups:
    """Return rows below each other; all have minima or none has."""
    minima = [part.minima for part in parts if part.minima is not None]
    return Groups(
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minima) if minima else None,
    )


def whole_groups(rows: Tensor) -> Tensor:
    """Return `[n, columns]` as `[n, groups, 32]`, padded with zeros."""
    count = -(-rows.shape[1] // GROUP)
    return F.pad(rows, (0, count * GROUP - rows.shape[1])).view(len(rows), count, GROUP)


def round_to_groups(rows: Tensor) -> Groups:
    """Round floats `[n, columns]` to groups without minima.

    Of a few scales for each group, the one with the least squared error is kept. Each makes the
    largest magnitude another number of steps, and is then replaced by the best scale for the
    integers that it leads to (least squares), as `make_qx_quants` of llama.cpp's `ggml-quants.c`
    does. The first one is that of Q4_0: the element with the largest magnitude is -8 steps.
    """
    step = max(1, _PIECE // max(1, rows.shape[1]))
    parts = [_rounded(rows[n : n + step]) for n in range(0, max(1, len(rows)), step)]
    return joined(parts)


def _rounded(rows: Tensor) -> Groups:
    wide = whole_groups(rows.float())
    place = wide.abs().argmax(dim=-1, keepdim=True)
    largest = wide.gather(-1, place)
    best = torch.full_like(largest, torch.inf)
    scales, values = torch.zeros_like(largest), torch.zeros_like(wide)
    for steps in _STEPS:
        own, error = _with_scale(wide, largest / -steps)
        is_better = error < best
        best = torch.where(is_better, error, best)
        scales = torch.where(is_better, own, scales)
    values = _values(wide, scales)
    count = rows.shape[1]
    whole = (values + MIDDLE).to(torch.uint8).flatten(1)[:, :count]
    broken = largest.squeeze(-1).isfinite().logical_not_()
    own_scales = scales.squeeze(-1).masked_fill_(broken, torch.nan)
    return Groups(whole, own_scales.to(torch.float16))


def _values(wide: Tensor, scales: Tensor) -> Tensor:
    """Return the nearest integers from -8 to 7; 0 where the scale is 0."""
    inverse = torch.where(scales == 0, 0, 1 / scales)
    return (wide * inverse).nan_to_num_(0, 0, 0).round_().clamp_(-MIDDLE, MOST - MIDDLE)


def _with_scale(wide: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least-squares scale for the integers of `scale`, and the squared error with it."""
    values = _values(wide, scale)
    squares = (values * values).sum(-1, keepdim=True)
    products = (wide * values).sum(-1, keepdim=True)
    fitted = torch.where(squares == 0, 0, products / squares)
    fitted = fitted.clamp(-_LARGEST, _LARGEST).to(torch.float16).float()
    left = wide - fitted * _values(wide, fitted)
    return fitted, (left * left).sum(-1, keepdim=True)
