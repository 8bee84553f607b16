"""Estimates of the bytes of values that a black box keeps. An estimate may be too high."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from gptmanager.decoding.deferred import Deferred
from gptmanager.kv_cache.state import CachedBlockState
from gptmanager.peft_cache.state import AdapterState
from gptmanager.request.inference_request import InferenceRequest

_NUMBER = 40  # bytes of a number and the reference to it in a list or tuple
OBJECT = 200  # bytes of an object with a few attributes, or of a tuple with a few numbers
_MAX_DEPTH = 8  # limits recursion: a list may contain itself
_PLAIN = {int, float, bool, type(None)}


def value_bytes(value: Any, depth: int = 0) -> int:
    """Estimate the bytes of a value, which is data of the loop or a tensor of the host."""
    if type(value) is CachedBlockState:  # too many blocks to examine the values of each
        return _NUMBER * (11 + len(value.tokens))
    if type(value) is AdapterState:
        return _NUMBER * (12 + 6 * len(value.rows)) + 4 * len(value.digest)
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return _length(value)
    if isinstance(value, (str, bytes)):
        return 4 * len(value)
    if isinstance(value, Deferred):
        return _NUMBER * value.num_values
    if isinstance(value, InferenceRequest):
        return 10 * OBJECT + sum(OBJECT + value_bytes(item) for item in value.tensors.values())
    if depth >= _MAX_DEPTH:
        return _NUMBER
    if isinstance(value, (list, tuple)):
        size = (2 + len(value)) * _NUMBER
        if set(map(type, value)) <= _PLAIN:
            return size
        return size + sum(value_bytes(item, depth + 1) for item in value)
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return OBJECT + sum(value_bytes(getattr(value, f.name), depth + 1) for f in fields)
    return _NUMBER


def _length(array: np.ndarray | torch.Tensor) -> int:
    try:
        strides = array.stride() if isinstance(array, torch.Tensor) else array.strides
        if array.ndim and not any(strides):  # one number repeated
            return OBJECT
        return OBJECT + int(array.nbytes)
    except RuntimeError:  # a layout without strides or storage
        return OBJECT + 8 * array.numel() if isinstance(array, torch.Tensor) else OBJECT
