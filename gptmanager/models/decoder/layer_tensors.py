"""`LayerTensors`: the tensors of a layer, looked up once for all steps of `CheckpointModel`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages
from gptmanager.kernels.experts.mixture import ExpertMatrices
from gptmanager.kernels.experts.routing import Routing
from gptmanager.kernels.gemm.packed_matrix import Matrix
from gptmanager.memory.kv_pool import KvPool
from gptmanager.memory.weights import Weights
from gptmanager.models.parameters import matrix_names
from gptmanager.models.rope_scaling import Rope
from gptmanager.models.spec import Mlp, ModelSpec, QueryTemperature


class Affine(NamedTuple):
    """The weight of a linear layer, and its bias or None."""

    weight: Matrix
    bias: Tensor | None


class Norm(NamedTuple):
    """The weight `[C]` of a norm, and its bias `[C]` or None."""

    weight: Tensor
    bias: Tensor | None


class HeadNorm(NamedTuple):
    """A norm for `columns` of the joined queries, keys and values.

    Each group of `width` adjacent columns is normalized by itself. `weight` has an element for each
    of `columns`. If there is a `bias`, `weight` and `bias` have `width` elements for all groups.
    """

    columns: range
    width: int
    weight: Tensor
    bias: Tensor | None = None


class TokenInput(NamedTuple):
    """A layer's tensors for adding its token input to the residual; see `spec.TokenInputs`."""

    gate: Matrix
    out: Matrix
    norm: Norm


class LayerEnd(NamedTuple):
    """The steps at the end of a layer, after its MLP.

    The layer adds its token input to the residual, then multiplies the residual by `scale`. A field
    is None if the layer does not have this step.
    """

    token_input: TokenInput | None
    scale: Tensor | None


class LayerPages(NamedTuple):
    """The pages of the KV pool that a layer reads.

    `number`: index of the pages in `KvPool.layers`. `scales` `[2, KV heads]`: the scales of keys
    and values in float8; None for other dtypes. `is_own`: the layer also writes these pages.
    `keys_as_values`: see `spec.Attention`. `is_once`: see `Pages`.
    """

    number: int
    scales: Tensor | None
    is_own: bool
    keys_as_values: bool
    is_once: bool

    def of(self, kv_pool: KvPool) -> Pages:
        """Return these pages of `kv_pool`."""
        return Pages(*kv_pool.layers[self.number], self.scales, self.is_once)


class ExpertNorms(NamedTuple):
    """The weights of the norms around experts that read the residual (`spec.Experts.apart`).

    `router` and `experts` are for the inputs of the router and of the experts. `experts_out` and
    `shared_out` are for the outputs of the experts and of the shared MLP.
    """

    router: Tensor
    experts: Tensor
    experts_out: Tensor
    shared_out: Tensor


class ExpertLayer(NamedTuple):
    """The router of a layer, its experts, and the shared MLP that all tokens use, if any.

    `correction` is a bias that is added to the router's scores only for the selection of experts.
    `shared_gate` gates the output of the shared MLP. `averaged`: see `Experts`. `norms` is None if
    the experts read the same input as the shared MLP (not `spec.Experts.apart`). `latents` are the
    projections to the inputs of experts and from their outputs; None if experts have the hidden
    size.
    """

    router: Affine
    correction: Tensor | None
    routing: Routing
    experts: ExpertMatrices
    shared: DenseLayer | None
    shared_gate: Matrix | None
    averaged: bool
    norms: ExpertNorms | None
    latents: tuple[Affine, Affine] | None


class DenseLayer(NamedTuple):
    """A dense MLP. `up_name` and `down_name`: see `matrix_names`. `xielu`: the numbers
    of `Kernels.xielu`, or None if the MLP has another activation."""

    mlp: Mlp
    up: Affine
    down: Affine
    up_name: str
    down_name: str
    xielu: Tensor | None


