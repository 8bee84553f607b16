"""`ModelSpec`: which network a checkpoint holds, and the parameters that it has.

Knows nothing of families, config files and tensor names in checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from gptmanager.kernels.attention.attention_arguments import AttentionShape
from gptmanager.models.rope import Rope


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder's shape and mathematics; of one that ranks share, what one of them has of it.

    Its layers are `num_layers` from `first_layer` on. `vocab_size` is that of the whole network.
    `rope` None: learned positions. `activation` "silu" is gated (gate * up), the GELUs are not.
    `windows[i]`: how many positions, its own included, a token sees in layer i; None: all.
    `attention_scales[i]` multiplies the scores of layer i. Both are those of the whole network.
    `kv_cache_dtype` float8_e4m3fn: pages hold keys and values divided by the scales of their layer
    and head; None: as they are.
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
    sink: int = 0  # the number of first positions that are always seen
    kv_cache_dtype: torch.dtype | None = None
    first_layer: int = 0

    def attention_shape(self, layer: int) -> AttentionShape:
        """Return the shape of a layer's attention."""
        return AttentionShape(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            scale=self.attention_scales[layer],
            window=self.windows[layer],
            sink=self.sink,
            fp8=self.kv_cache_dtype is torch.float8_e4m3fn,
        )

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


def product_matrices(spec: ModelSpec) -> list[str]:
    """The parameters that are weights of `Kernels.linear`."""
    looked_up = {"positions.weight"} | (set() if spec.tied_embeddings else {"embedding.weight"})
    shapes = parameter_shapes(spec)
    return [name for name, shape in shapes.items() if len(shape) == 2 and name not in looked_up]
