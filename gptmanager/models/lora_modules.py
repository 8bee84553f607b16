"""The modules that LoRA adapters may change, by their ids: which columns of our matrices they are.

This module does not know adapters, nor the names of modules in checkpoints.
"""

from __future__ import annotations

from gptmanager.models.spec import ModelSpec
from gptmanager.models.splits import SPLITS, Shares, evenly, layer_shares, rank_spec
from gptmanager.ranks.layout import RankLayout
from gptmanager.request.adapter import LORA_MODULE_IDS, AdapterShare, LoraCut, LoraModule


def lora_modules(spec: ModelSpec) -> dict[int, LoraModule]:
    """Module id -> what it is in each layer of this network, in ascending order of ids.

    `matrix`: qkv, out, up or down, as `parameter_shapes` names them. attn_qkv is all of qkv, which
    attn_q, attn_k and attn_v are parts of. Where the activation is gated, mlp_h_to_4h is the half
    that it is applied to, and mlp_gate the half that this is multiplied with; else mlp_h_to_4h is
    all of up, and there is no mlp_gate.
    """
    hidden, own, mlp = spec.hidden_size, spec.layers[0].attention, spec.layers[0].mlp
    queries, keys = own.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
    width = mlp.width
    modules = {
        "attn_qkv": LoraModule("qkv", 0, queries + 2 * keys, hidden),
        "attn_q": LoraModule("qkv", 0, queries, hidden),
        "attn_k": LoraModule("qkv", queries, keys, hidden),
        "attn_v": LoraModule("qkv", queries + keys, keys, hidden),
        "attn_dense": LoraModule("out", 0, hidden, queries),
    }
    if not any(layer.mlp.experts for layer in spec.layers):
        modules["mlp_h_to_4h"] = LoraModule("up", 0, width, hidden)
        modules["mlp_4h_to_h"] = LoraModule("down", 0, hidden, width)
        if mlp.gated:
            modules["mlp_gate"] = LoraModule("up", width, width, hidden)
    if any(layer.attention.rope and layer.attention.rope.interleaved for layer in spec.layers):
        # rows of these matrices are reordered at load, and those of an adapter are not
        for name in ("attn_qkv", "attn_q", "attn_k"):
            del modules[name]
    return {LORA_MODULE_IDS[name]: module for name, module in modules.items()}


def adapter_share(spec: ModelSpec, layout: RankLayout) -> AdapterShare:
    """Return a rank's part of adapters: its part of each matrix that an adapter adds to."""
    shares = layer_shares(spec, layout)[0]
    cuts = {module_id: _cut(module, shares) for module_id, module in lora_modules(spec).items()}
    own = lora_modules(rank_spec(spec, layout))
    stages = layout.pipeline_parallel_size
    first_layers = tuple(evenly(spec.num_layers, stages, it).start for it in range(1, stages))
    return AdapterShare(own, cuts, shares.layers, spec.num_layers, first_layers)


def _cut(module: LoraModule, shares: Shares) -> LoraCut:
    split, first = SPLITS[module.matrix], module.first_column
    if split.columns:  # of its input: what all ranks add is the whole
        return LoraCut(shares.columns(split), (range(module.num_columns),))
    kept = (
        range(max(rows.start - first, 0), min(rows.stop - first, module.num_columns))
        for rows in shares.rows(split)
    )
    return LoraCut(range(module.input_width), tuple(filter(None, kept)))
