"""`SPLITS`: how parameters are split over ranks. `rank_cuts`: the parts that a rank keeps.

In a layer, the first matmul of attention and of the MLP is split by outputs, and the second by
inputs. A rank computes its part of the second matmul from its own outputs of the first matmul, so a
layer needs only two sums over the ranks (Shoeybi et al. 2019, arXiv:1909.08053). Each expert is on
one rank of a stage. Pipeline stages are ranges of layers. This module does not know tensor names of
checkpoints or how ranks communicate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gptmanager.errors import ConfigError
from gptmanager.memory.places import Cut
from gptmanager.models.parameters import parameter_shapes
from gptmanager.models.spec import Layer, Mlp, ModelSpec
from gptmanager.ranks.layout import RankLayout


@dataclass(frozen=True, slots=True)
class Split:
    """How a module's weight is split over the tensor-parallel ranks of a stage, called parts.

    A kind is a name of rows or columns that `Shares` knows, such as "queries". `rows`: the kinds of
    rows in the order of the weight. Each kind is split; without kinds, every part has all rows.
    `columns`: the kind of columns if the columns are split. Results are then partial sums, and only
    the first part adds the bias.
    """

    rows: tuple[str, ...] = ()
    columns: str = ""


# All other modules, such as norms and positions, are complete on each rank of a stage.
SPLITS = {
    "embedding": Split(rows=("tokens",)),
    "qkv": Split(rows=("query_gates", "queries", "keys", "values")),
    "sinks": Split(rows=("heads",)),
    "cache_scales": Split(rows=("kv_heads", "kv_heads")),
    "query": Split(rows=("latent_queries",)),
    "latent_up": Split(rows=("latent_keys", "latent_values")),
    "out": Split(columns="mixed"),
    "up": Split(rows=("gates", "width")),
    "down": Split(columns="width"),
    "experts_up": Split(rows=("expert_rows",)),
    "experts_down": Split(rows=("expert_columns",)),
    "shared_up": Split(rows=("shared_gates", "shared_width")),
    "shared_down": Split(columns="shared_width"),
    "lm_head": Split(rows=("tokens",)),
}

# for models in which norms of queries and keys have separate weights for each head
_NORMS = {"q_norm": Split(rows=("queries",)), "k_norm": Split(rows=("keys",))}
_OF_ONE_HEAD = ("none", "head", "rotated_head", "rotated", "biased_head")


class Shares:
    """A rank's ranges of each kind of rows and columns in `SPLITS`, for one layer.

    `layers` is the range of the rank's layers. `heads`, `kv_heads`, `width`, `experts`, `shared`
    (elements of the shared MLP) and `tokens` are ranges, too.
    """

    def __init__(self, spec: ModelSpec, layout: RankLayout, layer: Layer) -> None:
        size, part = layout.tensor_parallel_size, layout.part
        own, mlp = layer.attention, layer.mlp or Mlp(0)
        dim, experts, gated = own.head_dim, mlp.experts, mlp.gated
        queries = evenly(own.num_heads, size, part)
        kv_heads = kv_share(own.num_kv_heads, size, part)
        width = evenly(mlp.width, size, part)
        self.layers = evenly(spec.num_layers, layout.pipeline_parallel_size, layout.stage)
        self.heads, self.kv_heads, self.width = queries, kv_heads, width
        self.experts = self.shared = range(0)
        self.tokens = evenly(spec.vocab_size, size, part)
        own_keys = (own.num_kv_heads * dim, _times(kv_heads, dim))
        if own.kv_layer is not None:
            own_keys = (0, range(0))
        self._by_kind = {
            "tokens": (spec.vocab_size, self.tokens),
            "queries": (own.num_heads * dim, _times(queries, dim)),
            "query_gates": (0, range(0)),
            "keys": own_keys,
            "values": (0, range(0)) if own.keys_as_values else own_keys,
            "mixed": (own.out_width, _times(queries, own.out_width // own.num_heads)),
            "heads": (own.num_heads, queries),
            "kv_heads": (own.num_kv_heads, kv_heads),
            "gates": (mlp.width, width) if gated else (0, range(0)),
            "width": (mlp.width, width),
        }
        if own.gated:
            self._by_kind["query_gates"] = self._by_kind["queries"]
        if (latent := own.latent) is not None:
            for kind, rows in (
                ("latent_queries", latent.key_dim + dim - latent.rank),
                ("latent_keys", latent.key_dim),
                ("latent_values", latent.value_dim),
            ):
                self._by_kind[kind] = (own.num_heads * rows, _times(queries, rows))
        if experts is not None:
            self.experts = evenly(experts.count, size, part)
            self.shared = evenly(experts.shared_width, size, part)
            rows, columns = mlp.width * (2 if gated else 1), experts.latent or spec.hidden_size
            shared = experts.shared_width, self.shared
            self._by_kind |= {
                "expert_rows": (experts.count * rows, _times(self.experts, rows)),
                "expert_columns": (experts.count * columns, _times(self.experts, columns)),
                "shared_gates": shared if gated else (0, range(0)),
                "shared_width": shared,
            }

    def rows(self, split: Split) -> tuple[range, ...]:
        """Return the ranges of a weight's rows that this rank has."""
        found, first = [], 0
        for kind in split.rows:
            count, own = self._by_kind[kind]
            found.append(range(first + own.start, first + own.stop))
            first += count
        return tuple(filter(None, found))

    def columns(self, split: Split) -> range:
        """Return the range of a weight's columns that this rank has."""
        return self._by_kind[split.columns][1]


