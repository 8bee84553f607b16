"""`PendingRequests`: requests that wait for the manager, in the order of their priority.

Requests of equal priority are in the order of their arrival. The class also checks the limits of
the queue. It is not thread-safe. But a signal handler may interrupt any method except `pop`, which
the manager's thread calls, and may raise an exception or call other methods. Then the requests stay
consistent, and `size` counts too little until the queue is empty.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

from gptmanager import InferenceRequest
from gptmanager.arguments import at_least
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
        for name, limit in self._limits.items():
            if limit is not None:
                at_least(1, name, limit)
        self._pending: dict[int, _Pending] = {}  # by request id
        # the ids of each priority in the order of arrival; an interrupted method may leave more ids
        self._levels: dict[float, OrderedDict[int, None]] = {}
        self._tokens = self._bytes = 0

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def size(self) -> Size:
        """The total size of the pending requests."""
        return Size(len(self._pending), self._tokens, self._bytes)

    def push(self, request: InferenceRequest) -> None:
        request_id, size = request.request_id, Size.of(request)
        pending = _Pending(request, _level(request.priority), size)
        self._levels.setdefault(pending.level, OrderedDict())[request_id] = None
        self._pending[request_id] = pending
        self._tokens += size.tokens
        self._bytes += size.bytes

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
            ids = self._levels[level]
            while ids and len(popped) < count:
                request_id, _ = ids.popitem(last=False)
                pending = self._pending.get(request_id)
                if pending is not None and pending.level == level:
                    self._remove(pending)
                    popped.append(pending.request)
            if not ids:
                del self._levels[level]
        return popped

    def clear(self) -> set[int]:
        """Remove all requests, and return their ids."""
        ids = set(self._pending)
        self._pending.clear()
        self._levels.clear()
        self._tokens = self._bytes = 0
        return ids

    def take(self, request_id: int) -> InferenceRequest | None:
        """Remove and return this request; None if it is not in the queue."""
        pending = self._pending.get(request_id)
        if pending is None or not self._remove(pending):
            return None
        ids = self._levels.get(pending.level, OrderedDict())
        ids.pop(request_id, None)
        if not ids:
            self._levels.pop(pending.level, None)
        return pending.request

    def _remove(self, pending: _Pending) -> bool:
        # subtracted first: a count that stayed too high would keep requests out for ever
        self._tokens -= pending.size.tokens
        self._bytes -= pending.size.bytes
        is_found = self._pending.pop(pending.request.request_id, None) is not None
        if not self._pending:
            self._tokens = self._bytes = 0
        return is_found


class _Pending(NamedTuple):
    request: InferenceRequest
    level: float
    size: Size


def _level(priority: Any) -> float:
    try:
        level = float(priority)  # also of a NumPy or torch scalar
    except Exception:  # the manager refuses it; until then the request waits at the default
        return _DEFAULT_PRIORITY
    return _DEFAULT_PRIORITY if math.isnan(level) else level


def _num_items(value: Any) -> int:
    """Return the number of items of a tensor, array or list; the manager refuses other types."""
    try:
        return math.prod(value.shape) if hasattr(value, "shape") else len(value)
    except TypeError:
        return 0


def _num_bytes(value: Any) -> int:
    size = getattr(value, "nbytes", None)
    return size if isinstance(size, int) else 8 * _num_items(value)
