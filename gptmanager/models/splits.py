"""How a network is split over ranks, as a table: which part of which parameter each of them keeps.

In a layer the first product of attention and the first of the MLP are split by their outputs, the
second ones by their inputs: so a rank goes from one to the other with what it has, and two sums
over ranks are all that a layer needs (Shoeybi et al. 2019, arXiv:1909.08053). Stages are ranges of
layers. Knows nothing of what a checkpoint calls its tensors, nor of how ranks talk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gptmanager.errors import ConfigError
from gptmanager.memory.weights import Cut
from gptmanager.models.spec import ModelSpec, parameter_shapes
from gptmanager.ranks.layout import RankLayout


@dataclass(frozen=True, slots=True)
class Split:
    """`rows`: what the rows of a module's weight are, one behind the other, each to be shared out;
    none: every rank has all of them. `columns`: the same of the columns. Then results are partial
    sums, and what is added to them, the bias, is there once: part 0 has it.
    """

    rows: tuple[str, ...] = ()
    columns: str = ""


# of other modules, norms and positions, each rank of the stage has the whole
SPLITS = {
    "embedding": Split(rows=("tokens",)),
    "qkv": Split(rows=("queries", "keys", "keys")),
    "cache_scales": Split(rows=("kv_heads", "kv_heads")),
    "out": Split(columns="queries"),
    "up": Split(rows=("gates", "width")),
    "down": Split(columns="width"),
    "lm_head": Split(rows=("tokens",)),
}


class Shares:
    """The ranges that each word in `SPLITS` stands for: the total, and a rank's part of it.

    ConfigError if the network cannot be split this way.
    """

    def __init__(self, spec: ModelSpec, layout: RankLayout) -> None:
        check(spec, layout)
        size, part = layout.tensor_parallel_size, layout.part
        queries = evenly(spec.num_heads, size, part)
        kv_heads = kv_share(spec.num_kv_heads, size, part)
        width = evenly(spec.intermediate_size, size, part)
        gates = spec.activation == "silu"
        self.layers = evenly(spec.num_layers, layout.pipeline_parallel_size, layout.stage)
        self.heads, self.kv_heads, self.width = queries, kv_heads, width
        self.tokens = evenly(spec.vocab_size, size, part)
        self._by_word = {
            "tokens": (spec.vocab_size, self.tokens),
            "queries": (spec.num_heads * spec.head_dim, _times(queries, spec.head_dim)),
            "keys": (spec.num_kv_heads * spec.head_dim, _times(kv_heads, spec.head_dim)),
            "kv_heads": (spec.num_kv_heads, kv_heads),
            "gates": (spec.intermediate_size, width) if gates else (0, range(0)),
            "width": (spec.intermediate_size, width),
        }

    def rows(self, split: Split) -> tuple[range, ...]:
        """Return the ranges of a weight's rows that this rank has."""
        found, first = [], 0
        for word in split.rows:
            count, own = self._by_word[word]
            found.append(range(first + own.start, first + own.stop))
            first += count
        return tuple(filter(None, found))

    def columns(self, split: Split) -> range:
        return self._by_word[split.columns][1]


def evenly(count: int, parts: int, part: int) -> range:
    """Which of `count` things a part has; the first parts have one more where some are left."""
    each, left = divmod(count, parts)
    first = part * each + min(part, left)
    return range(first, first + each + (part < left))


def kv_share(num_kv_heads: int, parts: int, part: int) -> range:
    """Which KV heads a part has; where there are more parts than heads, several have the same."""
    if parts <= num_kv_heads:
        return evenly(num_kv_heads, parts, part)
    own = part * num_kv_heads // parts
    return range(own, own + 1)


def check(spec: ModelSpec, layout: RankLayout) -> None:
    """ConfigError, with the field and what it may be, where ranks cannot share this network."""
    size, stages = layout.tensor_parallel_size, layout.pipeline_parallel_size
    given = f"ParallelConfig.tensor_parallel_size = {size}"
    for count, what in (
        (spec.num_heads, "query heads"),
        (spec.intermediate_size, "elements of the intermediate size"),
    ):
        if count % size:
            raise ConfigError(f"{given}: a divisor of the {count} {what} is needed")
    if max(spec.num_kv_heads, size) % min(spec.num_kv_heads, size):
        raise ConfigError(
            f"{given}: a divisor or a multiple of the {spec.num_kv_heads} KV heads is needed"
        )
    if size > spec.vocab_size:
        raise ConfigError(f"{given} is more than the vocabulary's {spec.vocab_size} tokens")
    if stages > spec.num_layers:
        raise ConfigError(
            f"ParallelConfig.pipeline_parallel_size = {stages} is more than the "
            f"{spec.num_layers} layers"
        )


def rank_spec(spec: ModelSpec, layout: RankLayout) -> ModelSpec:
    """Return the spec of a rank's part of a network. Raises what `check` raises."""
    shares = Shares(spec, layout)
    return replace(
        spec,
        first_layer=shares.layers.start,
        num_layers=len(shares.layers),
        num_heads=len(shares.heads),
        num_kv_heads=len(shares.kv_heads),
        intermediate_size=len(shares.width),
    )


def vocabulary_shares(spec: ModelSpec, layout: RankLayout) -> tuple[range, list[int]]:
    """Which tokens' rows of the embedding and of the head a rank has; how many each part has."""
    size = layout.tensor_parallel_size
    shares = [evenly(spec.vocab_size, size, part) for part in range(size)]
    return shares[layout.part], [len(share) for share in shares]


def rank_cuts(spec: ModelSpec, layout: RankLayout) -> dict[str, Cut]:
    """Return the part that a rank keeps, by parameter. Raises what `check` raises."""
    shares = Shares(spec, layout)
    modules = _modules(spec, layout, shares.layers)
    cuts: dict[str, Cut] = {}
    for name, shape in parameter_shapes(spec).items():
        module, kind = name.removesuffix(".weight").removesuffix(".bias"), name.rpartition(".")[2]
        split = SPLITS.get(module.rpartition(".")[2], Split())
        if not any(module.startswith(own) for own in modules):
            continue
        if kind == "bias" and split.columns and layout.part:
            continue
        rows = shares.rows(split) if split.rows else (range(shape[0]),)
        columns = None if len(shape) == 1 else range(shape[1])
        if split.columns and columns is not None:
            columns = shares.columns(split)
        cuts[name] = Cut(rows, columns)
    return cuts


def _modules(spec: ModelSpec, layout: RankLayout, layers: range) -> set[str]:
    """How the names of the modules begin that a stage has."""
    found = {f"layers.{layer}." for layer in layers}
    if layout.is_first_stage:
        found |= {"embedding", "positions"}
    if layout.is_last_stage:
        return found | {"final_norm", "embedding" if spec.tied_embeddings else "lm_head"}
    # the norm behind the last layer of this stage is the first one of the next
    return found | {f"layers.{layers.stop}.attention_norm"}


def _times(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
