"""`place_tensors`: finds the place of each tensor of a checkpoint in the network's parameters."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product

from gptmanager.memory.places import Place, Run
from gptmanager.models.attention_rows import (
    LATENT_UP,
    delta_runs,
    fused_by_head,
    gated_runs,
    latent_up,
    numbered,
)
from gptmanager.models.families.family import Family
from gptmanager.models.families.names import Tensors
from gptmanager.models.families.table import FAMILIES
from gptmanager.models.parameters import Shape, parameter_shapes
from gptmanager.models.recurrent.delta_rule import DeltaRule
from gptmanager.models.rope_scaling import Rope
from gptmanager.models.spec import Attention, Latent, Layer, ModelSpec

Order = tuple[tuple[int, int, int], ...]

_ROTATED = ("q", "k")
_HALVES = ("stacked_gate", "stacked_up")  # halves of the rows of each expert
# [expert, out, in] and [expert, in, out]; the table has the complete names of these tensors
_STACKED = ("stacked", *_HALVES, "stacked_transposed")
_NUMBER = re.compile(r"\.\d+(?=\.)")


def place_tensors(spec: ModelSpec, given: Collection[str] = ()) -> dict[str, Place]:
    """Return tensor name -> its place in the parameters (see `parameter_shapes`).

    The result has all tensors that a checkpoint of this network may have. `given`: the names in the
    checkpoint, which select between `Family.tensors` and `other_tensors`.
    """
    family = FAMILIES[spec.family]
    shapes = parameter_shapes(spec)
    places: dict[str, Place] = {}
    for theirs, (ours, part) in _tensors(family, given).items():
        if "{}" not in theirs:
            for kind in (".weight", ".bias"):
                if ours + kind in shapes:
                    places[theirs + kind] = Place(ours + kind)
            continue
        for index, layer in enumerate(spec.layers):
            for own, kind in product(ours.split("|"), (".weight", ".bias", "")):
                parameter = f"layers.{index}.{own}{kind}"
                if parameter in shapes:
                    own_shape = shapes[parameter]
                    found = _in_layer(spec, layer, theirs, part, parameter, own_shape)
                    for name, place in found:
                        places[_tensor_name(name, index, kind, part)] = place
    if spec.tied_embeddings:
        for theirs, (ours, _) in {**family.tensors, **family.other_tensors}.items():
            if ours == "lm_head":
                places[f"{theirs}.weight"] = Place("embedding.weight", twin=True)
    return places | _place_scales(spec, family)


def _tensors(family: Family, given: Collection[str]) -> Tensors:
    others = family.other_tensors
    used = (name for name in given if others and not family.ignored.search(name))
    # Names are compared without the prefix before "layers.", which differs in a wrapper of the
    # model. `modules` has each name with and without its last part. The table has the complete
    # names of stacked tensors, some of which differ only by `.weight`.
    names = {_NUMBER.sub(".{}", name[max(0, name.find("layers.")) :]) for name in used}
    modules = names | {name.rpartition(".")[0] for name in names}
    # A family may have several other names, for example of stacked and of single experts.
    kinds = {
        theirs: (ours, theirs.count("{}"), _parent(theirs), theirs.endswith(".weight"))
        for theirs, (ours, _) in others.items()
    }
    used_kinds = set()
    for theirs, (_, part) in others.items():
        own = theirs[max(0, theirs.find("layers.")) :]
        bias = own.removesuffix(".weight") + ".bias"
        if {own, bias} & names if part in _STACKED else own in modules:
            used_kinds.add(kinds[theirs])
    replaced = {ours for ours, *_ in used_kinds}
    kept = {n: it for n, it in family.tensors.items() if it[0] not in replaced}
    return {**kept, **{n: it for n, it in others.items() if kinds[n] in used_kinds}}


def _parent(name: str) -> str:
    """Return the name of the module that has the module `name`."""
    return name.removesuffix(".weight").removesuffix(".{}").rpartition(".")[0]


def row_orders(spec: ModelSpec, index: int) -> dict[str, Order]:
    """Return LoRA module -> the order in which loading stores its rows, for layer `index`.

    An order lists ranges (start, stop, step) of rows in the checkpoint; loading stores them one
    after another. Modules that keep the order of the checkpoint are left out.
    """
    own, family = spec.layers[index].attention, FAMILIES[spec.family]
    parts = {part for ours, part in family.tensors.values() if ours == "qkv"}
    if "by_head" in parts:
        return {"attn_qkv": _order(fused_by_head(own))}
    rope, keys = _interleaved_rope(spec), own.own_kv_heads * own.head_dim
    if isinstance(own.recurrent, DeltaRule):
        is_joined = ("delta_in", "by_key") in family.tensors.values()
        runs = {
            "attn_qkv": delta_runs(own.recurrent.shape, True),
            "linear_attn_ba": delta_runs(own.recurrent.shape, False),
        }
        return {name: _order(it) for name, it in runs.items()} if is_joined else {}
    if own.gated and "gated_q" in parts:
        order, start = _order(gated_runs(own)), 2 * own.num_heads * own.head_dim
        return {"attn_q": order, "attn_qkv": (*order, (start, start + 2 * keys, 1))}
    if rope is None or "q" not in parts:
        return {}
    queries = own.num_heads * own.head_dim
    orders = [
        _order(_head_runs(own, rope, 0, heads)) for heads in (own.num_heads, own.own_kv_heads)
    ]
    moved = tuple((start + queries, stop + queries, step) for start, stop, step in orders[1])
    values = (queries + keys, queries + 2 * keys, 1)
    whole = (*orders[0], *moved, values)
    return {"attn_qkv": whole, "attn_q": orders[0], "attn_k": orders[1]}


def _order(runs: Sequence[Run]) -> Order:
    return tuple(
        (source.start, source.stop, source.step)
        for source, *_ in sorted(runs, key=lambda run: run.row)
    )


def _tensor_name(name: str, layer: int, kind: str, part: str | None) -> str:
    """Return the name of a tensor of a module in a layer. `kind`: ".weight", ".bias" or ""."""
    if part in _STACKED:
        name, kind = (name.removesuffix(".weight"), kind) if kind == ".bias" else (name, "")
    elif part == "mixed":  # gpt-oss
        kind = {".weight": "", ".bias": "_bias"}.get(kind, kind)
    return name.replace("{}", str(layer), 1) + kind


def _in_layer(
    spec: ModelSpec,
    layer: Layer,
    theirs: str,
    part: str | None,
    parameter: str,
    shape: Shape,
) -> Iterator[tuple[str, Place]]:
    """Yield (tensor name with {} for the layer, place) for the tensors of a layer's module."""
    num_rows, experts, family = shape[0], layer.experts, FAMILIES[spec.family]
    is_matrix = len(shape) == 2 and "norm" not in parameter
    transposed = family.transposed and is_matrix
    if experts is not None and parameter.split(".")[2] in ("experts_up", "experts_down"):
        yield from _experts(layer, theirs, part, parameter, shape)
    elif part in ("query", "direct_query", "kv_latent"):
        if (latent := layer.attention.latent) is not None:
            is_direct = latent.query_rank == 0
            if part == "kv_latent" or is_direct == (part == "direct_query"):
                runs = _latent_runs(spec, layer.attention, latent, part == "kv_latent")
                yield theirs, Place(parameter, runs=runs)
    elif part == "in_order":
        yield theirs, Place(parameter, runs=_fused_in_order(spec, layer.attention))
    elif part in LATENT_UP:
        yield from latent_up(layer.attention, theirs, part, parameter)
    elif part == "by_head":
        yield theirs, Place(parameter, runs=fused_by_head(layer.attention), transposed=transposed)
    elif ours := _recurrent_place(layer.attention, part, parameter, is_matrix):
        yield theirs, ours
    elif part == "gated_q":
        yield theirs, Place(parameter, runs=gated_runs(layer.attention))
    elif part == "query_gates":
        yield theirs, Place(parameter, 0, layer.attention.gate_width)
    elif part in ("q", "k", "v"):
        own = layer.attention
        heads, kv_heads = own.num_heads, own.own_kv_heads
        if part != "q" and (not kv_heads or part == "v" and own.keys_as_values):
            return
        gates = heads if own.gated else 0
        first = gates + {"q": 0, "k": heads, "v": heads + kv_heads}[part]
        count = heads if part == "q" else kv_heads
        rope = _interleaved_rope(spec) if part in _ROTATED else None
        yield theirs, _heads(parameter, own, first, count, rope, transposed)
    elif part == "each_head":
        for head in range(num_rows // (dim := layer.attention.head_dim)):
            yield numbered(theirs, head), Place(parameter, head * dim, dim)
    elif parameter.endswith(("q_norm.weight", "k_norm.weight")):
        count = num_rows // layer.attention.head_dim
        place = _heads(parameter, layer.attention, 0, count, _interleaved_rope(spec), False)
        # if each head has a norm of its own, the checkpoint has a matrix with a row for each head
        is_stacked = spec.norms.query_key == "own_head"
        yield theirs, replace(place, stacked=count) if is_stacked else place
    elif part == "row":  # a matrix of one row
        yield theirs, Place(parameter, stacked=1)
    elif part in ("gate", "up", "positive", "negative"):
        first = 0 if part in ("gate", "positive") else num_rows // 2
        yield theirs, Place(parameter, first, num_rows // 2, transposed=transposed)
    else:
        yield theirs, Place(parameter, transposed=transposed)


def _interleaved_rope(spec: ModelSpec) -> Rope | None:
    """Return the first interleaved `Rope` of the network, or None if it has none.

    Interleaved means that a checkpoint stores the two rows of a RoPE pair next to each other.
    Loading reorders the rows of all layers. In layers without RoPE, the order of queries and of
    keys changes in the same way, so the scores do not change.
    """
    return next((rope for rope in spec.ropes if rope is not None and rope.interleaved), None)


def _heads(
    parameter: str, own: Attention, first: int, count: int, rope: Rope | None, transposed: bool
) -> Place:
    """Return the place of `count` heads, which become the heads of the parameter from `first` on.

    If `rope` (see `_interleaved_rope`) is not None, `_head_runs` reorders the rows of each head.
    """
    if rope is None:
        dim = own.head_dim
        return Place(parameter, first * dim, count * dim, transposed=transposed)
    return Place(parameter, runs=_head_runs(own, rope, first, count), transposed=transposed)


def _head_runs(own: Attention, rope: Rope, first: int, count: int) -> tuple[Run, ...]:
    """Return the runs that reorder the rows of `count` heads with interleaved RoPE pairs.

    A head gets the first rows of all pairs, then the second rows, then the rows that RoPE does not
    rotate.
    """
    dim, half, runs = own.head_dim, rope.dim // 2, []
    for head in range(count):
        source, row = head * dim, (first + head) * dim
        end = source + rope.dim
        runs += [Run(range(source, end, 2), row), Run(range(source + 1, end, 2), row + half)]
        if rope.dim < dim:
            runs.append(Run(range(end, source + dim), row + rope.dim))
    return tuple(runs)


def _latent_runs(spec: ModelSpec, own: Attention, latent: Latent, of_keys: bool) -> tuple[Run, ...]:
    """Return the runs of the query matrix, or if `of_keys`, of the matrix that computes the latent
    and the rotated key.

    All heads share the rotated key. Interleaved RoPE pairs are reordered; see `_head_runs`.
    """
    heads, plain = (1, latent.rank) if of_keys else (own.num_heads, latent.key_dim)
    rope_dim, is_reordered = own.head_dim - latent.rank, _interleaved_rope(spec) is not None
    runs = []
    for head in range(heads):
        start = head * (plain + rope_dim)
        middle, end = start + plain, start + plain + rope_dim
        if not is_reordered:
            runs.append(Run(range(start, end), start))
            continue
        runs += [Run(range(start, middle), start), Run(range(middle, end, 2), middle)]
        runs.append(Run(range(middle + 1, end, 2), middle + rope_dim // 2))
    return tuple(runs)


def _fused_in_order(spec: ModelSpec, own: Attention) -> tuple[Run, ...]:
    """Return the runs of a matrix that has all queries, then all keys, then all values."""
    rope, (heads, kv_heads) = _interleaved_rope(spec), (own.num_heads, own.num_kv_heads)
    values = (heads + kv_heads) * own.head_dim
    end = values + kv_heads * own.head_dim
    if rope is None:
        return (Run(range(end), 0),)
    queries, keys = (_head_runs(own, rope, 0, count) for count in (heads, kv_heads))
    first = heads * own.head_dim
    moved = [
        Run(range(it.start + first, it.stop + first, it.step), row + first) for it, row, _ in keys
    ]
    return (*queries, *moved, Run(range(values, end), values))


def _recurrent_place(
    own: Attention, part: str | None, parameter: str, is_matrix: bool
) -> Place | None:
    """Return the place of a convolution, or a projection of linear attention; None for others."""
    if part == "channels" and is_matrix:  # [channel, 1, token] becomes [token, channel]
        return Place(parameter, transposed=True, squeezed=True)
    if not isinstance(own.recurrent, DeltaRule) or ".delta_" not in parameter or part is None:
        return None
    delta = own.recurrent.shape
    if part == "by_key":
        return Place(parameter, runs=delta_runs(delta, "delta_in" in parameter))
    first = {"gate": delta.channels, "steps": delta.value_heads}.get(part, 0)
    size = {"inputs": delta.channels, "gate": delta.values}.get(part, delta.value_heads)
    return Place(parameter, first, size)


def _experts(
    layer: Layer, theirs: str, part: str | None, parameter: str, shape: Shape
) -> Iterator[tuple[str, Place]]:
    """Yield (tensor name, place) for a layer's experts: one tensor per expert, or one for all."""
    experts = layer.experts
    assert experts is not None
    count = experts.count
    each = shape[0] // count
    if part in _HALVES:
        half, offset = each // 2, each // 2 * _HALVES.index(part)
        starts = (each * number + offset for number in range(count))
        runs = tuple(Run(range(n * half, n * half + half), row) for n, row in enumerate(starts))
        yield theirs, Place(parameter, runs=runs, stacked=count)
    elif part in _STACKED:
        yield theirs, Place(parameter, stacked=count, transposed=part != "stacked")
    elif part == "mixed":  # [expert, in, out], and rows of gate and up alternate
        is_matrix = len(shape) == 2
        mixed = []
        if "experts_up" in parameter:
            for start in range(0, shape[0], each):
                end, half = start + each, each // 2
                mixed += [Run(range(start, end, 2), start)]
                mixed += [Run(range(start + 1, end, 2), start + half)]
        yield theirs, Place(parameter, runs=tuple(mixed), stacked=count, transposed=is_matrix)
    else:
        size = each // 2 if part in ("gate", "up") else each
        offset = size if part == "up" else 0
        for number in range(count):
            yield numbered(theirs, number), Place(parameter, number * each + offset, size)


def _place_scales(spec: ModelSpec, family: Family) -> dict[str, Place]:
    """Return tensor name -> place of the scales of an 8-bit KV cache.

    Quantizers name these tensors differently; the result has each of the names.
    """
    modules = [theirs for theirs, (ours, _) in family.tensors.items() if ours == "qkv"]
    if not modules:  # latent attention has no scales
        return {}
    attention = modules[0].rpartition(".")[0]
    places = {}
    for index, layer in enumerate(spec.layers):
        if not layer.attention.has_pages:
            continue
        heads = layer.attention.num_kv_heads
        names = {
            "kv_scale": (0, 2 * heads),
            **{f"{part}k_scale": (0, heads) for part in ("", "attn.", "k_proj.")},
            **{f"{part}v_scale": (heads, heads) for part in ("", "attn.", "v_proj.")},
        }
        for name, rows in names.items():
            place = Place(f"layers.{index}.cache_scales", *rows, scale=True)
            places[f"{attention}.{name}".format(index)] = place
    return places
