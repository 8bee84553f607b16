"""The names of tensors in each family of checkpoints.

The keys of a table are the names of modules in a checkpoint, with {} for the layer's and the
expert's number. A value is our name of a parameter, and the part of this parameter that the module
fills. "up|shared_up" means the one of these two parameters that the layer has.
"""

from __future__ import annotations

from collections.abc import Mapping

Tensors = Mapping[str, tuple[str, str | None]]

# Our name for a module of a layer -> the parameter, and the part of it that the module fills.
_MODULES: Mapping[str, tuple[str, str | None]] = {
    "attention_norm": ("attention_norm", None),
    "q": ("qkv", "q"),
    "k": ("qkv", "k"),
    "v": ("qkv", "v"),
    "qkv": ("qkv", None),
    "qkv_in_order": ("qkv", "in_order"),
    "qkv_by_head": ("qkv", "by_head"),
    "q_norm": ("q_norm", None),
    "k_norm": ("k_norm", None),
    "q_norms": ("q_norm", "each_head"),
    "k_norms": ("k_norm", "each_head"),
    "query_latent": ("query_latent", None),
    "query_latent_norm": ("query_latent_norm", None),
    "query": ("query", "query"),
    "direct_query": ("query", "direct_query"),
    "kv_latent": ("kv_latent", "kv_latent"),
    "kv_latent_norm": ("kv_latent_norm", None),
    "latent_up": ("latent_up", "keys_and_values"),
    "latent_keys": ("latent_up", "keys_by_head"),
    "latent_values": ("latent_up", "values_by_head"),
    "stacked_keys": ("latent_up", "stacked_keys"),
    "stacked_values": ("latent_up", "stacked_values"),
    "sinks": ("sinks", None),
    "gated_q": ("qkv", "gated_q"),
    "query_gates": ("qkv", "query_gates"),
    "delta_qkv": ("delta_in", "inputs"),
    "delta_z": ("delta_in", "gate"),
    "delta_qkvz": ("delta_in", "by_key"),
    "delta_b": ("delta_gates", "rates"),
    "delta_a": ("delta_gates", "steps"),
    "delta_ba": ("delta_gates", "by_key"),
    "delta_conv": ("delta_conv", "channels"),
    "delta_decay": ("delta_decay", None),
    "delta_step": ("delta_step", None),
    "delta_norm": ("delta_norm", None),
    "delta_out": ("delta_out", None),
    "short_in": ("short_in", None),
    "short_conv": ("short_conv", "channels"),
    "short_out": ("short_out", None),
    "space_in": ("space_in", None),
    "space_conv": ("space_conv", "channels"),
    "space_decay": ("space_decay", None),
    "space_step": ("space_step", None),
    "space_skip": ("space_skip", None),
    "space_norm": ("space_norm", None),
    "space_out": ("space_out", None),
    "out": ("out", None),
    "attention_out_norm": ("attention_out_norm", None),
    "mlp_norm": ("mlp_norm", None),
    "gate": ("up", "gate"),
    "up": ("up", "up"),
    "gate_up": ("up", "gate_up"),
    "dense_gate": ("up|shared_up", "gate"),
    "dense_up": ("up|shared_up", "up"),
    "dense_gate_up": ("up|shared_up", "gate_up"),
    "dense_down": ("down|shared_down", None),
    "fc": ("up", None),
    "down": ("down", None),
    "xielu_positive": ("xielu", "positive"),
    "xielu_negative": ("xielu", "negative"),
    "mlp_out_norm": ("mlp_out_norm", None),
    "scale": ("scale", None),
    "token_gate": ("token_gate", None),
    "token_out": ("token_out", None),
    "token_out_norm": ("token_out_norm", None),
    "router": ("router", None),
    "router_norm": ("router_norm", None),
    "expert_factors": ("expert_factors", None),
    "experts_norm": ("experts_norm", None),
    "experts_out_norm": ("experts_out_norm", None),
    "shared_out_norm": ("shared_out_norm", None),
    "correction": ("correction", None),
    "correction_row": ("correction", "row"),
    "experts_in": ("experts_in", None),
    "experts_out": ("experts_out", None),
    "expert_gate": ("experts_up", "gate"),
    "expert_up": ("experts_up", "up"),
    "expert_fc": ("experts_up", None),
    "expert_down": ("experts_down", None),
    "stacked_up": ("experts_up", "stacked"),
    "stacked_down": ("experts_down", "stacked"),
    "switched_gate": ("experts_up", "stacked_gate"),
    "switched_up": ("experts_up", "stacked_up"),
    "switched_down": ("experts_down", "stacked"),
    "transposed_up": ("experts_up", "stacked_transposed"),
    "transposed_down": ("experts_down", "stacked_transposed"),
    "mixed_up": ("experts_up", "mixed"),
    "mixed_down": ("experts_down", "mixed"),
    "shared_gate_proj": ("shared_up", "gate"),
    "shared_up": ("shared_up", "up"),
    "shared_gate_up": ("shared_up", "gate_up"),
    "shared_fc": ("shared_up", None),
    "shared_down": ("shared_down", None),
    "shared_gate": ("shared_gate", None),
}
_LLAMA = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def tensor_names(
    layer: str,
    *,
    embedding: str,
    final_norm: str,
    head: str = "lm_head",
    positions: str | None = None,
    **modules: str | None,
) -> Tensors:
    """Return a family's table. `modules`: our name for a layer's module -> the family's name."""
    found: dict[str, tuple[str, str | None]] = {embedding: ("embedding", None)}
    found[final_norm] = ("final_norm", None)
    if positions is not None:
        found[positions] = ("positions", None)
    return {**found, **layer_names(layer, **modules), head: ("lm_head", None)}


