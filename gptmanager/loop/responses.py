"""The tensors of responses, in the order of the table in docs/requests.md.

This module does not decide when a request ends. With several beams the tensors have a row per beam,
the best beam first. During the search a streaming response has only the tokens that all beams
share, because later steps cannot change these tokens. The final response has the rest of each beam.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.config import FinishReason
from gptmanager.decoding.search.beam_search import BeamNode, BeamSearch
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.loop.extras import HeldExtras, RequestExtras
from gptmanager.request.inference_request import NamedTensor

# creates the tensors of a final response from the request, its finish reason, the history position
# at which its output ends, and the extras of all requests
MakeFinal = Callable[[ActiveRequest, FinishReason, int, HeldExtras], list[NamedTensor]]

# the values of `request_metrics`; times are in seconds since GetInferenceRequests returned the
# request, and NaN for an event that did not happen
REQUEST_METRICS = (
    "queue_s",  # until its first computation
    "first_token_s",
    "last_token_s",
    "pauses",  # number of pauses
    "cached_tokens",  # prompt tokens taken from the KV cache instead of computed
    "prompt_tokens",
    "generated_tokens",  # including end_id and stop words
    "first_weights_version",  # version of the weights at its first computation
    "weights_version",  # version of the weights at its end
)

_NEVER = float("-inf")  # the log probability of a missing beam
# the tensors that depend on a request's output options, in the order of the table
_EXTRAS = (
    *("context_logits", "generation_logits", "output_log_probs", "cum_log_probs"),
    *("top_log_probs", "top_log_prob_ids"),
    *("prompt_log_probs", "prompt_top_log_probs", "prompt_top_log_prob_ids"),
)
# placeholders in final responses without logits; all responses share these tensors
_NO_LOGITS = (
    NamedTensor("context_logits", torch.zeros(1, 1, 1, dtype=torch.float32)),
    NamedTensor("generation_logits", torch.zeros(1, 1, 1, 1, dtype=torch.float32)),
)


def finish_reason_name(tensors: Iterable[NamedTensor], default: str) -> str:
    """Return the name of the first beam's finish reason; `default` if the response has none."""
    reasons = dict(tensors).get("finish_reasons")
    return default if reasons is None else FinishReason(int(reasons[0, 0])).name


def stream_one_token(requests: Sequence[ActiveRequest]) -> list[list[NamedTensor]]:
    """Return one response per request. Only the last token of each request is unsent.

    The tensors are views of one tensor per step, because a new tensor costs 2.6 us.
    """
    rows = len(requests)
    values = np.empty((3, rows), dtype=np.int32)
    values[0] = [request.tokens[-1] for request in requests]
    values[1] = 1
    values[2] = [request.num_sent - request.orig_prompt_len for request in requests]
    for request in requests:
        request.num_sent += 1
    tokens, lengths, offsets = torch.from_numpy(values).unbind()
    return [
        [
            NamedTensor("output_ids", token),
            NamedTensor("sequence_length", length),
            NamedTensor("output_offset", offset),
        ]
        for token, length, offset in zip(
            tokens.view(rows, 1, 1, 1).unbind(),
            lengths.view(rows, 1, 1).unbind(),
            offsets.view(rows, 1).unbind(),
            strict=True,
        )
    ]


def stream_tokens(request: ActiveRequest, end: int, held: HeldExtras) -> list[NamedTensor]:
    """Return the unsent tokens of `request`, up to history position `end`."""
    beams = None if request.search is None else stable_beams(request, request.search, end)
    start, request.num_sent = request.num_sent, end
    tensors = _tokens(request, start, end, beams)
    if request.has_extras:
        extras = _extras(request, held[request.request_id], start, end, beams)
        are_sent = request.output.config.context_logits and not extras[0].tensor.shape[1]
        tensors[2:2] = extras[are_sent:]  # leaves out empty context logits
    return tensors


def final_tensors(
    request: ActiveRequest, reason: FinishReason, output_end: int, held: HeldExtras
) -> list[NamedTensor]:
    """Return the final response. The output ends at history position `output_end`."""
    start = request.num_sent  # the end of the prompt, unless the request streams
    output_end = max(output_end, start)
    beams = None if request.search is None else final_beams(request, request.search, reason)
    reasons = [reason] if beams is None else beams.reasons
    tensors = _tokens(request, start, output_end, beams)
    extras: Sequence[NamedTensor] = _NO_LOGITS
    if request.has_extras:
        found = _extras(request, held[request.request_id], start, output_end, beams)
        tensor_of = {**dict(_NO_LOGITS), **dict(found)}
        extras = [NamedTensor(name, tensor_of[name]) for name in _EXTRAS if name in tensor_of]
    return [
        *tensors[:2],
        *extras,
        *tensors[2:],
        NamedTensor("finish_reasons", torch.tensor([reasons], dtype=torch.int32)),
        NamedTensor("request_metrics", request_metrics(request)),
    ]


