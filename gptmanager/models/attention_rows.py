"""The rows of attention's tensors in checkpoints that do not store one matrix after another."""

from __future__ import annotations

from collections.abc import Iterator

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


def latent_heads(
    own: Attention, theirs: str, of_keys: bool, parameter: str
) -> Iterator[tuple[str, Place]]:
    """Yield (tensor name, place) of each head's matrix from the latent to its keys or its values.

    Matrices of keys are stored as [in, out], and matrices of values as [out, in].
    """
    assert own.latent is not None
    rows, after = own.latent.key_dim, own.latent.value_dim
    for head in range(own.num_heads):
        first = head * (rows + after)
        place = Place(parameter, first, rows, transposed=True)
        if not of_keys:
            place = Place(parameter, first + rows, after)
        yield numbered(theirs, head), place


def stacked_heads(own: Attention, of_keys: bool, parameter: str) -> Place:
    """Return the place of one tensor that has the matrices of all heads; see `latent_heads`."""
    assert own.latent is not None
    rows, after = own.latent.key_dim, own.latent.value_dim
    first, size = (0, rows) if of_keys else (rows, after)
    runs = tuple(
        Run(range(head * size, head * size + size), head * (rows + after) + first)
        for head in range(own.num_heads)
    )
    return Place(parameter, runs=runs, stacked=own.num_heads, transposed=of_keys)


def numbered(theirs: str, number: int) -> str:
    """Fill in the second {} of a name."""
    return theirs.replace("{}", "\0", 1).replace("{}", str(number), 1).replace("\0", "{}")
