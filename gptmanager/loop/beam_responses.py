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
from gptmanager.loop.extras import RequestExtras
from gptmanager.request.inference_request import NamedTensor

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


def stable_beams(request: ActiveRequest, end: int) -> Beams:
    """What has become stable up to history position `end`, the same in each beam."""
    search = _search(request)
    start = request.num_sent - request.orig_prompt_len
    path = search.stable_path()[: end - request.orig_prompt_len]
    total, nodes = _sum(path), path[start:]
    return Beams([nodes] * search.num_results, [total] * search.num_results, [])


def final_beams(request: ActiveRequest, reason: FinishReason) -> Beams:
    """What has not been sent of all beams; `reason` cuts off a search that is not over yet."""
    search = _search(request)
    found = search.hypotheses(None if search.is_over else reason)
    missing = search.num_results - len(found)  # a small vocabulary has no more
    start = request.num_sent - request.orig_prompt_len if request.output.is_streaming else 0
    paths = [beam.node.path()[: beam.end] for beam in found]
    return Beams(
        [path[start:] for path in paths] + [[] for _ in range(missing)],
        [_sum(path) for path in paths] + [_NEVER] * missing,
        [beam.reason for beam in found] + [reason] * missing,
    )


def beam_extras(request: ActiveRequest, found: RequestExtras, beams: Beams) -> list[NamedTensor]:
    """What was asked for besides tokens; beams that are shorter than the longest end in zeros."""
    tensors = []
    if request.output.config.generation_logits:
        logits = _padded(beams.nodes, lambda nodes: found.beam_generation(nodes))
        tensors.append(NamedTensor("generation_logits", logits))
    if request.output.config.log_probs:
        log_probs = _padded(beams.nodes, _log_probs)
        tensors.append(NamedTensor("output_log_probs", log_probs))
        tensors.append(NamedTensor("cum_log_probs", torch.tensor([beams.cum_log_probs])))
    return tensors


def _sum(path: Sequence[BeamNode]) -> float:
    return math.fsum(node.log_prob for node in path)


def _search(request: ActiveRequest) -> BeamSearch:
    if request.search is None:
        raise TypeError(f"request {request.request_id} has one beam")
    return request.search


def _log_probs(nodes: Sequence[BeamNode]) -> Tensor:
    return torch.tensor([node.log_prob for node in nodes], dtype=torch.float32)


def _padded(beams: list[list[BeamNode]], values: Callable[[Sequence[BeamNode]], Tensor]) -> Tensor:
    """`[1, beam, n, ...]`."""
    return torch.nn.utils.rnn.pad_sequence([values(nodes) for nodes in beams], batch_first=True)[
        None
    ]