def _extras(
    request: ActiveRequest, found: RequestExtras, start: int, end: int, beams: Beams | None
) -> list[NamedTensor]:
    """Return the outputs other than tokens, for the history positions `start` to `end`.

    Beams shorter than the longest one are padded with zeros.
    """
    config = request.output.config
    start, end = start - request.orig_prompt_len, end - request.orig_prompt_len
    tensors = []
    if config.context_logits:
        tensors.append(NamedTensor("context_logits", found.take_context()))
    if config.generation_logits:
        if beams is None:
            logits = found.take_generation(start, end)
        else:
            logits = _padded(beams.nodes, found.beam_generation)
        tensors.append(NamedTensor("generation_logits", logits))
    if config.log_probs:
        if beams is None:
            log_probs, sums = found.log_probs(start, end), found.cum_log_probs(end)
        else:
            log_probs, sums = _padded(beams.nodes, _log_probs), torch.tensor([beams.cum_log_probs])
        tensors.append(NamedTensor("output_log_probs", log_probs))
        tensors.append(NamedTensor("cum_log_probs", sums))
    if config.num_top_log_probs:
        tensors += _top(found, config.num_top_log_probs, start, end, beams)
    if config.num_prompt_log_probs >= 0 and not found.prompt_is_sent:
        parts = found.take_prompt(config.num_prompt_log_probs)
        names = _EXTRAS[-3:] if config.num_prompt_log_probs else _EXTRAS[-3:-2]
        tensors += [NamedTensor(name, part) for name, part in zip(names, parts, strict=False)]
    return tensors


def _top(
    found: RequestExtras, count: int, start: int, end: int, beams: Beams | None
) -> list[NamedTensor]:
    """Return the best tokens at the output positions `start` to `end`, `[1, beam, n, count]`."""
    if beams is None:
        log_probs, ids = (part[None, None] for part in found.take_top(start, end, count))
    else:
        log_probs = _padded(beams.nodes, lambda nodes: found.beam_top(nodes, count).log_probs)
        ids = _padded(beams.nodes, lambda nodes: found.beam_top(nodes, count).ids)
    return [NamedTensor("top_log_probs", log_probs), NamedTensor("top_log_prob_ids", ids)]


def _tokens(request: ActiveRequest, start: int, end: int, beams: Beams | None) -> list[NamedTensor]:
    """Return the tokens, one row per beam, and the number of tokens in each row.

    A streaming response has only new tokens, and `output_offset`, the output position of the first
    new token. Without streaming, the tokens start with the prompt, unless the request excludes it.
    """
    rows = [request.tokens[start:end]] if beams is None else beams.tokens
    is_streaming, prompt_len = request.output.is_streaming, request.orig_prompt_len
    if is_streaming:
        width = max(map(len, rows))
    else:
        first = prompt_len if request.output.exclude_input else 0
        prompt = request.tokens[first:prompt_len]
        rows = [prompt + row for row in rows]
        width = request.length_limit - first
    output_ids = np.full((1, len(rows), width), request.output.pad_id, dtype=np.int32)
    for index, row in enumerate(rows):
        output_ids[0, index, : len(row)] = row
    tensors = [
        NamedTensor("output_ids", torch.from_numpy(output_ids)),
        NamedTensor("sequence_length", torch.tensor([[*map(len, rows)]], dtype=torch.int32)),
    ]
    if is_streaming:
        tensors.append(NamedTensor("output_offset", torch.tensor([start - prompt_len]).int()))
    return tensors


def request_metrics(request: ActiveRequest) -> Tensor:
    """Return the values of `REQUEST_METRICS`, float64."""
    times = request.times
    since_arrival = (times.first_scheduled, times.first_token, times.last_token)
    return torch.tensor(
        [
            *(math.nan if time is None else time - times.arrival for time in since_arrival),
            request.pause_count,
            request.cached_tokens,
            request.orig_prompt_len,
            request.num_output,
            *request.weights_versions,
        ],
        dtype=torch.float64,
    )


class Beams(NamedTuple):
    """The beams of a response.

    `nodes` has the unsent tokens of each beam. `cum_log_probs` has, for each beam, the sum of the
    log probabilities of all output so far, without tokens that were cut off.
    """

    nodes: list[list[BeamNode]]
    cum_log_probs: list[float]
    reasons: list[FinishReason]

    @property
    def tokens(self) -> list[list[int]]:
        return [[node.token for node in nodes] for nodes in self.nodes]


def stable_beams(request: ActiveRequest, search: BeamSearch, end: int) -> Beams:
    """Return the unsent output, up to history position `end`, that all beams share for good."""
    start = request.num_sent - request.orig_prompt_len
    path = search.stable_path()[: end - request.orig_prompt_len]
    total, nodes = _sum(path), path[start:]
    return Beams([nodes] * search.num_results, [total] * search.num_results, [])


def final_beams(request: ActiveRequest, search: BeamSearch, reason: FinishReason) -> Beams:
    """Return the unsent output of all beams.

    If the search is not over, `reason` is the finish reason of the beams that have not finished.
    """
    found = search.hypotheses(None if search.is_over else reason)
    missing = search.num_results - len(found)  # a small vocabulary permits fewer beams
    start = request.num_sent - request.orig_prompt_len
    paths = [beam.node.path()[: beam.end] for beam in found]
    return Beams(
        [path[start:] for path in paths] + [[] for _ in range(missing)],
        [_sum(path) for path in paths] + [_NEVER] * missing,
        [beam.reason for beam in found] + [reason] * missing,
    )


def _sum(path: Sequence[BeamNode]) -> float:
    return math.fsum(node.log_prob for node in path)


def _log_probs(nodes: Sequence[BeamNode]) -> Tensor:
    return torch.tensor([node.log_prob for node in nodes], dtype=torch.float32)


def _padded(beams: list[list[BeamNode]], values: Callable[[Sequence[BeamNode]], Tensor]) -> Tensor:
    """Return the values of all beams, padded, `[1, beam, n, ...]`."""
    return torch.nn.utils.rnn.pad_sequence([values(nodes) for nodes in beams], batch_first=True)[
        None
    ]
