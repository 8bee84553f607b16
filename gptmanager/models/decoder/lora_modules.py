"""The modules that LoRA adapters may change, as output columns of the network's matmuls.

This module does not know adapters or the names of modules in checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator

from gptmanager.models.families.places import row_orders
from gptmanager.models.parameters import matrix_names
from gptmanager.models.spec import ModelSpec
from gptmanager.models.splits import SPLITS, Shares, evenly, layer_shares, rank_spec
from gptmanager.ranks.layout import RankLayout
from gptmanager.request.adapter_modules import (
    LORA_MODULE_IDS,
    AdapterShare,
    LoraCut,
    LoraModule,
    LoraVariant,
)


def lora_modules(spec: ModelSpec) -> dict[int, LoraModule]:
    """Return module id -> the module's matrix and columns in each layer, sorted by module id.

    `matrix` is a name that `matrix_names` returns. attn_qkv is the whole matrix qkv; attn_q, attn_k
    and attn_v are parts of this matrix. With gated attention, attn_q includes the gates, unless
    the checkpoint has a matrix of its own for them, which adapters do not change. With a gated
    activation, mlp_h_to_4h is the half of the matrix up that computes the activation's input,
    and mlp_gate is the other half. Otherwise mlp_h_to_4h is the whole matrix up, and mlp_gate does
    not exist. In a layer with experts, the mlp modules are parts of the shared MLP. In a layer with
    linear attention, linear_attn_z has the gates of the output. If the checkpoint joins these gates
    with queries, keys and values, attn_qkv includes the gates, and linear_attn_z does not exist. In
    a layer with a short convolution, attn_qkv is the projection of the layer's input.
    """
    layers: dict[int, dict[LoraVariant, list[int]]] = {}
    for index in range(len(spec.layers)):
        for name, module in _in_layer(spec, index):
            same = layers.setdefault(LORA_MODULE_IDS[name], {})
            same.setdefault(module, []).append(index)
    return {it: _joined(layers[it], len(spec.layers)) for it in sorted(layers)}


def adapter_share(spec: ModelSpec, layout: RankLayout) -> AdapterShare:
    """Return which part of each adapter a rank keeps: the part for the rank's share of matrices."""
    shares = layer_shares(spec, layout)
    cuts = {
        (layer, module_id): _cut(own, shares[layer])
        for module_id, module in lora_modules(spec).items()
        for layer in range(len(spec.layers))
        if (own := module.of(layer)) is not None
    }
    modules = lora_modules(rank_spec(spec, layout))
    stages = layout.pipeline_parallel_size
    first_layers = tuple(evenly(spec.num_layers, stages, it).start for it in range(1, stages))
    return AdapterShare(modules, cuts, shares[0].layers, spec.num_layers, first_layers)


def _in_layer(spec: ModelSpec, index: int) -> Iterator[tuple[str, LoraVariant]]:
    """Yield the names and variants of a layer's modules; `layers` of each variant is empty."""
    hidden, own, mlp = spec.hidden_size, spec.layers[index].attention, spec.layers[index].mlp
    names, orders = matrix_names(spec, index), row_orders(spec, index)

    def module(
        name: str, matrix: str, first: int, count: int, width: int
    ) -> tuple[str, LoraVariant]:
        return name, LoraVariant(names[matrix], first, count, width, orders.get(name, ()), ())

    if own.recurrent is not None:
        for name, matrix, rows in own.recurrent.modules(is_joined=bool(orders)):
            yield module(name, matrix, rows.start, len(rows), hidden)
    elif own.attends and own.latent is None:
        keys = own.own_kv_heads * own.head_dim
        queries = own.gate_width + own.num_heads * own.head_dim
        first = own.gate_width if own.gated and "attn_q" not in orders else 0
        yield module("attn_qkv", "qkv", first, own.projected_heads * own.head_dim - first, hidden)
        yield module("attn_q", "qkv", first, queries - first, hidden)
        if keys:
            yield module("attn_k", "qkv", queries, keys, hidden)
        if keys and not own.keys_as_values:
            yield module("attn_v", "qkv", queries + keys, keys, hidden)
    if not own.absent:
        yield module("attn_dense", own.out_name, 0, hidden, own.out_width)
    if mlp is None:
        return
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
    """Join the variants of a module in different layers to one `LoraModule`."""
    if len(found) == 1 and len(next(iter(found.values()))) == num_layers:
        return LoraModule(*next(iter(found)))
    first, *others = (it._replace(layers=tuple(layers)) for it, layers in found.items())
    return LoraModule(*first, tuple(others))


def _cut(module: LoraVariant, shares: Shares) -> LoraCut:
    split, first = SPLITS[module.matrix.partition("/")[0]], module.first_column
    if split.columns:  # split by input: the ranks' outputs are summed
        return LoraCut(shares.columns(split), (range(module.num_columns),))
    kept = (
        range(max(rows.start - first, 0), min(rows.stop - first, module.num_columns))
        for rows in shares.rows(split)
    )
    return LoraCut(range(module.input_width), tuple(filter(None, kept)))
