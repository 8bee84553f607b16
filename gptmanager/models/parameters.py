"""The names and shapes of the parameters of the network that a `ModelSpec` describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from gptmanager.errors import ConfigError
from gptmanager.kernels.gemm.packed_matrix import Quantized
from gptmanager.models.spec import Attention, Latent, Layer, Mlp, ModelSpec, Norms

Shape = tuple[int, ...]

# matrices used for lookups, not for matmuls
_LOOKED_UP = ("positions.weight", "token_embedding.weight", "embedding.weight")
_QK_NORMS = "q_norm", "k_norm"
_HEADS = {"embedding.weight", "lm_head.weight"}


def parameter_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Return name -> shape of every parameter. Names in layer i begin with `layers.{i}.`."""
    hidden, norms = spec.hidden_size, spec.norms
    shapes: dict[str, Shape] = {"embedding.weight": (spec.vocab_size, hidden)}
    if norms.embedding:
        shapes |= _norm(norms, "embedding_norm", hidden)
    if spec.position_offset is not None:
        num_positions = spec.max_position_embeddings + spec.position_offset
        shapes["positions.weight"] = (num_positions, hidden)
    if (own := spec.token_inputs) is not None:
        width = len(spec.layers) * own.width
        shapes["token_embedding.weight"] = (own.vocab_size, width)
        shapes["token_projection.weight"] = (width, hidden)
        shapes["token_norm.weight"] = (own.width,)
    first = spec.first_layer
    for index in range(first, first + spec.num_layers):
        layer = spec.layers[index]
        modules = {
            **_norms(norms, hidden),
            **_attention(spec, layer.attention),
            **({} if layer.mlp is None else _mlp(spec, layer.mlp)),
            **({"scale": (1,)} if layer.scaled else {}),
            **_token_modules(spec),
        }
        for name, shape in modules.items():
            shapes[f"layers.{index}.{name}"] = shape
    shapes |= _norm(norms, "final_norm", hidden)
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    if spec.head_bias:
        shapes["lm_head.bias"] = (spec.vocab_size,)
    return shapes


def matmul_matrices(spec: ModelSpec) -> list[str]:
    """Return the names of the matrices that `Kernels.linear` or the kernels of experts multiply."""
    looked_up = _LOOKED_UP[:2] if spec.tied_embeddings else _LOOKED_UP
    shapes = parameter_shapes(spec)
    return [
        name
        for name, shape in shapes.items()
        if len(shape) == 2
        and name not in looked_up
        and not name.endswith(("_norm.weight", "latent_up.weight", "_conv.weight"))
    ]


def lookup_tables(spec: ModelSpec) -> list[str]:
    """Return the names of the embeddings of tokens that are not the output matrix, too."""
    tables = {*_LOOKED_UP[1:]} - {*matmul_matrices(spec)}
    return [name for name in parameter_shapes(spec) if name in tables]


def wide_parameters(spec: ModelSpec) -> list[str]:
    """Return the names of the parameters that are kept in float32 at least.

    With lower precision, routers could choose other experts. `RecurrentKind` explains the others.
    """
    routers = "router.weight", "router.bias", "correction", "expert_factors"
    kinds = {layer.attention.recurrent for layer in spec.layers} - {None}
    names = *routers, *(name for own in kinds if own is not None for name in own.wide)
    return [name for name in parameter_shapes(spec) if name.endswith(names)]


def matrix_names(spec: ModelSpec, index: int) -> Mapping[str, str]:
    """Return name of a matrix -> its name for adapters, for the matrices of layer `index`.

    Matrices with the same name for adapters have the same shape in all layers: if `up` has a second
    shape in some layers, its name there is `up/1`.
    """
    known: dict[str, list[tuple[int, ...]]] = {}
    for layer in dict.fromkeys(spec.layers):
        for matrix, shape in _adapted_shapes(layer).items():
            same = known.setdefault(matrix, [])
            if shape not in same:
                same.append(shape)
    numbers = {
        it: known[it].index(shape) for it, shape in _adapted_shapes(spec.layers[index]).items()
    }
    return {it: f"{it}/{number}" if number else it for it, number in numbers.items()}


def _adapted_shapes(layer: Layer) -> dict[str, tuple[int, ...]]:
    own, mlp = layer.attention, layer.mlp
    found: dict[str, tuple[int, ...]] = {}
    if own.attends:
        heads = own.num_heads, own.own_kv_heads, own.head_dim, own.projected_heads
        found = {"qkv": heads, "out": (own.out_width,)}
    elif (recurrent := own.recurrent) is not None:
        shapes = recurrent.parameters(0)  # the shapes for each hidden size
        names = *recurrent.inputs, own.out_name
        found = {name: shapes[f"{name}.weight"] for name in names}
    if mlp is None:
        return found
    if mlp.experts is None:
        return found | dict.fromkeys(("up", "down"), (mlp.width,))
    return found | dict.fromkeys(("shared_up", "shared_down"), (mlp.experts.shared_width,))


def check_head_dtype(weights_dtype: str | None, head_dtype: str | None) -> None:
    """Raise ConfigError if the output matrix cannot have the format `head_dtype`."""
    if head_dtype not in (None, "int8", "int4"):
        raise ConfigError(f"head_dtype = {head_dtype!r} must be 'int8', 'int4' or None")
    if head_dtype is not None and weights_dtype != "int4":
        raise ConfigError(
            f"head_dtype = {head_dtype!r} is refused with weights_dtype = {weights_dtype!r}: it "
            "belongs to 'int4'"
        )


