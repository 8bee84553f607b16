"""The beams of a request as data, and how a search is restored from them.

Beams share nodes, and each node is linked to its parent. In the data, nodes have numbers, and a
parent has a smaller number than its children.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gptmanager.config import FinishReason
from gptmanager.decoding.deferred import Deferred
from gptmanager.decoding.search.beam_search import (
    BeamNode,
    BeamSearch,
    Hypothesis,
    ParallelSampling,
)

_NODE_VALUES = 15  # a node takes as much memory as this many numbers


class BeamNodeState(NamedTuple):
    """The state of a `BeamNode`. `parent` is the number of an earlier node, or -1 for none."""

    parent: int
    beam: int
    token: int
    stop_state: int


class BeamEndState(NamedTuple):
    """The state of a `Hypothesis`.

    `node` is the number of the hypothesis's node. `beam` is the hypothesis's key in
    `ParallelSampling.done`, or -1 in any other `BeamSearch`.
    """

    node: int
    reason: FinishReason
    end: int
    beam: int


class BeamState(NamedTuple):
    """The state of a `BeamSearch`; `live` has the number of each live beam's node.

    `log_probs` has one value per element of `nodes`. `cum_log_probs` and `parents` have one value
    per element of `live`. `ended_sums` and `scores` have one value per element of `ended`.
    """

    nodes: tuple[BeamNodeState, ...]
    log_probs: tuple[float, ...]
    live: tuple[int, ...]
    cum_log_probs: tuple[float, ...]
    parents: tuple[int, ...]
    ended: tuple[BeamEndState, ...]
    ended_sums: tuple[float, ...]
    scores: tuple[float, ...]
    length: int
    is_over: bool


def beam_state(search: BeamSearch) -> Any:
    """Return a `Deferred`, which can make the `BeamState` later because nodes never change."""
    ended = list(search.ended)
    beams = [-1] * len(ended)
    if isinstance(search, ParallelSampling):
        beams, ended = list(search.done), list(search.done.values())
    live, sums, parents = list(search.live), list(search.cum_log_probs), list(search.parents)
    length, is_over = search.length, search.is_over

    def make() -> BeamState:
        nodes = _with_ancestors([*live, *(hypothesis.node for hypothesis in ended)])
        numbers = {id(node): number for number, node in enumerate(nodes)}
        return BeamState(
            tuple(
                BeamNodeState(numbers.get(id(n.parent), -1), n.beam, n.token, n.stop_state)
                for n in nodes
            ),
            tuple(node.log_prob for node in nodes),
            tuple(numbers[id(node)] for node in live),
            tuple(sums),
            tuple(parents),
            tuple(
                BeamEndState(numbers[id(h.node)], h.reason, h.end, beam)
                for beam, h in zip(beams, ended, strict=True)
            ),
            tuple(h.cum_log_prob for h in ended),
            tuple(h.score for h in ended),
            length,
            is_over,
        )

    num_nodes = len(live) * (length + 1)
    return Deferred(make, _NODE_VALUES * num_nodes)


def restore_beams(search: BeamSearch, state: BeamState) -> None:
    """Restore a new search to `state`. Raise ValueError if the state contradicts itself."""
    nodes: list[BeamNode] = []
    for (parent, beam, token, stop_state), log_prob in zip(
        state.nodes, state.log_probs, strict=True
    ):
        if not -1 <= parent < len(nodes):
            raise ValueError(f"beam node {len(nodes)} cannot follow node {parent}")
        before = None if parent < 0 else nodes[parent]
        nodes.append(BeamNode(before, beam, token, log_prob, stop_state))
    width, indices = search.params.width, [*state.live, *(end.node for end in state.ended)]
    beams = [*state.parents, *(end.beam for end in state.ended), *(node.beam for node in nodes)]
    if len(state.live) not in (0, width) or len(state.ended) > width:
        raise ValueError(f"{len(state.live)} beams live and {len(state.ended)} ended of {width}")
    if any(not 0 <= index < len(nodes) for index in indices) or any(
        not -1 <= beam < width for beam in beams
    ):
        raise ValueError(f"a beam or node is out of range, of {width} beams and {len(nodes)} nodes")
    search.live = [nodes[index] for index in state.live]
    search.cum_log_probs, search.parents = list(state.cum_log_probs), list(state.parents)
    search.ended = [
        Hypothesis(nodes[end.node], total, score, end.reason, end.end)
        for end, total, score in zip(state.ended, state.ended_sums, state.scores, strict=True)
    ]
    if isinstance(search, ParallelSampling):
        pairs = zip(state.ended, search.ended, strict=True)
        search.done = {end.beam: hypothesis for end, hypothesis in pairs}
    search.length, search.is_over = state.length, state.is_over


def _with_ancestors(nodes: list[BeamNode]) -> list[BeamNode]:
    """Return these nodes and all their ancestors, each once and after its parent."""
    found: dict[int, BeamNode] = {}
    for last in nodes:
        node: BeamNode | None = last
        while node is not None and id(node) not in found:
            found[id(node)] = node
            node = node.parent
    return sorted(found.values(), key=lambda node: node.length)
