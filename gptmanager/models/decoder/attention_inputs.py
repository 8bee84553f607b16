"""Changes to the inputs of attention in some layers: normed heads, scaled queries, fewer pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import Pages
from gptmanager.kernels.reference import Kernels
from gptmanager.models.decoder.layer_tensors import HeadNorm
from gptmanager.models.spec import Norms, QueryTemperature


def norm_heads(kernels: Kernels, qkv: Tensor, given: Sequence[HeadNorm], norms: Norms) -> None:
    """Apply the norms `given` to heads of `qkv [T, N]`, in place."""
    kind = {"centered": norms.query_key_kind == "layer", "plus_one": norms.plus_one}
    for columns, width, weight, bias in given:
        if bias is None:
            kernels.norm_heads(qkv, columns, width, weight, norms.eps, **kind)
            continue
        own = qkv[:, columns.start : columns.stop]
        heads = own.reshape(-1, width).contiguous()
        own.copy_(kernels.layer_norm(heads, weight, bias, norms.eps).view_as(own))


def without_heads(pages: Pages) -> Pages:
    """Return `pages` with zero KV heads, so that a layer writes no keys and values.

    This is for a layer that uses the keys and values of another layer.
    """
    scales = None if pages.cache_scales is None else pages.cache_scales[:, :0].contiguous()
    return Pages(pages.keys[:, :0], pages.values[:, :0], scales)


def scaled_by_temperature(
    queries: Tensor, positions: Tensor, temperature: QueryTemperature | None
) -> Tensor:
    """Return the queries `[T, H, D]`, scaled by the temperature, if any, of their positions `[T]`.

    The factor is `1 + beta * log(1 + (position + offset) // length)`.
    """
    if temperature is None:
        return queries
    wide = torch.float64 if queries.dtype is torch.float64 else torch.float32
    steps = ((positions + temperature.offset) // temperature.length).to(wide)
    factors = 1 + temperature.beta * torch.log1p(steps)
    return (queries.to(wide) * factors.view(-1, 1, 1)).to(queries.dtype)