class LayerTensors(NamedTuple):
    """The tensors of a layer. `number`: index of the layer among the layers of this rank.

    `qkv` is None in a layer with latent attention, and in a recurrent layer. `out` or `mlp` is None
    in a layer without attention or without an MLP. `qkv_name` and `out_name`: see `matrix_names`.
    `q_norm` and `k_norm` are applied together with RoPE, `head_norms` before RoPE. `next_norm` is
    the attention norm of the next layer, or after the last layer the final norm. A norm that the
    model does not have is None.
    """

    number: int
    pages: LayerPages
    attention_norm: Norm | None
    qkv: Affine | None
    qkv_name: str
    q_norm: Tensor | None
    k_norm: Tensor | None
    head_norms: tuple[HeadNorm, ...]
    rope: Rope | None
    temperature: QueryTemperature | None
    attention: AttentionShape
    sinks: Tensor | None
    out: Affine | None
    out_name: str
    attention_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp: DenseLayer | ExpertLayer | None
    mlp_out_norm: Norm | None
    end: LayerEnd | None
    next_norm: Norm | None


def layer_tensors(
    spec: ModelSpec, weights: Weights, index: int, device: torch.device | str
) -> LayerTensors:
    """Return the tensors of layer `index` of the network."""
    prefix, own = f"layers.{index}", spec.layers[index].attention
    is_last = index == len(spec.layers) - 1
    following = "final_norm" if is_last else f"layers.{index + 1}.attention_norm"
    names = matrix_names(spec, index)
    q_norm = k_norm = None
    if own.attends and spec.norms.query_key in ("head", "rotated_head"):
        q_norm = weights.tensor(f"{prefix}.q_norm.weight")
        if own.kv_layer is None:
            k_norm = weights.tensor(f"{prefix}.k_norm.weight")
    elif spec.norms.query_key == "rotated" and own.rope is not None:
        q_norm = k_norm = torch.ones(own.head_dim, dtype=spec.dtype, device=device)

    def norm(module: str) -> Norm | None:
        return find_norm(spec, weights, module, device)

    return LayerTensors(
        number=index - spec.first_layer,
        pages=_pages(spec, weights, index),
        attention_norm=norm(f"{prefix}.attention_norm"),
        qkv=affine(weights, f"{prefix}.qkv") if own.attends and own.latent is None else None,
        qkv_name=names.get("qkv", ""),
        q_norm=q_norm,
        k_norm=k_norm,
        head_norms=_head_norms(spec, weights, index, device),
        rope=own.rope,
        temperature=own.temperature,
        attention=spec.attention_shape(index),
        sinks=weights.tensor(f"{prefix}.sinks") if own.sinks else None,
        out=None if own.absent else affine(weights, f"{prefix}.{own.out_name}"),
        out_name=names.get(own.out_name, ""),
        attention_out_norm=norm(f"{prefix}.attention_out_norm"),
        mlp_norm=norm(f"{prefix}.mlp_norm"),
        mlp=_mlp(spec, weights, index),
        mlp_out_norm=norm(f"{prefix}.mlp_out_norm"),
        end=_end(spec, weights, index),
        next_norm=norm(following),
    )


def find_norm(
    spec: ModelSpec, weights: Weights, module: str, device: torch.device | str
) -> Norm | None:
    """Return the norm `module`, or None if the network does not have this norm.

    If the norms of the network have no weights, `weight` is all ones.
    """
    if not spec.norms.in_layer.get(module.rpartition(".")[2], True):
        return None
    if spec.norms.weight:
        return Norm(weights.tensor(f"{module}.weight"), _bias(weights, module))
    return Norm(torch.ones(spec.hidden_size, dtype=spec.dtype, device=device), None)


def affine(weights: Weights, module: str) -> Affine:
    """Return a module's weight, and its bias or None."""
    return Affine(weights[f"{module}.weight"], _bias(weights, module))


def _bias(weights: Weights, module: str) -> Tensor | None:
    name = f"{module}.bias"
    return weights.tensor(name) if name in weights else None


