"""The places of tensors of linear attention, and of queries with gates."""

from __future__ import annotations

from gptmanager.kernels.recurrent.delta_formulas import DeltaShape
from gptmanager.memory.places import Place, Run
from gptmanager.models.spec import Attention


def gated_runs(own: Attention) -> tuple[Run, ...]:
    """Return the rows of queries that are each followed by the gates of their head.

    Gates come first in the parameter, then the queries.
    """
    dim, heads = own.head_dim, own.num_heads
    runs = []
    for head in range(heads):
        start = 2 * head * dim
        runs += [Run(range(start, start + dim), (heads + head) * dim)]
        runs += [Run(range(start + dim, start + 2 * dim), head * dim)]
    return tuple(runs)


def delta_place(own: Attention, part: str | None, parameter: str) -> Place | None:
    """Return the place of a tensor of linear attention; None for other tensors."""
    delta = own.delta
    if delta is None or ".delta_" not in parameter or part is None:
        return None
    if part == "channels":  # [channel, 1, token], and one row for each token here
        return Place(parameter, transposed=True, squeezed=True)
    if part == "by_key":
        return Place(parameter, runs=delta_runs(delta, "delta_in" in parameter))
    first = {"gate": delta.channels, "steps": delta.value_heads}.get(part, 0)
    size = {"inputs": delta.channels, "gate": delta.values}.get(part, delta.value_heads)
    return Place(parameter, first, size)


def delta_runs(own: DeltaShape, with_heads: bool) -> tuple[Run, ...]:
    """Return the rows of projections that are interleaved by key head (Qwen3-Next).

    A key head has its query, its key, its values and their gates; or, without `with_heads`, the
    rates of its value heads and the arguments of their decays.
    """
    group = own.value_heads // own.key_heads
    values, heads = group * own.value_dim, own.key_heads
    parts = [(group, 0), (group, own.value_heads)]  # (rows of a key head, first row of all)
    if with_heads:
        parts = [(own.key_dim, 0), (own.key_dim, own.keys), (values, 2 * own.keys)]
        parts += [(values, own.channels)]
    runs, source = [], 0
    for head in range(heads):
        for size, first in parts:
            runs.append(Run(range(source, source + size), first + head * size))
            source += size
    return tuple(runs)
