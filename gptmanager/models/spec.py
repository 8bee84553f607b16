"""`ModelSpec`: the network of a checkpoint, as independent fields.

The fields are the same for all families of models. This module does not know families, config files
or tensor names of checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from gptmanager.kernels.activations.activation_kinds import Activation
from gptmanager.kernels.attention.attention_arguments import AttentionShape
from gptmanager.kernels.experts.routing import Routing
from gptmanager.memory.kv_pool import PageShape
from gptmanager.memory.slot_states import StateShape
from gptmanager.models.recurrent.kind import RecurrentKind
from gptmanager.models.rope_scaling import Rope


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of a network, the same in every layer.

    `kind`: "rms", or "layer" for LayerNorm. `plus_one`: 1 is added to the stored weights. `weight`
    and `bias`: whether norms have these parameters. `embedding`: embeddings have a norm. `before_*`
    and `after_*`: which norms a layer has on the inputs of attention and MLP, and on their outputs
    before the residual addition.
    `query_key`: the norm of queries and keys. "head" has one weight `[head_dim]` for all heads.
    "rotated_head" is the same, but applied after RoPE. "rotated" is like "rotated_head", but
    without weights, and only in layers with RoPE. "biased_head" is a LayerNorm with one weight and
    one bias `[head_dim]` for all heads. "own_head" has separate weights per head. "all_heads"
    normalizes all heads together. `query_key_kind`: the `kind` of the norm of queries and keys.
    `value`: heads of values have an RMS norm without weights.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    plus_one: bool = False
    weight: bool = True
    bias: bool = False
    embedding: bool = False
    before_attention: bool = True
    after_attention: bool = False
    before_mlp: bool = True
    after_mlp: bool = False
    query_key: Literal[
        "none", "head", "rotated_head", "rotated", "biased_head", "own_head", "all_heads"
    ] = "none"
    query_key_kind: Literal["rms", "layer"] = "rms"
    value: bool = False

    @property
    def in_layer(self) -> dict[str, bool]:
        """The names of a layer's norms around attention and MLP -> whether the layer has them."""
        return {
            "attention_norm": self.before_attention,
            "attention_out_norm": self.after_attention,
            "mlp_norm": self.before_mlp,
            "mlp_out_norm": self.after_mlp,
        }


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Queries at position p are multiplied by `1 + beta * log(1 + (p + offset) // length)`."""

    beta: float
    length: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek V2): a token's keys and values come from one latent.

    `rank`: the size of the latent. `query_rank`: the size of the latent of the queries, or 0 if
    queries are projected from the hidden state. `key_dim`: the number of elements of a head's query
    and key that RoPE does not rotate. `value_dim`: the size of a head's value. `bias`: the
    projections to the latents have biases. `Attention.head_dim` is then the size of a key in the
    pages: the rotated elements, which all heads share, and the latent.
    """

    rank: int
    query_rank: int
    key_dim: int
    value_dim: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of a layer.

    `scale` multiplies the scores. `softcap` then limits them to softcap * tanh(score / softcap); 0
    for no limit. `window`: the number of positions that a token sees, including its own; None for
    all. `chunked`: the window instead begins at the largest multiple of `window` that is at most
    the token's position. `sinks`: each head has a learned score, which only adds to the denominator
    of the softmax. `rope`: the RoPE of queries and keys, or None. `temperature`: a factor of the
    queries, or None. `kv_layer`: the index of the layer that computes the keys and values for this
    layer, or None if this layer computes its own. `keys_as_values`: values are the keys before
    their norm and RoPE. `latent`: the layer has multi-head latent attention, and stores a latent
    instead of keys and values. `recurrent`: the layer is recurrent, and has a state in place of
    attention; the other fields do not describe it. `absent`: the layer has an MLP alone; the other
    fields do not describe it. `gated`: the output of attention is multiplied by the sigmoid of
    gates, which are projected together with the queries.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    chunked: bool = False
    softcap: float = 0.0
    sinks: bool = False
    rope: Rope | None = None
    temperature: QueryTemperature | None = None
    kv_layer: int | None = None
    keys_as_values: bool = False
    latent: Latent | None = None
    recurrent: RecurrentKind | None = None
    absent: bool = False
    gated: bool = False

    @property
    def attends(self) -> bool:
        """Whether the layer has attention over the KV cache."""
        return self.recurrent is None and not self.absent

    @property
    def has_pages(self) -> bool:
        """Whether the layer stores keys of its own in the KV cache."""
        return self.attends and self.kv_layer is None

    @property
    def own_kv_heads(self) -> int:
        """The number of KV heads that the layer computes itself."""
        return self.num_kv_heads if self.has_pages else 0

    @property
    def gate_width(self) -> int:
        """The number of gates of a token, which precede the queries in the result of `qkv`."""
        return self.num_heads * self.head_dim if self.gated else 0

    @property
    def out_width(self) -> int:
        """The number of elements that attention, or a recurrent layer, returns for a token."""
        if self.recurrent is not None:
            return self.recurrent.out_width
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def out_name(self) -> str:
        """The name of the output projection."""
        return "out" if self.recurrent is None else f"{self.recurrent.name}_out"

    @property
    def projected_heads(self) -> int:
        """The number of heads of gates, queries, keys and values that `qkv` projects, in total."""
        queries = self.num_heads * (2 if self.gated else 1)
        return queries + (1 if self.keys_as_values else 2) * self.own_kv_heads


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of `count` experts; `routing` selects a few of them for each token.

    `correction`: a bias is added to the scores for the selection, but not for the weights.
    `shared_width`: width of an additional MLP for all tokens; 0 for none. `shared_gate`: the output
    of the additional MLP is multiplied by a learned sigmoid gate. `averaged`: the result is the
    mean of the outputs of the experts and of the additional MLP, not their sum. `router_bias`,
    `bias`: whether the router and the experts have biases. `apart` (Gemma 4): router and experts
    read the residual through norms of their own, the outputs of the experts and of the shared MLP
    have norms before their sum, and the weight of an expert is multiplied by a learned factor.
    `latent`: experts read and write vectors of this size, which are projected from and to the
    hidden size; 0 if they have the hidden size themselves (Nemotron 3 Super has latents). `own`:
    the experts of this rank; None if the rank has all experts.
    """

    count: int
    routing: Routing
    correction: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    averaged: bool = False
    router_bias: bool = False
    bias: bool = False
    apart: bool = False
    latent: int = 0
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

    `width`: the number of hidden activations of the MLP, or of one expert if there are `experts`.
    `xielu`: the MLP has xIELU with learned numbers instead of `activation`.
    """

    width: int
    activation: Activation = "silu"
    gated: bool = True
    experts: Experts | None = None
    xielu: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's attention and MLP. A layer may also have one of them alone (Nemotron-H).

    `mlp` is None if the layer has no MLP; `Attention.absent` says that it has no attention.
    `scaled`: at the end of the layer, the residual is multiplied by a learned number.
    """

    attention: Attention
    mlp: Mlp | None
    scaled: bool = False

    @property
    def experts(self) -> Experts | None:
        """The layer's mixture of experts, if it has one."""
        return None if self.mlp is None else self.mlp.experts


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """A second input of each layer for each token, of `width` elements (Gemma 4's E models).

    The input is (e + p) / sqrt(2). e is a second embedding of the token, times sqrt(`width`), and p
    is a normed projection of the residual before the first layer. A layer multiplies the input by a
    gate with its MLP's activation, and adds the projected and normed result to the residual.
    `vocab_size`: the number of tokens with a second embedding. `padding_id`: the token id that is
    looked up for a virtual token of a prompt embedding table.
    """

    width: int
    vocab_size: int
    padding_id: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape and mathematics of a decoder, or of one rank's share of it.

    `layers` describes all layers of the network; a rank has `num_layers` of them, starting at
    `first_layer`. The numbers of heads and the widths in `layers` are the rank's share;
    `vocab_size` is the whole network's. `parallel`: attention and MLP of a layer read the same
    residual, and the outputs of both are added to the residual. `embedding_scale` multiplies
    embeddings, `residual_scale` each addition to the residual, and `logit_scale` the logits.
    `logit_softcap` then limits the logits (0 for no limit). `qkv_limit`: queries, keys and values
    are clamped to this magnitude as they are projected; 0 for no limit. `position_offset`: the row
    of position 0 in the table of learned positions; None without a table. `sink`: the number of
    first positions that are always visible. `kv_cache_dtype`: float8_e4m3fn if pages store each key
    and value divided by the scale of its layer and head; None if pages store unscaled numbers in
    `dtype`. `token_inputs`: second inputs of the layers, or None.
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
    qkv_limit: float = 0.0
    sink: int = 0
    kv_cache_dtype: torch.dtype | None = None
    first_layer: int = 0
    token_inputs: TokenInputs | None = None

    def attention_shape(self, layer: int) -> AttentionShape:
        """Return the shape of a layer's attention, in the form that kernels need."""
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
            late_norm=self.norms.query_key in ("rotated_head", "rotated"),
            plus_one=self.norms.plus_one and self.norms.query_key in ("head", "rotated_head"),
            is_once=own.latent is not None,
            chunked=own.chunked,
        )

    @property
    def pages(self) -> tuple[PageShape, ...]:
        """The shape of the pages of each layer of this rank that stores keys of its own."""
        own = self.layers[self.first_layer : self.first_layer + self.num_layers]
        found = (layer.attention for layer in own if layer.attention.has_pages)
        return tuple(PageShape(it.num_kv_heads, it.head_dim, it.latent is None) for it in found)

    def page_number(self, layer: int) -> int:
        """Return the index in `pages` of the pages that a layer of the network reads."""
        source = self.layers[layer].attention.kv_layer
        last = layer if source is None else source
        own = self.layers[self.first_layer : last]
        return sum(it.attention.has_pages for it in own)

    @property
    def states(self) -> tuple[StateShape, ...]:
        """The shapes of the states of a sequence, those of the first recurrent layer first."""
        kinds = (layer.attention.recurrent for layer in self.layers)
        return tuple(it for own in kinds if own is not None for it in own.states(self.dtype))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The `window` of each layer of the network; None for a layer without a window."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def sliding_window(self) -> int | None:
        """The largest window of all layers, or None if a layer has no window.

        Positions before this window, except the first `sink` positions, are never read again.
        """
        widths = [width for width in self.windows if width is not None]
        return max(widths) if len(widths) == len(self.windows) else None

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """The RoPE of each layer of the network; None for a layer without RoPE."""
        return tuple(layer.attention.rope for layer in self.layers)

    @property
    def num_heads(self) -> int:
        """The largest number of query heads of any layer."""
        return max(layer.attention.num_heads for layer in self.layers)

    @property
    def num_kv_heads(self) -> int:
        """The number of KV heads in the largest page."""
        return self.page_shape[0]

    @property
    def head_dim(self) -> int:
        """The head size in the largest page."""
        return self.page_shape[1]

    @property
    def page_shape(self) -> tuple[int, int]:
        """KV heads and head size of the layer with the most elements in a page."""
        shapes = {(it.attention.num_kv_heads, it.attention.head_dim) for it in self.layers}
        return max(shapes, key=lambda shape: (shape[0] * shape[1], shape))
