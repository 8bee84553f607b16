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
from gptmanager.models.decoder.position_tables import PositionTables
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
    tables: PositionTables,
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
    queries = kernels.joined(rotated, kernels.linear_heads(plain, own.key_up))
    shared = kernels.linear(hidden, *own.kv_latent)
    kind = {"centered": False, "plus_one": False}
    kernels.norm_heads(shared, range(latent.rank), latent.rank, own.kv_norm, _EPS, **kind)
    found, shared = torch.split(shared, [latent.rank, rope_dim], dim=-1)
    both = kernels.joined(queries.flatten(1), shared, found)
    given = positions, tables.by_rope.get(layer.rope), None, None, _EPS, pages, rows
    queries = kernels.rope_and_write(both, *given)
    tables.scale(kernels, queries, positions, layer.temperature)
    mixed = kernels.attention(queries, pages, rows, layer.attention)
    mixed = mixed.to(hidden.dtype).view(len(mixed), num_heads, -1)[..., rope_dim:]
    return kernels.linear_heads(mixed, own.value_up).flatten(1)
