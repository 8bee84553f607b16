"""`BeamSearch`: which beams of a request stay live, which have ended, and when the search is over.

The input is the candidates: the best continuations of each live beam and their log probabilities,
which the executor computes. This module knows nothing of tensors, blocks and logits.

The search works like transformers' `generate(num_beams=W, do_sample=False)`. In each step all
continuations of live beams are ranked. A continuation that ends and is among the best W becomes an
ended beam; the W ended beams with the best scores are kept. The best W continuations that do not
end stay live. score = cumulative log probability / number of generated tokens ** len_penalty. Sums
are in single precision, as in transformers. Each beam provides W candidates, plus one for each
token that can end the beam, so that W beams can always stay live.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gptmanager.config import FinishReason
from gptmanager.decoding.end_rule import End, EndRule
from gptmanager.step import NO_TOKEN, NOT_FINITE, BeamCandidates

_DEAD = float("-inf")
_MOST = math.log(1e30)


@dataclass(frozen=True, slots=True)
class BeamParams:
    """The options of a request's beam search.

    `early_stopping` decides when the search is over, once W beams have ended. With 1, it is over at
    once. With 0, it is over when no live beam, at its present length, can score better than the
    worst ended beam. With any other value, it is over when no live beam can score better than the
    worst ended beam at any length that the live beam may reach. `num_results` of the W beams are
    returned, by default all. With `sampled`, each beam is sampled independently, without a search.
    """

    width: int
    len_penalty: float = 1.0
    early_stopping: int = 0
    num_results: int | None = None
    sampled: bool = False


@dataclass(slots=True, eq=False, repr=False)  # the repr of a long beam would recurse too deeply
class BeamNode:
    """The last token of a beam, linked to the node before it and thus to the whole beam.

    `beam` is the index of the beam that provided the logits for choosing the token.
    """

    parent: BeamNode | None
    beam: int
    token: int
    log_prob: float
    stop_state: int
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = 1 if self.parent is None else self.parent.length + 1

    def path(self) -> list[BeamNode]:
        """Return all nodes of the beam, the first generated token first."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]


class Hypothesis(NamedTuple):
    """A beam that has ended or was cut off. `end` is the number of generated tokens to output."""

    node: BeamNode
    cum_log_prob: float
    score: float
    reason: FinishReason
    end: int


class _Continuation(NamedTuple):
    cum_log_prob: float
    beam: int
    token: int
    log_prob: float


