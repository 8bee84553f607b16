"""How many bytes values take that a black box keeps: estimates, rather too high than too low."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from gptmanager.loop.token_loop import LoopState
from gptmanager.recorder.recording import Turn
from gptmanager.request.inference_request import InferenceRequest
from gptmanager.step import Schedule

_NUMBER = 40  # in a list or tuple: the number, and the reference to it
_OBJECT = 200  # with a few attributes, or a tuple of some numbers
_MAX_DEPTH = 8  # of values in values: a list may hold itself
_PLAIN = {int, float, bool, type(None)}


def turn_bytes(turn: Turn) -> int:
    """Without the schedule, which is not kept as long. Most turns hold little to look at."""
    intake, result = turn.intake, turn.result
    size = 4 * _OBJECT
    if intake.requests or intake.stops or intake.failures or intake.ready:
        size += value_bytes((intake.requests, *intake.stops, intake.failures, intake.ready))
    if result is not None:
        size += result.tokens.nbytes
        if result.num_tokens is not None or result.beams or result.failures:
            size += value_bytes((result.num_tokens, result.beams, result.failures))
    return size


def schedule_bytes(schedule: Schedule) -> int:
    """It counts the rows alone: they are many."""
    rows = len(schedule.context_rows) + len(schedule.generation_rows)
    size = _OBJECT * (1 + 2 * rows + len(schedule.block_copies))
    for others in (schedule.block_appends, schedule.starts, schedule.beam_forks, schedule.drafts):
        if others:
            size += value_bytes(others)
    return size


def state_bytes(state: LoopState) -> int:
    return value_bytes(state)


def value_bytes(value: Any, depth: int = 0) -> int:
    """Of values of the loop, and of what a host gave as a tensor: anything."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return _length(value)
    if isinstance(value, (str, bytes)):
        return 4 * len(value)
    if isinstance(value, InferenceRequest):
        return 10 * _OBJECT + sum(_OBJECT + value_bytes(item) for item in value.tensors.values())
    if depth >= _MAX_DEPTH:
        return _NUMBER
    if isinstance(value, (list, tuple)):
        size = (2 + len(value)) * _NUMBER
        if set(map(type, value)) <= _PLAIN:
            return size
        return size + sum(value_bytes(item, depth + 1) for item in value)
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return _OBJECT + sum(value_bytes(getattr(value, f.name), depth + 1) for f in fields)
    return _NUMBER


def _length(array: np.ndarray | torch.Tensor) -> int:
    try:
        return _OBJECT + int(array.nbytes)
    except RuntimeError:  # a layout that has none
        return _OBJECT + 8 * array.numel() if isinstance(array, torch.Tensor) else _OBJECT
