"""`ParallelSampling`: several texts of one prompt, each sampled for itself.

To the loop and the KV cache they are beams that part after the prompt and never fork again.
"""

from __future__ import annotations

from gptmanager.config import FinishReason
from gptmanager.decoding.beam_search import BeamNode, BeamSearch, Hypothesis
from gptmanager.step import BeamCandidates


class ParallelSampling(BeamSearch):
    """Each beam has one candidate a step, the token that was drawn for it.

    A text that has ended stays, and what is drawn behind its end is forgotten, until all have
    ended. Results stand in the order of the texts.
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
            token = max(token, 0)  # behind the end
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
