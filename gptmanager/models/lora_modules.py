"""The modules that LoRA adapters may change, by their ids: which columns of our matrices they are.

This module does not know adapters, nor the names of modules in checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator

from gptmanager.models.families.places import row_orders
from gptmanager.models.parameters import matrix_names
from gptmanager.models.spec import ModelSpec
from gptmanager.models.splits import SPLITS, Shares, evenly, layer_shares, rank_spec
from gptmanager.ranks.layout import RankLayout
from gptmanager.request.adapter import (
    LORA_MODULE_IDS,
    AdapterShare,
    LoraCut,
    LoraModule,
    LoraVariant,
)


def lora_modules(spec: ModelSpec) -> dict[int, LoraModule]:
    """Module id -> what it is in the layers of this network, in ascending order of ids.

    `matrix`: as `matrix_names` calls it. attn_qkv is all of qkv, which attn_q, attn_k and attn_v
    are parts of. Where the activation is gated, mlp_h_to_4h is the half that it is applied to, and
    mlp_gate the half that this is multiplied with; else mlp_h_to_4h is all of up, and there is no
    mlp_gate. In a layer with experts these are the parts of the MLP that all tokens share.
    """
    layers: dict[int, dict[LoraVariant, list[int]]] = {}
    for index in range(len(spec.layers)):
        for name, module in _in_layer(spec, index):
            same = layers.setdefault(LORA_MODULE_IDS[name], {})
            same.setdefault(module, []).append(index)
    return {it: _joined(layers[it], len(spec.layers)) for it in sorted(layers)}


def adapter_share(spec: ModelSpec, layout: RankLayout) -> AdapterShare:
    """Return a rank's part of adapters: its part of each matrix that an adapter adds to."""
    shares = layer_shares(spec, layout)
    cuts = {
        (layer, module_id): _cut(own, shares[layer])
        for module_id, module in lora_modules(spec).items()
        for layer in range(len(spec.layers))
        if (own := module.of(layer)) is not None
    }
    own = lora_modules(rank_spec(spec, layout))
    stages = layout.pipeline_parallel_size
    first_layers = tuple(evenly(spec.num_layers, stages, it).start for it in range(1, stages))
    return AdapterShare(own, cuts, shares[0].layers, spec.num_layers, first_layers)


def _in_layer(spec: ModelSpec, index: int) -> Iterator[tuple[str, LoraVariant]]:
    """Yield the modules of a layer; their `layers` are empty."""
    hidden, own, mlp = spec.hidden_size, spec.layers[index].attention, spec.layers[index].mlp
    names, orders = matrix_names(spec, index), row_orders(spec, index)

    def module(
        name: str, matrix: str, first: int, count: int, width: int
    ) -> tuple[str, LoraVariant]:
        return name, LoraVariant(names[matrix], first, count, width, orders.get(name, ()), ())

    queries, keys = own.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
    yield module("attn_qkv", "qkv", 0, queries + 2 * keys, hidden)
    yield module("attn_q", "qkv", 0, queries, hidden)
    yield module("attn_k", "qkv", queries, keys, hidden)
    yield module("attn_v", "qkv", queries + keys, keys, hidden)
    yield module("attn_dense", "out", 0, hidden, queries)
    width, up, down = mlp.width, "up", "down"
    if mlp.experts is not None:
        width, up, down = mlp.experts.shared_width, "shared_up", "shared_down"
    if not width:
        return
    yield module("mlp_h_to_4h", up, 0, width, hidden)
    yield module("mlp_4h_to_h", down, 0, hidden, width)
    if mlp.gated:
        yield module("mlp_gate", up, width, width, hidden)


def _joined(found: dict[LoraVariant, list[int]], num_layers: int) -> LoraModule:
    """Return one module of those that layers have, and of the layers of each."""
    if len(found) == 1 and len(next(iter(found.values()))) == num_layers:
        return LoraModule(*next(iter(found)))
    first, *others = (it._replace(layers=tuple(layers)) for it, layers in found.items())
    return LoraModule(*first, tuple(others))


def _cut(module: LoraVariant, shares: Shares) -> LoraCut:
    split, first = SPLITS[module.matrix.partition("/")[0]], module.first_column
    if split.columns:  # of its input: what all ranks add is the whole
        return LoraCut(shares.columns(split), (range(module.num_columns),))
    kept = (
        range(max(rows.start - first, 0), min(rows.stop - first, module.num_columns))
        for rows in shares.rows(split)
    )
    return LoraCut(range(module.input_width), tuple(filter(None, kept)))
