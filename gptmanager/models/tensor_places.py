"""`place_tensors`: from the names of a checkpoint's tensors to the parameters that they fill."""

from __future__ import annotations

from gptmanager.memory.weights import Place
from gptmanager.models.families import FAMILIES, Family
from gptmanager.models.spec import ModelSpec, parameter_shapes


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
