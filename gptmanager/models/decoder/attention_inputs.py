"""Changes to the inputs of attention in some layers: scaled queries, and pages without heads."""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import Pages
from gptmanager.models.spec import QueryTemperature


def without_heads(pages: Pages) -> Pages:
    """Return `pages` with zero KV heads, so that a layer writes no keys and values.

    This is for a layer that uses the keys and values of another layer.
    """
    scales = None if pages.cache_scales is None else pages.cache_scales[:, :0].contiguous()
    return Pages(pages.keys[:, :0], pages.values[:, :0], scales)


def scaled_by_temperature(
    queries: Tensor, positions: Tensor, temperature: QueryTemperature
) -> Tensor:
    """Return the queries `[T, H, D]`, scaled by the temperature of their positions `[T]`.

    The factor is `1 + beta * log(1 + (position + offset) // length)`.
    """
    wide = torch.float64 if queries.dtype is torch.float64 else torch.float32
    steps = ((positions + temperature.offset) // temperature.length).to(wide)
    factors = 1 + temperature.beta * torch.log1p(steps)
    return (queries.to(wide) * factors.view(-1, 1, 1)).to(queries.dtype)
