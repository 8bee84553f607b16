"""Requests as bytes and back, data only: a head as JSON, then the raw bytes of tensors.

Values that admission refuses are written to the head as in a recording; admission refuses them on
the other ranks as well. Of a logits post-processor only the name is sent.
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
from gptmanager.request.inference_request import KEYWORDS, InferenceRequest
from gptmanager.request.read_tensors import is_too_large

ALIGNMENT = 8  # bytes: where an array begins
_MOST_VIEW_BYTES = 1 << 28  # of weights with overlapping elements
_SHARED_BYTES = 1 << 16  # arrays of a longer message are copied
_PADDING = [bytes(-size % ALIGNMENT) for size in range(ALIGNMENT)]
_NUMPY = {np.dtype(char): np.dtype(char).str for char in "?bBhHiIlLqQefd"}
_NUMBERS = "biuf"  # kinds of dtypes
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
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_keywords = operator.attrgetter(*KEYWORDS)
_DEFAULTS = _keywords(InferenceRequest(0))


class PackedRequests:
    """`entries`: the head, one list per request: its id; name, dtype and shape of each tensor; its
    other fields. `arrays`: bytes, one array after another.
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
    """Read requests from the two parts of `PackedRequests`; malformed ones raise any error."""
    is_short = len(arrays) <= _SHARED_BYTES
    memory = bytearray(arrays) if is_short else arrays
    requests, end = [], 0
    for request_id, found, *rest in entries:
        tensors: dict[str, Any] = {}
        for name, dtype, shape in zip(found[::3], found[1::3], found[2::3], strict=True):
            own = _TORCH.get(dtype)
            read = _numpy_dtype(dtype) if own is None else f"i{own.itemsize}"
            array: np.ndarray = np.ndarray(shape, read, memory, end)  # raises if too short
            if array.shape != tuple(shape):
                raise ValueError(f"tensor {name}: invalid shape")
            end += array.nbytes + -array.nbytes % ALIGNMENT
            if not is_short:
                array = array.copy()
            tensors[name] = array if own is None else torch.from_numpy(array).view(own)
        requests.append(_request(request_id, tensors, *rest))
    if end != len(arrays):
        raise ValueError(f"{len(arrays)} bytes of tensors, their shapes need {end}")
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
    """Return dtype, shape and numbers of a value; None: it cannot be sent as an array."""
    try:
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype)
            is_plain = value.layout is torch.strided and not (value.is_meta or value.is_nested)
            if not is_plain or dtype not in _TORCH or _claims_too_much(name, value):
                return None
            bits = value.detach().cpu().contiguous().view(_BITS[value.itemsize])
            return dtype, list(value.shape), bits.numpy()
        if isinstance(value, (list, tuple)) and name == "lora_weights":
            value = np.asarray(value)  # as admission does
        if isinstance(value, np.ndarray) and value.dtype.kind in _NUMBERS:
            if not _claims_too_much(name, value):
                shape = list(value.shape)  # `ascontiguousarray` makes 0 dimensions 1
                return value.dtype.str, shape, np.ascontiguousarray(value)
    except BaseException:  # noqa: B036 - a host's object; admission reports its error
        return None
    return None


def _claims_too_much(name: str, value: Any) -> bool:
    """Whether admission refuses a value by its size alone, so that it must not be copied."""
    if name == "lora_weights":
        strides = value.stride() if isinstance(value, torch.Tensor) else value.strides
        return 0 in strides and value.nbytes > _MOST_VIEW_BYTES
    return is_too_large(name, value)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    known = _READ_NUMPY.get(name)
    if known is None:
        known = np.dtype(name)
        if known.kind not in _NUMBERS:
            raise ValueError(f"dtype {name}")
    return known
