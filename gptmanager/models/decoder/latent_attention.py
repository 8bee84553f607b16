"""Multi-head latent attention: the latent of a token is its key and its value, for all heads.

Queries are projected to the space of latents. The result of attention is projected from the space
of latents to values. The keys and values of each head are never computed (the "absorbed" form of
DeepSeek V2, arXiv:2405.04434).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import Pages, RowSpans
from gptmanager.kernels.reference import Kernels
from gptmanager.memory.weights import Weights
from gptmanager.models.decoder.layer_tensors import Affine, LayerTensors, affine
from gptmanager.models.spec import Latent, ModelSpec

_EPS = 1e-6  # for norms of latents, independent of the config, as in transformers


class LatentTensors(NamedTuple):
    """The projections of a layer.

    `query_latent` and `query_norm` are None if queries have no latent. `rope_dim` is the number of
    rotated elements of a key.

    `key_up` `[H, key_dim, rank]` projects queries to the space of latents, and `value_up`
    `[H, rank, value_dim]` the results of attention to values, head by head.
    """

    latent: Latent
    rope_dim: int
    query_latent: Affine | None
    query_norm: Tensor | None
    query: Affine
    kv_latent: Affine
    kv_norm: Tensor
    key_up: Tensor
    value_up: Tensor


def latent_tensors(spec: ModelSpec, weights: Weights, index: int) -> LatentTensors | None:
    """Return the projections of layer `index`, or None if the layer has no latents."""
    own, prefix = spec.layers[index].attention, f"layers.{index}"
    latent = own.latent
    if latent is None:
        return None
    has_query, heads = latent.query_rank > 0, own.num_heads
    up = weights.tensor(f"{prefix}.latent_up.weight")
    keys, values = torch.split(up, [heads * latent.key_dim, heads * latent.value_dim])
    return LatentTensors(
        latent,
        own.head_dim - latent.rank,
        affine(weights, f"{prefix}.query_latent") if has_query else None,
        weights.tensor(f"{prefix}.query_latent_norm.weight") if has_query else None,
        affine(weights, f"{prefix}.query"),
        affine(weights, f"{prefix}.kv_latent"),
        weights.tensor(f"{prefix}.kv_latent_norm.weight"),
        keys.view(heads, latent.key_dim, latent.rank),
        values.view(heads, latent.rank, latent.value_dim),
    )


def attend_to_latents(
    kernels: Kernels,
    layer: LayerTensors,
    own: LatentTensors,
    hidden: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    pages: Pages,
    rows: RowSpans,
) -> Tensor:
    """Run attention on `hidden`, the normalized residual `[T, C]`; return `[T, H * value_dim]`.

    A key in the pages is the rotated part, which all heads share, followed by the latent.
    """
    latent, rope_dim, num_heads = own.latent, own.rope_dim, layer.attention.num_heads
    source = hidden
    if own.query_latent is not None and own.query_norm is not None:
        source = kernels.linear(hidden, *own.query_latent)
        source = kernels.rms_norm(source, own.query_norm, _EPS)
    queries = kernels.linear(source, *own.query).view(len(source), num_heads, -1)
    plain, rotated = torch.split(queries, [latent.key_dim, rope_dim], dim=-1)
    queries = torch.cat((rotated, _by_head(kernels, plain, own.key_up)), dim=-1)
    found, shared = torch.split(
        kernels.linear(hidden, *own.kv_latent), [latent.rank, rope_dim], dim=-1
    )
    found = kernels.rms_norm(found.contiguous(), own.kv_norm, _EPS)
    both = torch.cat((queries.flatten(1), shared, found), dim=1)
    given = positions, cos_sin, None, None, _EPS, pages, rows
    queries = kernels.rope_and_write(both, *given)
    mixed = kernels.attention(queries, pages, rows, layer.attention)
    mixed = mixed.to(hidden.dtype).view(len(mixed), num_heads, -1)[..., rope_dim:]
    return _by_head(kernels, mixed, own.value_up).flatten(1)


def _by_head(kernels: Kernels, x: Tensor, weight: Tensor) -> Tensor:
    """Multiply `x [T, H, I]` by `weight [H, I, O]` head by head; return `[T, H, O]`."""
    by_head = x.transpose(0, 1)
    if not kernels.deterministic:
        return torch.bmm(by_head, weight).transpose(0, 1)
    each = [
        torch.bmm(own, weight) for own in torch.split(by_head, 1, dim=1)
    ]  # one token at a time, so that a token's result does not depend on the batch
    return torch.cat(each, dim=1).transpose(0, 1)
