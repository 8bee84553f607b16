"""`PendingRequests`: requests that wait for the manager, in the order of their priority.

Requests of equal priority are in the order of their arrival. The class also checks the limits of
the queue. It is not thread-safe.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

from gptmanager import InferenceRequest
from gptmanager.errors import CapacityError

_DEFAULT_PRIORITY = 0.5
_NOUNS = ("prompt tokens", "bytes of tensors")


class Size(NamedTuple):
    """Numbers of requests, of prompt tokens, and of bytes in the requests' tensors."""

    requests: int
    tokens: int
    bytes: int

    @classmethod
    def of(cls, request: InferenceRequest) -> Size:
        prompt = request.tensors.get("input_ids")
        return cls(1, _num_items(prompt), sum(map(_num_bytes, request.tensors.values())))

    @classmethod
    def sum(cls, sizes: Iterable[Size]) -> Size:
        return cls(*map(sum, zip(*sizes, strict=True)))


class PendingRequests:
    """A priority queue from which any request can be removed.

    `limits` maps names of options to limits. It has one entry for each field of `Size`, in the
    order of the fields. A limit of None means no limit.
    """

    def __init__(self, limits: dict[str, int | None] | None = None) -> None:
        self._limits = limits or dict.fromkeys(Size._fields)
        self._levels: dict[float, OrderedDict[int, InferenceRequest]] = {}
        self._level_of: dict[int, float] = {}
        self._size_of: dict[int, Size] = {}
        self.size = Size(0, 0, 0)

    def __len__(self) -> int:
        return len(self._level_of)

    def push(self, request: InferenceRequest) -> None:
        level = _level(request.priority)
        self._levels.setdefault(level, OrderedDict())[request.request_id] = request
        self._level_of[request.request_id] = level
        size = self._size_of[request.request_id] = Size.of(request)
        self.size = Size(*(have + more for have, more in zip(self.size, size, strict=True)))

    def excess(self, size: Size) -> str:
        """Describe the first limit that additional requests of `size` exceed; "" if they fit.

        Raise CapacityError if `size` alone exceeds any of the limits.
        """
        found = ""
        for (name, limit), have, more, noun in zip(
            self._limits.items(), self.size, size, ("requests", *_NOUNS), strict=True
        ):
            if limit is None or have + more <= limit:
                continue
            if more > limit:
                what = "one call" if size.requests > 1 else "a request"
                raise CapacityError(f"{what} of {more} {noun} exceeds {name} = {limit}")
            found = found or f"{have} {noun} are pending, {more} more would exceed {name} = {limit}"
        return found

    def pop(self, count: int) -> list[InferenceRequest]:
        """Remove and return the next `count` requests, or all if there are fewer."""
        popped: list[InferenceRequest] = []
        while self._levels and len(popped) < count:
            level = max(self._levels)
            requests = self._levels[level]
            while requests and len(popped) < count:
                request_id, request = requests.popitem(last=False)
                del self._level_of[request_id]
                self._forget_size(request_id)
                popped.append(request)
            if not requests:
                del self._levels[level]
        return popped

    def take(self, request_id: int) -> InferenceRequest | None:
        """Remove and return this request; None if it is not in the queue."""
        level = self._level_of.pop(request_id, None)
        if level is None:
            return None
        request = self._levels[level].pop(request_id)
        if not self._levels[level]:
            del self._levels[level]
        self._forget_size(request_id)
        return request

    def _forget_size(self, request_id: int) -> None:
        size = self._size_of.pop(request_id)
        self.size = Size(*(have - less for have, less in zip(self.size, size, strict=True)))


def _level(priority: Any) -> float:
    # the manager refuses an invalid priority; until then the request waits at the default
    is_number = isinstance(priority, (int, float)) and not math.isnan(priority)
    return float(priority) if is_number else _DEFAULT_PRIORITY


def _num_items(value: Any) -> int:
    """Return the number of items of a tensor, array or list; the manager refuses other types."""
    try:
        return math.prod(value.shape) if hasattr(value, "shape") else len(value)
    except TypeError:
        return 0


def _num_bytes(value: Any) -> int:
    size = getattr(value, "nbytes", None)
    return size if isinstance(size, int) else 8 * _num_items(value)
