"""The network: what a `ModelSpec` computes, over weights and kernels.

One decoder, pre-normalized, with a residual stream; every choice in it is a value of the spec.
Knows nothing of families, config files and tensor names in checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gptmanager.kernels.reference import AttentionShape, Ints, Kernels
from gptmanager.memory.kv_pool import KvPool
from gptmanager.memory.weights import Weights
from gptmanager.models.batch import Batch
from gptmanager.models.rope import Rope, rope_table


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder's shape and mathematics.

    `rope` None: learned positions. `activation` "silu" is gated (gate * up), the GELUs are not.
    `windows[i]`: how many positions, its own included, a token sees in layer i; None: all.
    `attention_scales[i]` multiplies the scores of layer i. `kv_cache_dtype` float8_e4m3fn: pages
    hold keys and values divided by the scales of their layer and head; None: as they are.
    """

    family: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int
    max_seq_len: int
    dtype: torch.dtype
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: Literal["silu", "gelu", "gelu_tanh"]
    rope: Rope | None
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    attention_scales: tuple[float, ...]
    sink: int = 0  # so many first positions are seen whatever the windows
    kv_cache_dtype: torch.dtype | None = None

    @property
    def sliding_window(self) -> int | None:
        """The farthest that any layer looks back: what lies beyond is never read again."""
        widths = [width for width in self.windows if width is not None]
        return max(widths) if len(widths) == len(self.windows) else None


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every parameter of the network; those of layer i are named `layers.{i}.<module>.<part>`."""
    hidden, width = spec.hidden_size, spec.intermediate_size
    heads = spec.num_heads * spec.head_dim
    qkv = heads + 2 * spec.num_kv_heads * spec.head_dim
    up = 2 * width if spec.activation == "silu" else width
    modules = {
        "attention_norm": ((hidden,), spec.norm == "layer"),
        "qkv": ((qkv, hidden), spec.qkv_bias),
        "out": ((hidden, heads), spec.out_bias),
        "mlp_norm": ((hidden,), spec.norm == "layer"),
        "up": ((up, hidden), spec.mlp_bias),
        "down": ((hidden, width), spec.mlp_bias),
    }
    if spec.qk_norm:
        modules |= {"q_norm": ((spec.head_dim,), False), "k_norm": ((spec.head_dim,), False)}
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (spec.vocab_size, hidden)}
    if spec.rope is None:
        shapes["positions.weight"] = (spec.max_position_embeddings, hidden)
    for layer in range(spec.num_layers):
        for module, (shape, biased) in modules.items():
            shapes[f"layers.{layer}.{module}.weight"] = shape
            if biased:
                shapes[f"layers.{layer}.{module}.bias"] = shape[:1]
        shapes[f"layers.{layer}.cache_scales"] = (2 * spec.num_kv_heads,)  # of keys, of values
    shapes["final_norm.weight"] = (hidden,)
    if spec.norm == "layer":
        shapes["final_norm.bias"] = (hidden,)
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


class Affine(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class _Layer(NamedTuple):
    """One layer's tensors, resolved once; `next_norm` is the one that follows the layer."""

    qkv: Affine
    q_norm: Tensor | None
    k_norm: Tensor | None
    scale: float
    window: int | None
    cache_scales: Tensor | None
    out: Affine
    mlp_norm: Affine
    up: Affine
    down: Affine
    next_norm: Affine


