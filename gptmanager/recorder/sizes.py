"""How many bytes values take that a black box keeps: estimates, rather too high than too low.

They look at lengths alone: a turn of the loop must not pay for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gptmanager.kv_cache.state import KvCacheState
from gptmanager.loop.loop_state import RequestTableState
from gptmanager.request.inference_request import InferenceRequest
from gptmanager.step import BeamCandidates, SequenceStart

NUMBER = 40  # in a list or tuple: the number, and the reference to it
OBJECT = 200  # with a few attributes, or a tuple of some numbers
_REQUEST = 10 * OBJECT  # its state: some 40 values
_NODE = 3 * OBJECT  # of a beam, with its values
_MAX_DEPTH = 8  # of lists in lists: a list may hold itself


def table_bytes(request_table: RequestTableState) -> int:
    size = OBJECT
    for request in request_table.active:
        num_tokens = request.progress.num_tokens
        size += _REQUEST + NUMBER * num_tokens
        size += sum(OBJECT + NUMBER * len(word) for word in request.sampling.bad_words)
        size += sum(OBJECT + NUMBER * len(word) for word in request.end_rule.words or ())
        if request.beams is not None:
            num_generated = num_tokens - request.progress.prompt_len
            size += _NODE * request.beams.width * (num_generated + 1)
    return size + _kv_cache_bytes(request_table.allocator.kv_cache)


def _kv_cache_bytes(state: KvCacheState) -> int:
    size = NUMBER * len(state.free)
    for sequence in state.sequences:
        size += OBJECT + NUMBER * sum(map(len, sequence.tables))
    if state.reuse is not None:
        size += OBJECT * (len(state.reuse.roots) + len(state.reuse.nodes))
        size += NUMBER * sum(len(node.tokens) for node in state.reuse.nodes)
        if state.reuse.host is not None:
            size += NUMBER * (len(state.reuse.host.free) + len(state.reuse.host.evictable))
    return size


def request_bytes(request: InferenceRequest) -> int:
    return _REQUEST + sum(OBJECT + value_bytes(value) for value in request.tensors.values())


def value_bytes(value: Any, depth: int = 0) -> int:
    """Of what a host gave as a tensor: anything."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return _length(value)
    if isinstance(value, (str, bytes)):
        return 4 * len(value)
    if isinstance(value, (list, tuple)) and depth < _MAX_DEPTH:
        return NUMBER * len(value) + sum(value_bytes(item, depth + 1) for item in value)
    return NUMBER


def _length(array: np.ndarray | torch.Tensor) -> int:
    try:
        return OBJECT + int(array.nbytes)
    except RuntimeError:  # a layout that has none
        return OBJECT + 8 * array.numel() if isinstance(array, torch.Tensor) else OBJECT


def candidates_bytes(candidates: BeamCandidates) -> int:
    return OBJECT + sum(OBJECT + 2 * NUMBER * len(tokens) for tokens in candidates.tokens)


def start_bytes(start: SequenceStart) -> int:
    words = sum(OBJECT + NUMBER * len(word) for word in start.sampling.bad_words)
    return 3 * OBJECT + NUMBER * len(start.tokens) + words
