"""The rows of attention's tensors in checkpoints that do not store one matrix after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gptmanager.kernels.recurrent.delta_formulas import DeltaShape
from gptmanager.memory.places import Place, Run
from gptmanager.models.spec import Attention


def fused_by_head(own: Attention) -> tuple[Run, ...]:
    """Return the runs of a matrix in which each KV head has its queries, its key and its value."""
    dim, heads, kv_heads = own.head_dim, own.num_heads, own.num_kv_heads
    queries = heads // kv_heads * dim  # rows of the queries of one KV head
    runs, start = [], 0
    for head in range(kv_heads):
        parts = (queries, head * queries), (dim, (heads + head) * dim)
        for size, row in (*parts, (dim, (heads + kv_heads + head) * dim)):
            runs.append(Run(range(start, start + size), row))
            start += size
    return tuple(runs)


def gated_runs(own: Attention) -> tuple[Run, ...]:
    """Return the runs of a matrix in which each head has its query rows, then its gate rows.

    The parameter has the gate rows of all heads, followed by the query rows of all heads.
    """
    dim, heads = own.head_dim, own.num_heads
    runs = []
    for head in range(heads):
        start = 2 * head * dim
        runs += [Run(range(start, start + dim), (heads + head) * dim)]
        runs += [Run(range(start + dim, start + 2 * dim), head * dim)]
    return tuple(runs)


def delta_runs(own: DeltaShape, of_inputs: bool) -> tuple[Run, ...]:
    """Return the runs of a projection of linear attention in the order of key heads (Qwen3-Next).

    If `of_inputs`, each key head has rows for its query, its key, its values and their gates.
    Otherwise each key head has rows for the rates of its value heads, then for the arguments of
    their decays.
    """
    group = own.value_heads // own.key_heads
    values, heads = group * own.value_dim, own.key_heads
    # (number of rows for each key head, first row of the parameter)
    parts = [(group, 0), (group, own.value_heads)]
    if of_inputs:
        parts = [(own.key_dim, 0), (own.key_dim, own.keys), (values, 2 * own.keys)]
        parts += [(values, own.channels)]
    runs, source = [], 0
    for head in range(heads):
        for size, first in parts:
            runs.append(Run(range(source, source + size), first + head * size))
            source += size
    return tuple(runs)


LATENT_UP = ("keys_and_values", "keys_by_head", "values_by_head", "stacked_keys", "stacked_values")


def latent_up(
    own: Attention, theirs: str, part: str, parameter: str
) -> Iterator[tuple[str, Place]]:
    """Yield (tensor name, place) of the matrices from a token's latent to keys and values.

    The parameter has the rows for keys `[K, rank]` of all heads, followed by the rows for values
    of all heads, which are stored as `[rank, V]`. So attention multiplies by both without a copy. A
    checkpoint has one matrix in which each head has its rows for keys, then for values; or a tensor
    for each head or for all heads, in which matrices for keys are transposed.
    `part`: one of `LATENT_UP`.
    """
    assert own.latent is not None
    heads, num_keys, num_values = own.num_heads, own.latent.key_dim, own.latent.value_dim
    keys = [Run(range(num_keys), head * num_keys) for head in range(heads)]
    first = heads * num_keys
    values = [Run(range(num_values), first + head * num_values, True) for head in range(heads)]
    if part == "keys_and_values":
        both = [run for head in zip(keys, values, strict=True) for run in head]
        yield theirs, Place(parameter, runs=_joined(both))
    elif part == "stacked_keys":
        yield theirs, Place(parameter, 0, first, stacked=heads, transposed=True)
    elif part == "stacked_values":
        yield theirs, Place(parameter, runs=_joined(values), stacked=heads)
    for head in range(heads):
        if part == "keys_by_head":
            yield numbered(theirs, head), Place(parameter, runs=(keys[head],), transposed=True)
        elif part == "values_by_head":
            yield numbered(theirs, head), Place(parameter, runs=(values[head],))


def _joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return runs of tensors of their own as runs of one tensor that has one after another."""
    found, start = [], 0
    for run in runs:
        stop = start + len(run.source)
        found.append(run._replace(source=range(start, stop)))
        start = stop
    return tuple(found)


def numbered(theirs: str, number: int) -> str:
    """Fill in the second {} of a name."""
    return theirs.replace("{}", "\0", 1).replace("{}", str(number), 1).replace("\0", "{}")