def quantized_parameters(
    spec: ModelSpec,
    weights_dtype: Quantized | Literal["file"] | None,
    head_dtype: Quantized | None = None,
) -> dict[str, Quantized]:
    """Return name -> format of the matrices that are quantized.

    With "file", all returned formats are "int8", although a matrix that has 4 bits in the
    checkpoint keeps its 4 bits when it is loaded. With "int4", the output matrix (or the embedding,
    if it is the output matrix too) has the format `head_dtype`, by default "int8": errors of the
    output matrix directly change which of two tokens with close logits is chosen.
    """
    if weights_dtype is None:
        return {}
    kind: Quantized = "int8" if weights_dtype == "file" else weights_dtype
    found = dict.fromkeys({*matmul_matrices(spec)} - {*wide_parameters(spec)}, kind)
    if weights_dtype == "int4":
        found |= dict.fromkeys(found.keys() & _HEADS, head_dtype or "int8")
    return found


def _affine(name: str, shape: tuple[int, int], biased: bool) -> dict[str, Shape]:
    found: dict[str, Shape] = {f"{name}.weight": shape}
    return found | {f"{name}.bias": shape[:1]} if biased else found


def _norm(norms: Norms, name: str, width: int) -> dict[str, Shape]:
    parts = [part for part in ("weight", "bias") if getattr(norms, part)]
    return {f"{name}.{part}": (width,) for part in parts}


def _norms(norms: Norms, hidden: int) -> dict[str, Shape]:
    """Return the parameters of the norms before and after a layer's attention and MLP."""
    found: dict[str, Shape] = {}
    for name, is_present in norms.in_layer.items():
        if is_present:
            found |= _norm(norms, name, hidden)
    return found


def _latent_attention(spec: ModelSpec, own: Attention, latent: Latent) -> dict[str, Shape]:
    hidden, rope_dim = spec.hidden_size, own.head_dim - latent.rank
    found: dict[str, Shape] = {}
    if latent.query_rank:
        found |= _affine("query_latent", (latent.query_rank, hidden), latent.bias)
        found["query_latent_norm.weight"] = (latent.query_rank,)
    rows = own.num_heads * (latent.key_dim + rope_dim)
    found |= _affine("query", (rows, latent.query_rank or hidden), False)
    found |= _affine("kv_latent", (own.head_dim, hidden), latent.bias)
    found["kv_latent_norm.weight"] = (latent.rank,)
    rows = own.num_heads * (latent.key_dim + latent.value_dim)
    found["latent_up.weight"] = (rows, latent.rank)
    return found | _affine("out", (hidden, own.out_width), spec.out_bias)


def _attention(spec: ModelSpec, own: Attention) -> dict[str, Shape]:
    if own.recurrent is not None:
        return own.recurrent.parameters(spec.hidden_size)
    if own.absent:
        return {}
    if own.latent is not None:
        return _latent_attention(spec, own, own.latent)
    heads, kv_heads = own.num_heads * own.head_dim, own.own_kv_heads * own.head_dim
    rows = own.projected_heads * own.head_dim
    found = _affine("qkv", (rows, spec.hidden_size), spec.qkv_bias)
    found |= _affine("out", (spec.hidden_size, heads), spec.out_bias)
    kind = spec.norms.query_key
    if kind in ("head", "rotated_head"):
        found |= {"q_norm.weight": (own.head_dim,), "k_norm.weight": (own.head_dim,)}
    elif kind == "biased_head":
        found |= {
            f"{it}.{part}": (own.head_dim,) for it in _QK_NORMS for part in ("weight", "bias")
        }
    elif kind in ("own_head", "all_heads"):
        found |= {"q_norm.weight": (heads,), "k_norm.weight": (kv_heads,)}
    if own.sinks:
        found["sinks"] = (own.num_heads,)
    if own.kv_layer is not None:
        found.pop("k_norm.weight", None)
        return found
    return found | {"cache_scales": (2 * own.num_kv_heads,)}  # for keys and for values


def _token_modules(spec: ModelSpec) -> dict[str, Shape]:
    """Return the parameters with which a layer adds its token input to the residual."""
    if spec.token_inputs is None:
        return {}
    width, hidden = spec.token_inputs.width, spec.hidden_size
    return {
        "token_gate.weight": (width, hidden),
        "token_out.weight": (hidden, width),
        "token_out_norm.weight": (hidden,),
    }


def _mlp(spec: ModelSpec, own: Mlp) -> dict[str, Shape]:
    hidden, experts = spec.hidden_size, own.experts
    up = 2 if own.gated else 1
    if experts is None:
        found = _affine("up", (up * own.width, hidden), spec.mlp_bias)
        found |= {"xielu": (2,)} if own.xielu else {}
        return found | _affine("down", (hidden, own.width), spec.mlp_bias)
    count, shared = experts.count, experts.shared_width
    found = _affine("router", (count, hidden), experts.router_bias)
    each, size = experts.own_count, experts.latent or hidden
    found |= _affine("experts_up", (each * up * own.width, size), experts.bias)
    found |= _affine("experts_down", (each * size, own.width), experts.bias)
    if experts.latent:
        found |= _affine("experts_in", (size, hidden), spec.mlp_bias)
        found |= _affine("experts_out", (hidden, size), spec.mlp_bias)
    if experts.correction:
        found["correction"] = (count,)
    if shared:
        found |= _affine("shared_up", (up * shared, hidden), spec.mlp_bias)
        found |= _affine("shared_down", (hidden, shared), spec.mlp_bias)
    if experts.shared_gate:
        found["shared_gate.weight"] = (1, hidden)
    if experts.apart:
        found |= {"router_norm": (hidden,), "expert_factors": (count,)}
        names = "experts_norm", "experts_out_norm", "shared_out_norm"
        found |= {f"{name}.weight": (hidden,) for name in names}
    return found
