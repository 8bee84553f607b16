"""`PendingRequests`: requests that wait to be fetched, in the order they will be.

Highest priority first, equals in the order they came. Not thread-safe; knows nothing of answers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

from gptmanager import InferenceRequest

_DEFAULT_PRIORITY = 0.5


class PendingRequests:
    """A queue by priority from which a request in the middle can be taken, too."""

    def __init__(self) -> None:
        self._levels: dict[float, OrderedDict[int, InferenceRequest]] = {}
        self._level_of: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._level_of)

    def push(self, request: InferenceRequest) -> None:
        level = _level(request.priority)
        self._levels.setdefault(level, OrderedDict())[request.request_id] = request
        self._level_of[request.request_id] = level

    def pop(self, count: int) -> list[InferenceRequest]:
        """The next `count` requests, or as many as there are."""
        popped: list[InferenceRequest] = []
        while self._levels and len(popped) < count:
            level = max(self._levels)
            requests = self._levels[level]
            while requests and len(popped) < count:
                request_id, request = requests.popitem(last=False)
                del self._level_of[request_id]
                popped.append(request)
            if not requests:
                del self._levels[level]
        return popped

    def take(self, request_id: int) -> InferenceRequest | None:
        """Remove this one; None if it is not here."""
        level = self._level_of.pop(request_id, None)
        if level is None:
            return None
        request = self._levels[level].pop(request_id)
        if not self._levels[level]:
            del self._levels[level]
        return request


def _level(priority: Any) -> float:
    # the manager answers an impossible priority; here it must only not break the order
    is_number = isinstance(priority, (int, float)) and not math.isnan(priority)
    return float(priority) if is_number else _DEFAULT_PRIORITY