def layer_shares(spec: ModelSpec, layout: RankLayout) -> list[Shares]:
    """Return the shares of each layer. Raise the errors of `check`."""
    check(spec, layout)
    known = {layer: Shares(spec, layout, layer) for layer in dict.fromkeys(spec.layers)}
    return [known[layer] for layer in spec.layers]


def evenly(count: int, parts: int, part: int) -> range:
    """Return the range of `part` if `count` items are divided into `parts` ranges.

    The first ranges have one more item if `count` is not divisible.
    """
    each, left = divmod(count, parts)
    first = part * each + min(part, left)
    return range(first, first + each + (part < left))


def kv_share(num_kv_heads: int, parts: int, part: int) -> range:
    """Return the KV heads of a part. With more parts than heads, several parts share a head."""
    if parts <= num_kv_heads:
        return evenly(num_kv_heads, parts, part)
    own = part * num_kv_heads // parts
    return range(own, own + 1)


def check(spec: ModelSpec, layout: RankLayout) -> None:
    """Raise ConfigError, with the field and valid values, if the ranks cannot share a network."""
    size, stages = layout.tensor_parallel_size, layout.pipeline_parallel_size
    given = f"ParallelConfig.tensor_parallel_size = {size}"
    if size * stages > 1 and spec.states:
        given = "ParallelConfig: the number of ranks must be 1"
        raise ConfigError(f"{given}, because layers of this model keep a state for each sequence")
    for layer in dict.fromkeys(spec.layers):
        _check_layer(layer, size, given)
    if size > spec.vocab_size:
        raise ConfigError(f"{given} is more than the vocabulary's {spec.vocab_size} tokens")
    if stages > 1 and spec.token_inputs is not None:
        raise ConfigError(
            f"ParallelConfig.pipeline_parallel_size = {stages}: must be 1, because layers of this "
            "model have further inputs (hidden_size_per_layer_input)"
        )
    if stages > 1 and any(layer.attention.kv_layer is not None for layer in spec.layers):
        raise ConfigError(
            f"ParallelConfig.pipeline_parallel_size = {stages}: must be 1, because layers of this "
            "model share keys and values (num_kv_shared_layers)"
        )
    if stages > spec.num_layers:
        raise ConfigError(
            f"ParallelConfig.pipeline_parallel_size = {stages} is more than the "
            f"{spec.num_layers} layers"
        )


