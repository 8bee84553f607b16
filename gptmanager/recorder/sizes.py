"""How many bytes the values of a black box take: estimates, rather too high than too low.

They look at lengths alone: a turn of the loop must not pay for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gptmanager.kv_cache.state import KvCacheState
from gptmanager.loop.loop_state import LoopState
from gptmanager.recorder.recording import Turn
from gptmanager.request.inference_request import InferenceRequest
from gptmanager.step import BeamCandidates, Schedule, SequenceStart

_NUMBER = 40  # in a list or tuple: the number, and the reference to it
_OBJECT = 200  # with a few attributes, or a tuple of some numbers
_TURN = 4 * _OBJECT
_REQUEST = 10 * _OBJECT  # its state: twoscore values
_NODE = 3 * _OBJECT  # of a beam, with its values
_MAX_DEPTH = 8  # of lists in lists: a list may hold itself


def turn_bytes(turn: Turn) -> int:
    """Without the schedule, which is not kept as long."""
    size = _TURN
    intake, result = turn.intake, turn.result
    if intake.requests or intake.stops or intake.failures or intake.ready:
        size += _OBJECT * (len(intake.stops) + len(intake.failures) + len(intake.ready))
        size += sum(map(_request_bytes, intake.requests))
    if result is not None:
        size += result.tokens.nbytes
        if result.num_tokens is not None:
            size += result.num_tokens.nbytes
        if result.beams or result.failures:
            size += _OBJECT * len(result.failures) + sum(map(_candidates_bytes, result.beams))
    return size


def schedule_bytes(schedule: Schedule) -> int:
    rows = len(schedule.context_rows) + len(schedule.generation_rows)
    size = _OBJECT * (1 + 2 * rows + len(schedule.block_copies))
    for append in schedule.block_appends:
        size += _OBJECT + _NUMBER * len(append.block_ids)
    if schedule.starts:
        size += sum(map(_start_bytes, schedule.starts))
    if schedule.beam_forks or schedule.drafts:
        size += sum(_OBJECT + 2 * _NUMBER * len(fork.tokens) for fork in schedule.beam_forks)
        size += sum(_OBJECT + _NUMBER * len(drafts.tokens) for drafts in schedule.drafts)
    return size


def state_bytes(state: LoopState) -> int:
    request_table = state.request_table
    size = _OBJECT + (0 if state.pending is None else schedule_bytes(state.pending))
    for request in request_table.active:
        num_tokens = request.progress.num_tokens
        size += _REQUEST + _NUMBER * num_tokens
        size += sum(_OBJECT + _NUMBER * len(word) for word in request.sampling.bad_words)
        size += sum(_OBJECT + _NUMBER * len(word) for word in request.end_rule.words or ())
        if request.beams is not None:
            num_generated = num_tokens - request.progress.prompt_len
            size += _NODE * request.beams.width * (num_generated + 1)
    return size + _kv_cache_bytes(request_table.allocator.kv_cache)


def _kv_cache_bytes(state: KvCacheState) -> int:
    size = _NUMBER * len(state.free)
    for sequence in state.sequences:
        size += _OBJECT + _NUMBER * sum(map(len, sequence.tables))
    if state.reuse is not None:
        size += _OBJECT * (len(state.reuse.roots) + len(state.reuse.nodes))
        size += _NUMBER * sum(len(node.tokens) for node in state.reuse.nodes)
        if state.reuse.host is not None:
            size += _NUMBER * (len(state.reuse.host.free) + len(state.reuse.host.evictable))
    return size


def _request_bytes(request: InferenceRequest) -> int:
    return _REQUEST + sum(_OBJECT + value_bytes(value) for value in request.tensors.values())


def value_bytes(value: Any, depth: int = 0) -> int:
    """Of what a host gave as a tensor: anything."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return _length(value)
    if isinstance(value, (str, bytes)):
        return 4 * len(value)
    if isinstance(value, (list, tuple)) and depth < _MAX_DEPTH:
        return _NUMBER * len(value) + sum(value_bytes(item, depth + 1) for item in value)
    return _NUMBER


def _length(array: np.ndarray | torch.Tensor) -> int:
    try:
        return _OBJECT + int(array.nbytes)
    except RuntimeError:  # a layout that has none
        return _OBJECT + 8 * array.numel() if isinstance(array, torch.Tensor) else _OBJECT


def _candidates_bytes(candidates: BeamCandidates) -> int:
    return _OBJECT + sum(_OBJECT + 2 * _NUMBER * len(tokens) for tokens in candidates.tokens)


def _start_bytes(start: SequenceStart) -> int:
    words = sum(_OBJECT + _NUMBER * len(word) for word in start.sampling.bad_words)
    return 3 * _OBJECT + _NUMBER * len(start.tokens) + words
