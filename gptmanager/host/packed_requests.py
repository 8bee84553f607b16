"""Converts requests to bytes and back, for messages between ranks.

The bytes are a JSON header, and then the raw data of the tensors. The header also contains values
that admission will refuse, in the form that recordings use, so that the other ranks refuse them,
too. Only the name of a logits post-processor is sent.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from gptmanager.recorder.requests import (
    Allowance,
    plain_keywords,
    plain_or_opaque,
    tensor_from_plain,
    value_from_plain,
)
from gptmanager.request.arrays import is_too_large
from gptmanager.request.inference_request import KEYWORDS, InferenceRequest

ALIGNMENT = 8  # arrays start at multiples of this many bytes
_MOST_VIEW_BYTES = 1 << 28  # limit for LoRA weights with overlapping elements
# up to this size, the arrays of a message are views of one copy; else each has its own copy
_SHARED_BYTES = 1 << 16
_PADDING = [bytes(-size % ALIGNMENT) for size in range(ALIGNMENT)]
_NUMPY = {np.dtype(char): np.dtype(char).str for char in "?bBhHiIlLqQefd"}
_NUMBERS = "biuf"  # NumPy dtype kinds
_READ_NUMPY = {name: dtype for dtype, name in _NUMPY.items()}
_TORCH = {
    str(dtype): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    )
}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element
_keywords = operator.attrgetter(*KEYWORDS)
_DEFAULTS = _keywords(InferenceRequest(0))


class PackedRequests:
    """Requests packed as `entries` and `arrays`.

    `entries`, the header, has a tuple for each request: its id, the name, dtype and shape of each
    tensor, and its other fields. `arrays` has the bytes of the arrays, one after another. Without
    `with_processors`, the names of logits post-processors are left out.
    """

    def __init__(self, requests: Iterable[InferenceRequest], with_processors: bool = True) -> None:
        self.arrays: list[Any] = []
        self._with_processors = with_processors
        self.entries = [self._entry(request) for request in requests]

    def _entry(self, request: InferenceRequest) -> tuple[Any, ...]:
        found: list[Any] = []
        odd: dict[str, Any] = {}
        for name, value in list(request.tensors.items()):
            dtype = _NUMPY.get(value.dtype) if type(value) is np.ndarray else None
            if dtype is None or not value.flags.c_contiguous or is_too_large(name, value):
                dense = _dense(name, value)
                if dense is None:
                    odd[str(name)] = plain_or_opaque(name, value)
                    continue
                dtype, shape, value = dense
            else:
                shape = value.shape
            found += (str(name), dtype, shape)
            self.arrays.append(value.data)
            if value.nbytes % ALIGNMENT:
                self.arrays.append(_PADDING[value.nbytes % ALIGNMENT])
        is_plain = all(map(operator.is_, _keywords(request), _DEFAULTS))  # true for most requests
        keywords = {} if is_plain else plain_keywords(request)
        if not self._with_processors:
            keywords.pop("logits_post_processor", None)
        more = (keywords, odd) if keywords or odd else ()
        return request.request_id, found, *more


def read_requests(entries: Iterable[Any], arrays: memoryview) -> list[InferenceRequest]:
    """Read requests from the two parts of `PackedRequests`.

    Malformed data may raise any exception.
    """
    is_short = len(arrays) <= _SHARED_BYTES
    memory = bytearray(arrays) if is_short else arrays
    requests, end = [], 0
    for request_id, found, *rest in entries:
        tensors: dict[str, Any] = {}
        for name, dtype, shape in zip(found[::3], found[1::3], found[2::3], strict=True):
            own = _TORCH.get(dtype)
            read = _numpy_dtype(dtype) if own is None else f"i{own.itemsize}"
            # raises if `memory` is too short
            array: np.ndarray = np.ndarray(shape, read, memory, end)
            if array.shape != tuple(shape):
                raise ValueError(f"tensor {name}: invalid shape")
            end += array.nbytes + -array.nbytes % ALIGNMENT
            if not is_short:
                array = array.copy()
            tensors[name] = array if own is None else torch.from_numpy(array).view(own)
        requests.append(_request(request_id, tensors, *rest))
    if end != len(arrays):
        raise ValueError(f"got {len(arrays)} bytes of tensors, but their shapes need {end}")
    return requests


def _request(
    request_id: int,
    tensors: dict[str, Any],
    keywords: dict[str, Any] | None = None,
    odd: dict[str, Any] | None = None,
) -> InferenceRequest:
    if type(request_id) is not int:
        raise TypeError("the id of a request must be an integer")
    allowance = Allowance()
    for name, value in (odd or {}).items():
        tensors[name] = tensor_from_plain(name, value, allowance)
    given = {name: value_from_plain(value) for name, value in (keywords or {}).items()}
    return InferenceRequest(request_id, tensors, **given)


def _dense(name: str, value: Any) -> tuple[str, list[int], np.ndarray] | None:
    """Return dtype, shape and data of a value; None if it cannot be sent as an array."""
    try:
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype)
            is_plain = value.layout is torch.strided and not (value.is_meta or value.is_nested)
            if not is_plain or dtype not in _TORCH or _claims_too_much(name, value):
                return None
            bits = value.detach().cpu().contiguous().view(_BITS[value.itemsize])
            return dtype, list(value.shape), bits.numpy()
        if isinstance(value, (list, tuple)) and name == "lora_weights":
            value = np.asarray(value)  # same conversion as in admission
        if isinstance(value, np.ndarray) and value.dtype.kind in _NUMBERS:
            if not _claims_too_much(name, value):
                # read before `ascontiguousarray`, which adds a dimension to a scalar
                shape = list(value.shape)
                return value.dtype.str, shape, np.ascontiguousarray(value)
    except BaseException:  # noqa: B036 - a host's object may raise anything; admission reports it
        return None
    return None


def _claims_too_much(name: str, value: Any) -> bool:
    """Return whether admission refuses a value because of its size, so it must not be copied."""
    if name == "lora_weights":
        strides = value.stride() if isinstance(value, torch.Tensor) else value.strides
        return 0 in strides and value.nbytes > _MOST_VIEW_BYTES
    return is_too_large(name, value)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    known = _READ_NUMPY.get(name)
    if known is None:
        known = np.dtype(name)
        if known.kind not in _NUMBERS:
            raise ValueError(f"unknown dtype {name}")
    return known
