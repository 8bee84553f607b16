"""`convolve`: causal convolutions of each channel over the tokens of sequences, in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.attention.paged_formulas import widened


class Filter(NamedTuple):
    """The filters of a convolution: a weight `[width, C]`, the oldest token first; a bias `[C]`.

    Each of C channels is convolved with a filter of its own.
    """

    weight: Tensor
    bias: Tensor | None = None


def convolve(x: Tensor, own: Filter, inputs: Tensor, rows: RowSpans) -> Tensor:
    """Return the causal convolution of `x [T, C]`, float32 or float64, for the tokens of `rows`.

    `inputs` `[slots, width - 1, C]` has the inputs before the rows' first tokens, and gets those
    before their next tokens. A row without tokens needs no slot. This function never waits for a
    device, and a token's result has the same bits in any batch.
    """
    before, device = len(own.weight) - 1, x.device
    starts, counts = rows.row_starts.long(), rows.row_starts.diff()
    # rows without tokens write the same values as the first row that has tokens
    first = counts.gt(0).int().argmax()
    source = torch.where(counts > 0, torch.arange(len(counts), device=device), first)
    slots, starts, counts = rows.slots.long()[source], starts[:-1][source], counts[source]
    past = inputs[slots].to(x)  # [R, width - 1, C]
    table = torch.cat((past.flatten(0, 1), x))

    def places(row: Tensor, offset: Tensor) -> Tensor:
        """Return the rows of `table` with the input of a row's token `offset`, possibly below 0."""
        earlier = row * before + before + offset
        return torch.where(offset < 0, earlier, past.shape[0] * before + starts[row] + offset)

    tokens = torch.arange(len(x), device=device)
    row = torch.searchsorted(rows.row_starts[1:].long(), tokens, right=True)
    row = row.clamp(max=len(counts) - 1)  # the last row, for tokens that pad a captured step
    offsets = tokens - starts[row]
    total = torch.zeros_like(x) if own.bias is None else widened(own.bias).to(x).expand_as(x)
    for tap, weight in enumerate(widened(own.weight).to(x)):
        total = total + table[places(row, offsets + (tap - before))] * weight
    if before:
        all_rows = torch.arange(len(counts), device=device).unsqueeze(1)
        last = counts.unsqueeze(1) + torch.arange(-before, 0, device=device)
        inputs[slots] = table[places(all_rows, last)].to(inputs)
    return total