class Decoder:
    """The network of a spec over weights: packed tokens in, logits of the sampling tokens out."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, kernels: Kernels, device: torch.device | str
    ) -> None:
        self._spec = spec
        self._kernels = kernels
        self._layers = [_resolve_layer(spec, weights, i) for i in range(spec.num_layers)]
        self._shape = AttentionShape(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            tuple(dict.fromkeys(spec.windows)),
            spec.sink,
            fp8=spec.kv_cache_dtype is torch.float8_e4m3fn,
        )
        self._gelu: Literal["none", "tanh"] = "tanh" if spec.activation == "gelu_tanh" else "none"
        self._first_norm = _affine(weights, "layers.0.attention_norm")
        self._embedding = weights["embedding.weight"]
        self._lm_head = self._embedding if spec.tied_embeddings else weights["lm_head.weight"]
        self._positions = None if spec.rope is not None else weights["positions.weight"]
        self._device = device
        self._cos_sin: Tensor | None = None

    def reserve_positions(self, num_positions: int) -> None:
        """Cosines and sines for so many positions, and for no others."""
        table = self._cos_sin
        if self._spec.rope is None or (table is not None and len(table) == num_positions):
            return
        table = self._cos_sin = None  # or both would be there for a while
        self._cos_sin = rope_table(
            self._spec.rope, self._spec.head_dim, num_positions, self._device
        )

    def plan(
        self, row_starts: Ints, kv_lengths: Ints, num_context_rows: int, fixed: bool = False
    ) -> tuple[Ints, ...]:
        """A batch's `plan`, of its rows' numbers on the host; `fixed` as in `Kernels.plan`."""
        return self._kernels.plan(self._shape, row_starts, kv_lengths, num_context_rows, fixed)

    def forward(self, batch: Batch, kv_pool: KvPool) -> Tensor:
        """Write the batch's keys and values; logits `[S, vocab]` in the weights' dtype."""
        if self._cos_sin is None:
            self.reserve_positions(self._spec.max_seq_len)
        plan = self._kernels.begin(
            self._shape,
            batch.plan,
            *(batch.row_starts, batch.kv_lengths, batch.slots, batch.block_tables),
            num_tokens=len(batch.token_ids),
            tokens_per_block=kv_pool.tokens_per_block,
        )
        residual = self._embed(batch)
        hidden = self._norm(residual, self._first_norm)
        last = self._layers[-1]
        for layer, keys, values in zip(
            self._layers, kv_pool.keys.unbind(), kv_pool.values.unbind(), strict=True
        ):
            hidden = self._attend(layer, hidden, keys, values, batch, plan)
            # nothing reads the other tokens from here on
            if layer is last and not batch.all_sampled:
                hidden = hidden.index_select(0, batch.sample_index)
                residual = residual.index_select(0, batch.sample_index)
            hidden = self._feed_forward(layer, hidden, residual)
        return self._kernels.linear(hidden, self._lm_head)

    def _embed(self, batch: Batch) -> Tensor:
        embedded = self._kernels.embedding(batch.token_ids, self._embedding)
        if batch.prompt_index is not None and batch.prompt_embeddings is not None:
            own = batch.prompt_embeddings.to(embedded)
            embedded = embedded.index_copy(0, batch.prompt_index, own)
        if self._positions is not None:
            embedded += self._kernels.embedding(batch.positions, self._positions)
        return embedded

    def _attend(
        self,
        layer: _Layer,
        hidden: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: Batch,
        plan: Any,
    ) -> Tensor:
        """`[T, C]` normalized -> `[T, H * D]`: the mixed values, before the output projection."""
        rows = (batch.row_starts, batch.kv_lengths, batch.slots, batch.block_tables)
        queries = self._kernels.rope_and_write(
            self._kernels.linear(hidden, *layer.qkv),
            batch.positions,
            self._cos_sin,
            layer.q_norm,
            layer.k_norm,
            self._spec.norm_eps,
            keys,
            values,
            *rows,
            plan,
            layer.cache_scales,
        )
        return self._kernels.attention(
            queries,
            keys,
            values,
            *rows,
            scale=layer.scale,
            window=layer.window,
            sink=self._spec.sink,
            cache_scales=layer.cache_scales,
            num_context_rows=batch.num_context_rows,
            plan=plan,
        )

    def _feed_forward(self, layer: _Layer, attended: Tensor, residual: Tensor) -> Tensor:
        """`[T, H * D]` -> `[T, C]` normalized for what follows; adds to the residual in place."""
        hidden = self._kernels.linear(attended, *layer.out)
        hidden = self._add_norm(hidden, residual, layer.mlp_norm)
        hidden = self._kernels.linear(hidden, *layer.up)
        if self._spec.activation == "silu":
            hidden = self._kernels.silu_mul(hidden)
        else:
            hidden = self._kernels.gelu(hidden, self._gelu)
        hidden = self._kernels.linear(hidden, *layer.down)
        return self._add_norm(hidden, residual, layer.next_norm)

    def _norm(self, hidden: Tensor, norm: Affine) -> Tensor:
        if self._spec.norm == "rms":
            return self._kernels.rms_norm(hidden, norm.weight, self._spec.norm_eps)
        return self._kernels.layer_norm(hidden, *norm, self._spec.norm_eps)

    def _add_norm(self, hidden: Tensor, residual: Tensor, norm: Affine) -> Tensor:
        if self._spec.norm == "rms":
            return self._kernels.add_rms_norm(hidden, residual, norm.weight, self._spec.norm_eps)
        return self._kernels.add_layer_norm(hidden, residual, *norm, self._spec.norm_eps)


def _affine(weights: Weights, module: str) -> Affine:
    bias = f"{module}.bias"
    return Affine(weights[f"{module}.weight"], weights[bias] if bias in weights else None)


def _resolve_layer(spec: ModelSpec, weights: Weights, index: int) -> _Layer:
    prefix = f"layers.{index}"
    is_last = index == spec.num_layers - 1
    next_norm = "final_norm" if is_last else f"layers.{index + 1}.attention_norm"
    return _Layer(
        qkv=_affine(weights, f"{prefix}.qkv"),
        q_norm=weights[f"{prefix}.q_norm.weight"] if spec.qk_norm else None,
        k_norm=weights[f"{prefix}.k_norm.weight"] if spec.qk_norm else None,
        scale=spec.attention_scales[index],
        window=spec.windows[index],
        cache_scales=(
            weights[f"{prefix}.cache_scales"].view(2, spec.num_kv_heads)
            if spec.kv_cache_dtype is torch.float8_e4m3fn
            else None
        ),
        out=_affine(weights, f"{prefix}.out"),
        mlp_norm=_affine(weights, f"{prefix}.mlp_norm"),
        up=_affine(weights, f"{prefix}.up"),
        down=_affine(weights, f"{prefix}.down"),
        next_norm=_affine(weights, next_norm),
    )
