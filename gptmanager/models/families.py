"""Families of checkpoints, as a table: what their configs and tensors are called, and mean.

`place_tensors` says where each of their tensors goes. Knows nothing of how a config is read, how
the network runs or how tensors are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from gptmanager.memory.weights import Place
from gptmanager.models.spec import ModelSpec, parameter_shapes

Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True)
class Family:
    """The properties that set one `model_type` apart.

    `prefix`: the prefix of tensor names, which a checkpoint may leave out. `tensors`: the
    checkpoint's module -> ours, and the part of it if several are fused. `ignored`: tensors that
    are not used. `spellings`: our name of a config field -> theirs. `defaults`: by our names.
    `*_bias`: always, never, or the field that decides. `windows`: which layers have a sliding
    window. `transposed`: layers store their matrices as [in, out].
    """

    prefix: str
    tensors: Mapping[str, tuple[str, str | None]]
    ignored: re.Pattern[str]
    spellings: Mapping[str, str]
    defaults: Mapping[str, Any]
    activations: Mapping[str, Activation]
    norm: Literal["rms", "layer"] = "rms"
    rotary: bool = True
    qk_norm: bool = False
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    windows: Literal["none", "all", "some"] = "none"
    transposed: bool = False


_LLAMA = Family(
    prefix="model.",
    tensors={
        "model.embed_tokens": ("embedding", None),
        "model.layers.{}.input_layernorm": ("attention_norm", None),
        "model.layers.{}.self_attn.q_proj": ("qkv", "q"),
        "model.layers.{}.self_attn.k_proj": ("qkv", "k"),
        "model.layers.{}.self_attn.v_proj": ("qkv", "v"),
        "model.layers.{}.self_attn.q_norm": ("q_norm", None),
        "model.layers.{}.self_attn.k_norm": ("k_norm", None),
        "model.layers.{}.self_attn.o_proj": ("out", None),
        "model.layers.{}.post_attention_layernorm": ("mlp_norm", None),
        "model.layers.{}.mlp.gate_proj": ("up", "gate"),
        "model.layers.{}.mlp.up_proj": ("up", "up"),
        "model.layers.{}.mlp.down_proj": ("down", None),
        "model.norm": ("final_norm", None),
        "lm_head": ("lm_head", None),
    },
    ignored=re.compile(r"(^|\.)rotary_emb\.inv_freq$"),
    spellings={"norm_eps": "rms_norm_eps"},
    defaults={
        "hidden_act": "silu",
        "norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
    },
    activations={"silu": "silu", "swish": "silu"},
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
)
_MISTRAL_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
_QWEN_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_MISTRAL = replace(
    _LLAMA,
    defaults={**_LLAMA.defaults, **_MISTRAL_DEFAULTS},
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    windows="all",
)
_QWEN2 = replace(
    _MISTRAL,
    defaults={**_LLAMA.defaults, **_QWEN_DEFAULTS},
    qkv_bias=True,
    windows="some",
)
_QWEN3 = replace(
    _QWEN2,
    defaults={**_QWEN2.defaults, "head_dim": 128},
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm=True,
)
_GPT2 = Family(
    prefix="transformer.",
    tensors={
        "transformer.wte": ("embedding", None),
        "transformer.wpe": ("positions", None),
        "transformer.h.{}.ln_1": ("attention_norm", None),
        "transformer.h.{}.attn.c_attn": ("qkv", None),
        "transformer.h.{}.attn.c_proj": ("out", None),
        "transformer.h.{}.ln_2": ("mlp_norm", None),
        "transformer.h.{}.mlp.c_fc": ("up", None),
        "transformer.h.{}.mlp.c_proj": ("down", None),
        "transformer.ln_f": ("final_norm", None),
        "lm_head": ("lm_head", None),
    },
    ignored=re.compile(r"(^|\.)h\.\d+\.attn\.(bias|masked_bias)$"),
    spellings={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
        "hidden_act": "activation_function",
        "norm_eps": "layer_norm_epsilon",
    },
    defaults={
        "hidden_act": "gelu_new",
        "norm_eps": 1e-5,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
    },
    activations={
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
    },
    norm="layer",
    rotary=False,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    transposed=True,
)
FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "gpt2": _GPT2,
}


def place_tensors(spec: ModelSpec) -> dict[str, Place]:
    """Every tensor of a checkpoint of this network -> where it goes in `parameter_shapes`."""
    family = FAMILIES[spec.family]
    shapes = parameter_shapes(spec)
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    width = spec.intermediate_size
    parts: dict[str | None, tuple[int, int | None]] = {
        None: (0, None),
        "q": (0, queries),
        "k": (queries, keys),
        "v": (queries + keys, keys),
        "gate": (0, width),
        "up": (width, width),
    }
    places: dict[str, Place] = {}
    for theirs, (ours, part) in family.tensors.items():
        in_layers = "{}" in theirs
        for layer in range(spec.num_layers if in_layers else 1):
            for kind in ("weight", "bias"):
                parameter = f"layers.{layer}.{ours}.{kind}" if in_layers else f"{ours}.{kind}"
                if parameter in shapes:
                    is_matrix = in_layers and len(shapes[parameter]) == 2
                    places[f"{theirs.format(layer)}.{kind}"] = Place(
                        parameter, *parts[part], transposed=family.transposed and is_matrix
                    )
    if spec.tied_embeddings:
        places["lm_head.weight"] = Place("embedding.weight", twin=True)
    return places | _place_scales(spec, family)


def _place_scales(spec: ModelSpec, family: Family) -> dict[str, Place]:
    """The scales of an 8-bit KV cache, by the names that quantizers give them."""
    modules = [theirs for theirs, (ours, _) in family.tensors.items() if ours == "qkv"]
    attention, heads = modules[0].rpartition(".")[0], spec.num_kv_heads
    names = {
        "kv_scale": (0, 2 * heads),
        **{f"{part}k_scale": (0, heads) for part in ("", "attn.", "k_proj.")},
        **{f"{part}v_scale": (heads, heads) for part in ("", "attn.", "v_proj.")},
    }
    return {
        f"{attention}.{name}".format(layer): Place(
            f"layers.{layer}.cache_scales", *rows, scale=True
        )
        for name, rows in names.items()
        for layer in range(spec.num_layers)
    }
