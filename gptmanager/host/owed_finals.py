"""`OwedFinals`: for which requests a final response is due. Knows ids only."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable


class OwedFinals:
    """The ids under which a final response is due. Safe from any thread.

    An id counts as often as Get returned it: each request gets a final response of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}

    def owe(self, request_id: int) -> None:
        with self._lock:
            self._counts[request_id] = self._counts.get(request_id, 0) + 1

    def settle(self, request_id: int) -> bool:
        """A final response is about to be sent; False: none is due, it must not be."""
        with self._lock:
            count = self._counts.get(request_id, 0)
            if count > 1:
                self._counts[request_id] = count - 1
            elif count:
                del self._counts[request_id]
            return count > 0

    def beyond(self, known: Iterable[int]) -> list[int]:
        """What is due beyond `known`; an id as often as it is."""
        with self._lock:
            due = Counter(self._counts)
        due.subtract(Counter(known))
        return list(due.elements())
