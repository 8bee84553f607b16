"""`ModelSpec`: the network of a checkpoint, as fields that do not depend on each other.

The fields describe one decoder, whatever the family. This module does not know families, config
files or the names of tensors in checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from gptmanager.kernels.activation_kinds import Activation
from gptmanager.kernels.attention.attention_arguments import AttentionShape
from gptmanager.kernels.experts.routing import Routing
from gptmanager.models.rope import Rope


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of a network, the same in every layer.

    `kind`: "rms", or "layer" for a LayerNorm. `plus_one`: weights are stored less 1. `weight` and
    `bias`: whether norms have these parameters. `before_*` and `after_*`: the norms that a layer
    has, on what attention and the MLP read, and on what they add to the residual.
    `query_key` norms queries and keys: "head" with one weight `[head_dim]` for all heads,
    "rotated_head" with the same after the rotation, "own_head" with weights of its own for each
    head, and "all_heads" over all heads together. `query_key_kind`: as `kind`, of those.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    plus_one: bool = False
    weight: bool = True
    bias: bool = False
    before_attention: bool = True
    after_attention: bool = False
    before_mlp: bool = True
    after_mlp: bool = False
    query_key: Literal["none", "head", "rotated_head", "own_head", "all_heads"] = "none"
    query_key_kind: Literal["rms", "layer"] = "rms"


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Queries at position p are multiplied by `1 + beta * log(1 + p // length)`."""

    beta: float
    length: int


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of a layer.

    `scale` multiplies the scores, which `softcap` then limits to softcap * tanh(score / softcap);
    0: no limit. `window`: the number of positions that a token sees, its own included; None: all.
    `sinks`: each head has a learned score that takes part in the softmax alone. `rope` None: the
    layer does not rotate queries and keys.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    rope: Rope | None = None
    temperature: QueryTemperature | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of `count` experts, of which `routing` chooses a few for each token.

    `correction`: scores have a bias that counts for the choice and not for the weights.
    `shared_width`: of an MLP that every token passes through as well; 0: none. `shared_gate`: the
    result of that MLP is multiplied by a learned sigmoid of the token.
    `router_bias`, `bias`: whether the router and the experts have biases. `own`: the experts that a
    rank has; None: all.
    """

    count: int
    routing: Routing
    correction: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
    own: range | None = None

    @property
    def first(self) -> int:
        """The first expert of this rank."""
        return 0 if self.own is None else self.own.start

    @property
    def own_count(self) -> int:
        """The number of experts of this rank."""
        return self.count if self.own is None else len(self.own)


@dataclass(frozen=True, slots=True)
class Mlp:
    """The MLP of a layer: `activation(gate) * up` if `gated`, else `activation(up)`, then down.

    `width`: of the hidden activations; with `experts`, of those of each expert.
    """

    width: int
    activation: Activation = "silu"
    gated: bool = True
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's attention and MLP."""

    attention: Attention
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder's shape and mathematics; on one of several ranks, of this rank's share.

    `layers` are those of the whole network. A rank has `num_layers` of them from `first_layer` on;
    heads and widths in `layers` are the rank's. `vocab_size` is that of the whole network.
    `parallel`: attention and MLP of a layer read the same residual, and both add to it.
    `embedding_scale` multiplies embeddings, `residual_scale` what a layer adds to the residual, and
    `logit_scale` the logits, which `logit_softcap` then limits (0: no limit).
    `position_offset`: row of the learned position 0, or None without learned positions.
    `sink`: the number of first positions that are always seen. `kv_cache_dtype` float8_e4m3fn:
    pages hold keys and values divided by the scales of their layer and head; None: as they are.
    """

    family: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    max_position_embeddings: int
    max_seq_len: int
    dtype: torch.dtype
    layers: tuple[Layer, ...]
    norms: Norms
    tied_embeddings: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    parallel: bool = False
    position_offset: int | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    sink: int = 0
    kv_cache_dtype: torch.dtype | None = None
    first_layer: int = 0

    def attention_shape(self, layer: int) -> AttentionShape:
        """Return the shape of a layer's attention, as kernels take it."""
        own = self.layers[layer].attention
        return AttentionShape(
            own.num_heads,
            own.num_kv_heads,
            own.head_dim,
            scale=own.scale,
            window=own.window,
            sink=self.sink,
            softcap=own.softcap,
            fp8=self.kv_cache_dtype is torch.float8_e4m3fn,
            sinks=own.sinks,
            late_norm=self.norms.query_key == "rotated_head",
            plus_one=self.norms.plus_one and self.norms.query_key in ("head", "rotated_head"),
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The number of positions that a token sees in each layer of the network; None: all."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def sliding_window(self) -> int | None:
        """The farthest that any layer looks back; positions before that are never read again."""
        widths = [width for width in self.windows if width is not None]
        return max(widths) if len(widths) == len(self.windows) else None

    @property
    def attention_scales(self) -> tuple[float, ...]:
        """The factor of the scores in each layer of the network."""
        return tuple(layer.attention.scale for layer in self.layers)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """The rotation of each layer of the network."""
        return tuple(layer.attention.rope for layer in self.layers)

    @property
    def num_heads(self) -> int:
        """The number of query heads, in the layer that has most."""
        return max(layer.attention.num_heads for layer in self.layers)

    @property
    def num_kv_heads(self) -> int:
        """The number of KV heads of a page."""
        return self.page_shape[0]

    @property
    def head_dim(self) -> int:
        """The size of a head in a page."""
        return self.page_shape[1]

    @property
    def page_shape(self) -> tuple[int, int]:
        """KV heads and head size of a page, which are those of the layer with the most elements.

        A layer of another shape uses the first bytes of each page as if they had its own shape.
        """
        shapes = {(it.attention.num_kv_heads, it.attention.head_dim) for it in self.layers}
        return max(shapes, key=lambda shape: (shape[0] * shape[1], shape))

    @property
    def intermediate_size(self) -> int:
        """The width of an MLP, in the layer where it is widest."""
        return max(layer.mlp.width for layer in self.layers)