def layer_names(layer: str = "model.layers.{}.", **modules: str | None) -> Tensors:
    """Return the part of a table for the modules of a layer. None marks a missing module."""
    given = {layer + theirs: word for word, theirs in modules.items() if theirs is not None}
    return {theirs: _MODULES[word] for theirs, word in given.items()}


def switched(module: str) -> dict[str, str]:
    """Return the names of stacked experts as MLX writes them."""
    return {f"switched_{it}": f"{module}.{it}_proj.weight" for it in ("gate", "up", "down")}


def llama_names(**changes: str | None) -> Tensors:
    """Return the names of Llama's tensors with `changes`, in which None removes a module."""
    other = {key: changes.pop(key) for key in ("final_norm", "head") if key in changes}
    names = {"final_norm": "model.norm", "head": "lm_head", **other}
    modules = {**_LLAMA, **changes}
    return tensor_names(
        "model.layers.{}.",
        embedding="model.embed_tokens",
        final_norm=str(names["final_norm"]),
        head=str(names["head"]),
        **modules,
    )


LLAMA = llama_names()
# norms before and after attention and MLP (Gemma 2 to 4)
SANDWICH = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
# norms only after attention and MLP (OLMo 2, EXAONE 4)
NORMS_AFTER = {
    "attention_norm": None,
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": None,
    "mlp_out_norm": "post_feedforward_layernorm",
}
GPT2 = tensor_names(
    "transformer.h.{}.",
    embedding="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    attention_norm="ln_1",
    qkv="attn.c_attn",
    out="attn.c_proj",
    mlp_norm="ln_2",
    fc="mlp.c_fc",
    down="mlp.c_proj",
)
GPT_NEOX = tensor_names(
    "gpt_neox.layers.{}.",
    embedding="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    attention_norm="input_layernorm",
    qkv_by_head="attention.query_key_value",
    out="attention.dense",
    mlp_norm="post_attention_layernorm",
    fc="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
OPT = tensor_names(
    "model.decoder.layers.{}.",
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    final_norm="model.decoder.final_layer_norm",
    attention_norm="self_attn_layer_norm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    out="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    fc="fc1",
    down="fc2",
)


# Modules of mixtures of experts that several families have, for `layer_names`.
DENSE = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
BY_EXPERT = {
    "expert_gate": "mlp.experts.{}.gate_proj",
    "expert_up": "mlp.experts.{}.up_proj",
    "expert_down": "mlp.experts.{}.down_proj",
}
EXPERTS = {**DENSE, "router": "mlp.gate", **BY_EXPERT}
ONLY_EXPERTS = {**EXPERTS, **dict.fromkeys(DENSE)}  # in every layer
SWITCHED = switched("mlp.switch_mlp")
STACKED = {"stacked_up": "mlp.experts.gate_up_proj", "stacked_down": "mlp.experts.down_proj"}
# all experts in one tensor: as MLX writes them, and as models of transformers 5 have them
IN_ONE = {**SWITCHED, **STACKED}
SHARED_HALVES = {
    "shared_gate_proj": "mlp.shared_experts.gate_proj",
    "shared_up": "mlp.shared_experts.up_proj",
}
SHARED = {**SHARED_HALVES, "shared_down": "mlp.shared_experts.down_proj"}
SHARED_EXPERT = {
    "shared_gate_proj": "mlp.shared_expert.gate_proj",
    "shared_up": "mlp.shared_expert.up_proj",
    "shared_down": "mlp.shared_expert.down_proj",
    "shared_gate": "mlp.shared_expert_gate",
}
SWITCHED_EXPERTS = switched("mlp.experts")
# Mixtral and MiniMax-M2
BLOCK = {
    "gate": None,
    "up": None,
    "down": None,
    "router": "block_sparse_moe.gate",
    "expert_gate": "block_sparse_moe.experts.{}.w1",
    "expert_up": "block_sparse_moe.experts.{}.w3",
    "expert_down": "block_sparse_moe.experts.{}.w2",
}
SWITCHED_BLOCK = switched("block_sparse_moe.switch_mlp")
BLOCK_IN_ONE = {**SWITCHED_BLOCK, **STACKED, "router": "mlp.gate"}