def _pages(spec: ModelSpec, weights: Weights, index: int) -> LayerPages:
    own, scales = spec.layers[index].attention, None
    if spec.kv_cache_dtype is torch.float8_e4m3fn and own.attends:
        source = index if own.kv_layer is None else own.kv_layer
        scales = weights.tensor(f"layers.{source}.cache_scales").view(2, own.num_kv_heads)
    return LayerPages(
        spec.page_number(index),
        scales,
        is_own=own.kv_layer is None,
        keys_as_values=own.keys_as_values,
        is_once=own.latent is not None,
    )


def _end(spec: ModelSpec, weights: Weights, index: int) -> LayerEnd | None:
    prefix, is_scaled = f"layers.{index}", spec.layers[index].scaled
    scale = weights.tensor(f"{prefix}.scale") if is_scaled else None
    if spec.token_inputs is None:
        return None if scale is None else LayerEnd(None, scale)
    norm = Norm(weights.tensor(f"{prefix}.token_out_norm.weight"), None)
    gate, out = (weights[f"{prefix}.{name}.weight"] for name in ("token_gate", "token_out"))
    return LayerEnd(TokenInput(gate, out, norm), scale)


def _head_norms(
    spec: ModelSpec, weights: Weights, index: int, device: torch.device | str
) -> tuple[HeadNorm, ...]:
    kind, own = spec.norms.query_key, spec.layers[index].attention
    norms, first = [], 0
    if spec.norms.value and own.kv_layer is None:
        size = own.num_kv_heads * own.head_dim
        end = own.num_heads * own.head_dim + 2 * size
        ones = torch.ones(size, dtype=spec.dtype, device=device)
        norms.append(HeadNorm(range(end - size, end), own.head_dim, ones))
    if kind not in ("biased_head", "own_head", "all_heads"):
        return tuple(norms)
    for name, heads in (("q_norm", own.num_heads), ("k_norm", own.num_kv_heads)):
        size, module = heads * own.head_dim, f"layers.{index}.{name}"
        width = size if kind == "all_heads" else own.head_dim
        weight, bias = weights.tensor(f"{module}.weight"), _bias(weights, module)
        norms.append(HeadNorm(range(first, first + size), width, weight, bias))
        first += size
    return tuple(norms)


def _mlp(spec: ModelSpec, weights: Weights, index: int) -> DenseLayer | ExpertLayer | None:
    prefix, mlp, names = f"layers.{index}", spec.layers[index].mlp, matrix_names(spec, index)
    if mlp is None:
        return None
    experts = mlp.experts

    def dense(up: str, down: str) -> DenseLayer:
        tensors = [affine(weights, f"{prefix}.{name}") for name in (up, down)]
        numbers = weights.tensor(f"{prefix}.xielu") if mlp.xielu else None
        return DenseLayer(mlp, tensors[0], tensors[1], names[up], names[down], numbers)

    if experts is None:
        return dense("up", "down")
    up, down = (affine(weights, f"{prefix}.{name}") for name in ("experts_up", "experts_down"))
    shared = dense("shared_up", "shared_down") if experts.shared_width else None
    gate = weights[f"{prefix}.shared_gate.weight"] if experts.shared_gate else None
    matrices = ExpertMatrices(
        *(*up, *down, mlp.activation, mlp.gated),
        first=experts.first,
        count=experts.own_count,
        factors=weights.tensor(f"{prefix}.expert_factors") if experts.apart else None,
    )
    norms = None
    if experts.apart:
        own = ("experts_norm", "experts_out_norm", "shared_out_norm")
        found = (weights.tensor(f"{prefix}.{name}.weight") for name in own)
        norms = ExpertNorms(weights.tensor(f"{prefix}.router_norm"), *found)
    latents = None
    if experts.latent:
        latents = affine(weights, f"{prefix}.experts_in"), affine(weights, f"{prefix}.experts_out")
    return ExpertLayer(
        affine(weights, f"{prefix}.router"),
        weights.tensor(f"{prefix}.correction") if experts.correction else None,
        experts.routing,
        matrices,
        shared,
        gate,
        experts.averaged,
        norms,
        latents,
    )
