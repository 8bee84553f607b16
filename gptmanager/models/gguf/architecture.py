"""`Architecture`, an entry of the table in `architectures`, and the names that entries share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from gptmanager.models.gguf.metadata import Metadata

Config = Mapping[str, Any]
Further = Callable[[Metadata, str, Collection[str], Config], Config]
# Field of a config.json -> key in a GGUF file, without the key's prefix (the architecture's name).
SIZES: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
}
ROTARY: Mapping[str, str] = {
    **SIZES,
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
CAPPED: Mapping[str, str] = {
    **ROTARY,
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
LAYER_NORM: Mapping[str, str] = {
    **SIZES,
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
}
MIXTURE: Mapping[str, str] = {
    **ROTARY,
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
WINDOWS: Mapping[str, str] = {
    "sliding_window": "attention.sliding_window",
    "layer_types": "attention.sliding_window_pattern",
}
GRANITE: Mapping[str, str] = {
    **ROTARY,
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
SSM = [
    f"ssm.{key}" for key in "conv_kernel state_size group_count inner_size time_step_rank".split()
]
UNSCALED = {"rope_type": "default"}  # for families that scale RoPE by default
ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
# Values of config fields if a file lacks their keys. A config.json has other defaults.
ROUTED_DEFAULTS: Mapping[str, Any] = {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 0,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "first_k_dense_replace": 0,
}
ROUTED: Mapping[str, str] = {
    **{key: MIXTURE[key] for key in MIXTURE if key != "num_experts"},
    "n_routed_experts": "expert_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count",
}
# Module in a file -> module in a checkpoint, without the prefixes blk.{} and model.layers.{}.
LLAMA: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH: Mapping[str, str] = {
    **LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED: Mapping[str, str] = {
    **{key: LLAMA[key] for key in ("attn_norm", "attn_output", "ffn_norm", "ffn_down")},
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}
NORMS_AFTER: Mapping[str, str] = {
    **{key: LLAMA[key] for key in LLAMA if key not in ("attn_norm", "ffn_norm")},
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")
EXPERTS: Mapping[str, str] = {
    f"{module}_exps": LLAMA[module].replace("mlp.", "mlp.experts.{}.") for module in FEED_FORWARD
}
SHARED: Mapping[str, str] = {
    f"{module}_shexp": LLAMA[module].replace("mlp.", "mlp.shared_experts.")
    for module in FEED_FORWARD
}
CORRECTED: Mapping[str, str] = {
    **LLAMA,
    **SHARED,
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}


@dataclass(frozen=True)
class Architecture:
    """Maps one `general.architecture` to the `model_type` and the names of a checkpoint.

    `fields`: config field -> key in the file. `constants`: values of config fields for which the
    file has no key. `further`: returns more fields, from the metadata, the prefix of its keys, the
    names of tensors and the config so far.

    `layer`: the prefix of a layer's modules in a Hugging Face checkpoint. `modules`: name in a file
    -> name in a checkpoint, for modules in a layer. A name with the ending "weight" or "bias" is
    the name of a single tensor, and so is the name of a tensor that a file has without an ending.
    `outside`: the same for modules outside the layers. `stacked`: the same for modules with the
    matrices of all experts of a layer, or of all heads. In their names in a checkpoint, {} is the
    number of the expert or head. `single_rows`: matrices of one row, which may be stored as
    vectors. `numbers`: key of an array with a number for each layer -> name of the tensor of that
    number in a checkpoint. `permuted`: the file stores the two rows of a RoPE pair next to each
    other, in queries and keys. `plus_one`: the file stores norm weights with 1 added. `transposed`:
    a checkpoint stores a layer's matrices as [in, out]. `tiles_values`: the file has the value
    heads of linear attention in its own order; see `ValueHeads`.

    `ignored`: keys that change nothing, or that `further` reads. `required`: key -> the only value
    that a file may have for the key. `biases`: config field -> tensor; the field is true if the
    file has the tensor. `scaled_by_size`: a number of layers. Models with this number of layers
    scale attention scores by (hidden size / heads) ** -0.5, not by head size ** -0.5.
    """

    model_type: str
    fields: Mapping[str, str] = field(default_factory=lambda: ROTARY)
    constants: Mapping[str, Any] = field(default_factory=dict)
    further: Further = lambda *_: {}
    layer: str = "model.layers.{}."
    modules: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    outside: Mapping[str, str] = field(
        default_factory=lambda: {
            "token_embd": "model.embed_tokens",
            "output_norm": "model.norm",
            "output": "lm_head",
        }
    )
    permuted: bool = False
    plus_one: bool = False
    transposed: bool = False
    tiles_values: bool = False
    stacked: Mapping[str, str] = field(default_factory=dict)
    single_rows: frozenset[str] = frozenset()
    numbers: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    required: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    scaled_by_size: int | None = None
