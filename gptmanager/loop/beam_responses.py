"""The tensors of responses to a request with several beams: a row a beam, the best one first.

While the search goes on only what all its beams share may be sent, since it is all that no later
step changes; the beams part in the final response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gptmanager.config import FinishReason
from gptmanager.decoding.beam_search import BeamNode, BeamSearch
from gptmanager.loop.active_request import ActiveRequest

_NEVER = float("-inf")  # the log probability of a beam that there is not


class Beams(NamedTuple):
    """What a response holds of each beam.

    `cum_log_probs` are the sums over all output so far, and over nothing that was cut off.
    """

    nodes: list[list[BeamNode]]
    cum_log_probs: list[float]
    reasons: list[FinishReason]

    @property
    def tokens(self) -> list[list[int]]:
        return [[node.token for node in nodes] for nodes in self.nodes]


def stable_beams(request: ActiveRequest, search: BeamSearch, end: int) -> Beams:
    """What has become stable up to history position `end`, the same in each beam."""
    start = request.num_sent - request.orig_prompt_len
    path = search.stable_path()[: end - request.orig_prompt_len]
    total, nodes = _sum(path), path[start:]
    return Beams([nodes] * search.num_results, [total] * search.num_results, [])


def final_beams(request: ActiveRequest, search: BeamSearch, reason: FinishReason) -> Beams:
    """What has not been sent of all beams; `reason` cuts off a search that is not over yet."""
    found = search.hypotheses(None if search.is_over else reason)
    missing = search.num_results - len(found)  # a small vocabulary has no more
    start = request.num_sent - request.orig_prompt_len if request.output.is_streaming else 0
    paths = [beam.node.path()[: beam.end] for beam in found]
    return Beams(
        [path[start:] for path in paths] + [[] for _ in range(missing)],
        [_sum(path) for path in paths] + [_NEVER] * missing,
        [beam.reason for beam in found] + [reason] * missing,
    )


def _sum(path: Sequence[BeamNode]) -> float:
    return math.fsum(node.log_prob for node in path)


def log_probs_of(nodes: Sequence[BeamNode]) -> Tensor:
    return torch.tensor([node.log_prob for node in nodes], dtype=torch.float32)


def padded(beams: list[list[BeamNode]], values: Callable[[Sequence[BeamNode]], Tensor]) -> Tensor:
    """`[1, beam, n, ...]`."""
    return torch.nn.utils.rnn.pad_sequence([values(nodes) for nodes in beams], batch_first=True)[
        None
    ]
