"""The tensors of responses, in the order of the contract's table.

Knows what a request has generated and sent; never decides when it ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from gptmanager.config import FinishReason
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.loop.beam_responses import Beams, final_beams, log_probs_of, padded, stable_beams
from gptmanager.loop.extras import HeldExtras, RequestExtras
from gptmanager.request.inference_request import NamedTensor

# the tensors of the final response to a request: why it ends, where its output does, its extras
MakeFinal = Callable[[ActiveRequest, FinishReason, int, HeldExtras], list[NamedTensor]]

# the fields of `request_metrics`; times in seconds since Get returned the request, NaN: never
REQUEST_METRICS = (
    "queue_s",  # until its first computation
    "first_token_s",
    "last_token_s",
    "pauses",
    "cached_tokens",  # prompt tokens taken from the KV cache instead of computed
    "prompt_tokens",
    "generated_tokens",  # end_id and stop words included
)

# tensors beside the tokens, in the order of the table
_EXTRAS = ("context_logits", "generation_logits", "output_log_probs", "cum_log_probs")
# sent whenever logits were not asked for: the contract's dummies, shared by all responses
_NO_LOGITS = (
    NamedTensor("context_logits", torch.zeros(1, 1, 1, dtype=torch.float32)),
    NamedTensor("generation_logits", torch.zeros(1, 1, 1, 1, dtype=torch.float32)),
)


def stream_one_token(requests: Sequence[ActiveRequest]) -> list[list[NamedTensor]]:
    """One response for each request: its last token, which is the only one not sent yet.

    One tensor a step, unbound into views: a tensor per value would cost 2.6 us each.
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
    """The tokens of `request` that have not been sent, up to history position `end`."""
    beams = None if request.search is None else stable_beams(request, request.search, end)
    start, request.num_sent = request.num_sent, end
    tensors = _tokens(request, start, end, beams)
    if request.has_extras:
        extras = _extras(request, held[request.request_id], start, end, beams)
        if not request.output.config.context_logits or extras[0].tensor.shape[1]:
            tensors[2:2] = extras
        else:  # they have been sent
            tensors[2:2] = extras[1:]
    return tensors


def final_tensors(
    request: ActiveRequest, reason: FinishReason, output_end: int, held: HeldExtras
) -> list[NamedTensor]:
    """The final response; output is the history up to position `output_end`."""
    start = request.num_sent if request.output.is_streaming else request.orig_prompt_len
    output_end = max(output_end, start)
    beams = None if request.search is None else final_beams(request, request.search, reason)
    reasons = [reason] if beams is None else beams.reasons
    tensors = _tokens(request, start, output_end, beams)
    extras = list(_NO_LOGITS)
    if request.has_extras:
        found = _extras(request, held[request.request_id], start, output_end, beams)
        names = {name for name, _ in found}
        extras = [dummy for dummy in extras if dummy.name not in names] + found
        extras.sort(key=lambda tensor: _EXTRAS.index(tensor.name))
    return [
        *tensors[:2],
        *extras,
        *tensors[2:],
        NamedTensor("finish_reasons", torch.tensor([reasons], dtype=torch.int32)),
        NamedTensor("request_metrics", _metrics(request)),
    ]


def _extras(
    request: ActiveRequest, found: RequestExtras, start: int, end: int, beams: Beams | None
) -> list[NamedTensor]:
    """What was asked for besides tokens, of the history positions `start` to `end`.

    Beams that are shorter than the longest end in zeros.
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
            logits = padded(beams.nodes, found.beam_generation)
        tensors.append(NamedTensor("generation_logits", logits))
    if config.log_probs:
        if beams is None:
            log_probs, sums = found.log_probs(start, end), found.cum_log_probs(end)
        else:
            log_probs, sums = padded(beams.nodes, log_probs_of), torch.tensor([beams.cum_log_probs])
        tensors.append(NamedTensor("output_log_probs", log_probs))
        tensors.append(NamedTensor("cum_log_probs", sums))
    return tensors


def _tokens(request: ActiveRequest, start: int, end: int, beams: Beams | None) -> list[NamedTensor]:
    """Tokens, a row a beam, and lengths; and where they go on if the request streams.

    Of a request that does not stream they stand behind the prompt.
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


def _metrics(request: ActiveRequest) -> torch.Tensor:
    times = request.times
    since_arrival = (times.first_scheduled, times.first_token, times.last_token)
    return torch.tensor(
        [
            *(math.nan if time is None else time - times.arrival for time in since_arrival),
            request.pause_count,
            request.cached_tokens,
            request.orig_prompt_len,
            request.num_output,
        ],
        dtype=torch.float64,
    )
