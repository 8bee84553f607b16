"""The tensors of responses to a request with several beams: a row a beam, the best one first.

While the search goes on only what all its beams share may be sent, since it is all that no later
step changes; the beams part in the final response.
"""

from __future__ import annotations

import torch

from gptmanager.active import ActiveRequest
from gptmanager.api import NamedTensor
from gptmanager.config import FinishReason
from gptmanager.decoding.beam_search import BeamSearch, Hypothesis


def stream_beams(request: ActiveRequest, end: int) -> list[NamedTensor]:
    """What has become stable up to history position `end`, the same in each beam."""
    search = _search(request)
    start, request.num_sent = request.num_sent - request.orig_prompt_len, end
    tokens = search.shared_path()[start : end - request.orig_prompt_len]
    return _rows(request, [tokens] * request.beam_width, start, len(tokens))


def final_beams(request: ActiveRequest, reason: FinishReason) -> list[NamedTensor]:
    """Tokens, lengths and finish reasons of all beams; `reason` cuts off a search not over yet."""
    search = _search(request)
    found = search.hypotheses(None if search.is_over else reason)
    rows = [[node.token for node in beam.node.path()][: beam.end] for beam in found]
    rows += [[] for _ in range(request.beam_width - len(found))]  # there are no more beams
    if request.is_streaming:
        start = request.num_sent - request.orig_prompt_len
        rows = [row[start:] for row in rows]
        tensors = _rows(request, rows, start, max(map(len, rows)))
    else:
        first = request.orig_prompt_len if request.exclude_input else 0
        prompt = request.tokens[first : request.orig_prompt_len]
        rows = [prompt + row for row in rows]
        tensors = _rows(request, rows, None, request.length_limit - first)
    return [*tensors, _finish_reasons(found, reason, request.beam_width)]


def _search(request: ActiveRequest) -> BeamSearch:
    if request.search is None:
        raise TypeError(f"request {request.request_id} has one beam")
    return request.search


def _rows(
    request: ActiveRequest, rows: list[list[int]], offset: int | None, width: int
) -> list[NamedTensor]:
    padded = [row + [request.pad_id] * (width - len(row)) for row in rows]
    lengths = [[len(row) for row in rows]]
    tensors = [
        NamedTensor("output_ids", torch.tensor([padded], dtype=torch.int32)),
        NamedTensor("sequence_length", torch.tensor(lengths, dtype=torch.int32)),
    ]
    if offset is not None:
        tensors.append(NamedTensor("output_offset", torch.tensor([offset], dtype=torch.int32)))
    return tensors


def _finish_reasons(found: list[Hypothesis], reason: FinishReason, beam_width: int) -> NamedTensor:
    reasons = [beam.reason for beam in found] + [reason] * (beam_width - len(found))
    return NamedTensor("finish_reasons", torch.tensor([reasons], dtype=torch.int32))