def _check_layer(layer: Layer, size: int, given: str) -> None:
    attention, mlp = layer.attention, layer.mlp or Mlp(0)
    counts = [(attention.num_heads, "query heads")]
    if (experts := mlp.experts) is None:
        counts.append((mlp.width, "elements of the intermediate size"))
    else:
        counts += [(experts.count, "experts"), (experts.shared_width, "elements of the shared MLP")]
    for count, what in counts:
        if count % size:
            raise ConfigError(f"{given}: must divide the {count} {what}")
    kv_heads = attention.num_kv_heads
    if max(kv_heads, size) % min(kv_heads, size):
        raise ConfigError(f"{given}: must divide the {kv_heads} KV heads or be a multiple")


def rank_spec(spec: ModelSpec, layout: RankLayout) -> ModelSpec:
    """Return the spec of a rank's part of a network. Raise the errors of `check`."""
    shares = layer_shares(spec, layout)
    own = shares[0].layers
    layers = tuple(map(_rank_layer, spec.layers, shares))
    return replace(spec, first_layer=own.start, num_layers=len(own), layers=layers)


def _rank_layer(layer: Layer, shares: Shares) -> Layer:
    heads, kv_heads = len(shares.heads), len(shares.kv_heads)
    attention = replace(layer.attention, num_heads=heads, num_kv_heads=kv_heads)
    mlp = layer.mlp
    if mlp is not None and mlp.experts is None:
        mlp = replace(mlp, width=len(shares.width))
    elif mlp is not None and mlp.experts is not None:
        shared = len(shares.shared)
        mlp = replace(mlp, experts=replace(mlp.experts, own=shares.experts, shared_width=shared))
    return replace(layer, attention=attention, mlp=mlp)


def vocabulary_shares(spec: ModelSpec, layout: RankLayout) -> tuple[range, list[int]]:
    """Return the range of the vocabulary on this rank, and the number of tokens on each part.

    The embedding and the head of a part have rows only for its tokens.
    """
    size = layout.tensor_parallel_size
    shares = [evenly(spec.vocab_size, size, part) for part in range(size)]
    return shares[layout.part], [len(share) for share in shares]


def rank_cuts(spec: ModelSpec, layout: RankLayout) -> dict[str, Cut]:
    """Return {parameter name: the part that a rank keeps}. Raise the errors of `check`."""
    by_layer = layer_shares(spec, layout)
    modules = _modules(spec, layout, by_layer[0].layers)
    splits = SPLITS if spec.norms.query_key in _OF_ONE_HEAD else {**SPLITS, **_NORMS}
    cuts: dict[str, Cut] = {}
    for name, shape in parameter_shapes(spec).items():
        module, kind = name.removesuffix(".weight").removesuffix(".bias"), name.rpartition(".")[2]
        split = splits.get(module.rpartition(".")[2], Split())
        if not any(module.startswith(own) for own in modules):
            continue
        if kind == "bias" and split.columns and layout.part:
            continue
        shares = by_layer[int(name.split(".")[1]) if name.startswith("layers.") else 0]
        rows = shares.rows(split) if split.rows else (range(shape[0]),)
        columns = None if len(shape) == 1 else range(shape[1])
        if split.columns and columns is not None:
            columns = shares.columns(split)
        cuts[name] = Cut(rows, columns)
    return cuts


def _modules(spec: ModelSpec, layout: RankLayout, layers: range) -> set[str]:
    """Return the name prefixes of a stage's modules."""
    found = {f"layers.{layer}." for layer in layers}
    if layout.is_first_stage:
        found |= {"embedding", "positions", "token_"}
    if layout.is_last_stage:
        tied = {"embedding"} if spec.tied_embeddings else set()
        return found | {"final_norm", "lm_head"} | tied
    # the last layer of a stage also applies the first norm of the next stage
    return found | {f"layers.{layers.stop}.attention_norm"}


def _times(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