class BeamSearch:
    """The beams of one request, from the first generated token to the last.

    After `advance`, beam i has the newest token `tokens[i]`, and continues the KV cache of beam
    `parents[i]`. `end_rule` decides where each beam ends. `fault` is NOT_FINITE, or NO_TOKEN if no
    beam can continue and none has ended; otherwise 0. With a fault the search is over.
    """

    def __init__(self, params: BeamParams, end_rule: EndRule) -> None:
        self.params = params
        self.end_rule = end_rule
        self.restart()

    def restart(self) -> None:
        """Reset the search to the prompt."""
        self.live: list[BeamNode] = []
        self.cum_log_probs: list[float] = []
        self.parents: list[int] = []
        self.ended: list[Hypothesis] = []  # the best so far, best first
        self.length = 0
        self.is_over = False
        self.fault = 0

    @property
    def num_results(self) -> int:
        """Maximum number of hypotheses to return."""
        return self.params.num_results or self.params.width

    @property
    def num_candidates(self) -> int:
        """Number of candidates that each beam must provide; fewer if the vocabulary is smaller."""
        return self.params.width + self.end_rule.num_last_tokens

    @property
    def tokens(self) -> list[int]:
        return [node.token for node in self.live]

    def advance(self, candidates: BeamCandidates) -> bool:
        """Add one token to every beam; return True if the search is over."""
        self.is_over = self._advance(candidates)
        if self.is_over and not self.ended:
            self.fault = self.fault or NO_TOKEN
        return self.is_over

    def hypotheses(self, reason: FinishReason | None = None) -> list[Hypothesis]:
        """Return the results, best first.

        With a `reason`, live beams are cut off for this reason and ranked among the ended beams.
        Without a reason, live beams follow the ended beams.
        """
        live = [
            self._hypothesis(node, total, reason or FinishReason.LENGTH, node.length)
            for node, total in zip(self.live, self.cum_log_probs, strict=True)
            if total > _DEAD
        ]
        best = sorted([*self.ended, *(live if reason else ())], key=lambda h: -h.score)
        if reason is None:
            best += sorted(live, key=lambda h: -h.score)
        return best[: self.num_results]

    def stable_length(self) -> int:
        """Return the number of generated tokens that all beams share and no later step changes.

        Tokens that may yet become the beginning of a stop word, and be cut off, are not counted.
        """
        nodes = {*self.live, *(hypothesis.node for hypothesis in self.ended)}
        if not nodes:
            return 0
        ends = [hypothesis.end for hypothesis in self.ended]
        ends += [self.end_rule.num_final(node.stop_state, node.length) for node in self.live]
        common = _common_length(nodes)
        return min([common, *ends])

    def stable_path(self) -> list[BeamNode]:
        """Return a beam with all stable tokens: the best live beam, or else an ended beam."""
        node = self.live[0] if self.live else self.ended[0].node
        return node.path()

    # Inside ---------------------------------------------------------------------------------

    def _advance(self, candidates: BeamCandidates) -> bool:
        if candidates.tokens[0][0] == NOT_FINITE:
            self.fault = NOT_FINITE
            return True
        width = self.params.width
        nodes: list[BeamNode] = []
        sums: list[float] = []
        parents: list[int] = []
        just_ended: list[Hypothesis] = []
        for rank, continuation in enumerate(self._ranked(candidates)):
            if len(nodes) == width and rank >= width:
                break
            node, end = self.extend(*continuation[1:])
            if end is not None:
                if rank < width and continuation.cum_log_prob > _DEAD:
                    just_ended.append(self._hypothesis(node, continuation.cum_log_prob, *end))
            elif len(nodes) < width:
                nodes.append(node)
                sums.append(continuation.cum_log_prob)
                parents.append(continuation.beam)
        self.ended = sorted([*self.ended, *just_ended], key=lambda h: -h.score)[:width]
        self.length += 1
        if not nodes:
            self.live, self.cum_log_probs, self.parents = [], [], []
            return True
        while len(nodes) < width:  # the vocabulary is smaller than the number of beams
            nodes.append(nodes[0])
            sums.append(_DEAD)
            parents.append(parents[0])
        self.live, self.cum_log_probs, self.parents = nodes, sums, parents
        return self._is_over()

    def _ranked(self, candidates: BeamCandidates) -> Iterator[_Continuation]:
        """Yield all continuations, best first; on a tie the lower beam and token first."""
        totals = np.array(self.cum_log_probs or [0.0], dtype=np.float32)
        log_probs = np.array(candidates.log_probs[: len(totals)], dtype=np.float32)
        with np.errstate(over="ignore"):  # an overflow is -inf
            sums = log_probs + totals[:, None]
        tokens = np.array(candidates.tokens[: len(totals)])
        beams = np.repeat(np.arange(len(tokens)), tokens.shape[1])
        flat_sums, flat_tokens = sums.ravel(), tokens.ravel()
        order = np.lexsort((flat_tokens, beams, -flat_sums))
        for i in order.tolist():
            yield _Continuation(
                float(flat_sums[i]), int(beams[i]), int(flat_tokens[i]), float(log_probs.flat[i])
            )

    def extend(self, beam: int, token: int, log_prob: float) -> tuple[BeamNode, End | None]:
        """Return the node of `token` after a beam, and the end of the beam if it ends there."""
        parent = self.live[beam] if self.live else None
        before = 0 if parent is None else parent.stop_state
        stop_state, end = self.end_rule.find(before, token, self.length + 1)
        return BeamNode(parent, beam, token, log_prob, stop_state), end

    def _hypothesis(
        self, node: BeamNode, cum_log_prob: float, reason: FinishReason, end: int
    ) -> Hypothesis:
        return Hypothesis(node, cum_log_prob, self._score(cum_log_prob, node.length), reason, end)

    def _score(self, cum_log_prob: float, length: int) -> float:
        penalty = self.params.len_penalty
        if length > 1:  # single precision must hold the divisor
            most = _MOST / math.log(length)
            penalty = max(-most, min(penalty, most))
        with np.errstate(over="ignore"):
            return float(np.float32(cum_log_prob) / np.float32(length**penalty))

    def _is_over(self) -> bool:
        params = self.params
        if max(self.cum_log_probs) == _DEAD:  # all live beams have probability 0
            return True
        if len(self.ended) < params.width:
            return False
        if params.early_stopping == 1:
            return True
        length = self.length
        if params.early_stopping != 0 and params.len_penalty > 0:
            length = self.end_rule.max_new_tokens
        best_possible = self._score(max(self.cum_log_probs), length)
        return best_possible <= self.ended[-1].score


class ParallelSampling(BeamSearch):
    """Several independently sampled sequences of one prompt, without a search.

    To the loop and the KV cache the sequences are beams that fork after the prompt and never again.
    Each beam has one candidate per step, its sampled token. An ended sequence keeps its beam until
    all have ended, and tokens sampled after its end are ignored. Results are in the order of the
    beams.
    """

    def restart(self) -> None:
        super().restart()
        self.done: dict[int, Hypothesis] = {}  # by beam

    @property
    def num_candidates(self) -> int:
        return 1

    def hypotheses(self, reason: FinishReason | None = None) -> list[Hypothesis]:
        cut_off = FinishReason.LENGTH if reason is None else reason
        return [
            self.done.get(beam) or Hypothesis(node, total, total, cut_off, node.length)
            for beam, (node, total) in enumerate(zip(self.live, self.cum_log_probs, strict=True))
        ][: self.num_results]

    def _advance(self, candidates: BeamCandidates) -> bool:
        width, is_first = self.params.width, not self.live
        totals = self.cum_log_probs or [0.0] * width
        nodes: list[BeamNode] = []
        for beam in range(width):
            (token,), (log_prob,) = candidates.tokens[beam], candidates.log_probs[beam]
            if token < 0 and beam not in self.done:
                self.fault = token
                return True
            token = max(token, 0)  # a beam that has ended may have a negative token
            parent = 0 if is_first else beam
            node, end = self.extend(parent, token, log_prob)
            nodes.append(node)
            totals[beam] += log_prob
            if beam not in self.done and end is not None:
                self.done[beam] = Hypothesis(node, totals[beam], totals[beam], *end)
        self.parents = [0] * width if is_first else list(range(width))
        self.live, self.cum_log_probs = nodes, totals
        self.ended = list(self.done.values())
        self.length += 1
        return len(self.done) == width


def _common_length(nodes: Iterable[BeamNode]) -> int:
    """Return the length of the longest prefix that all nodes' beams share."""
    level: set[BeamNode] = set(nodes)
    while len(level) > 1:
        deepest = max(node.length for node in level)
        if deepest == 1:
            return 0
        level = {
            node.parent if node.length == deepest and node.parent is not None else node
            for node in level
        }
    return next(iter(level)).length
