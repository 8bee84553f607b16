"""`ResponseStore`: keeps the latest responses for requests that read or continue them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20
MAX_AGE_S = 3600.0


class StoredResponse(NamedTuple):
    """A response and its input items, as JSON.

    `owner`: the name of the API key that may read the response. `expires`: when it expires,
    in seconds of the store's clock.
    """

    owner: str
    response: bytes
    items: bytes
    expires: float

    @property
    def num_bytes(self) -> int:
        """The size in bytes that counts for the store's limit."""
        return len(self.response) + len(self.items)


class ResponseStore:
    """Keeps the latest responses in memory, up to limits of their age, number and bytes."""

    def __init__(
        self,
        *,
        most: int = MAX_RESPONSES,
        most_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._clock = clock
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()  # the oldest first
        self._num_bytes = 0

    def add(self, owner: str, response: dict[str, Any], items: list[Any]) -> None:
        """Keep a response with all its input items, unless it alone exceeds the limit of bytes.

        It replaces an earlier response with its id.
        """
        if response["id"] in self._stored:
            self._remove(response["id"])
        texts = orjson.dumps(response), orjson.dumps(items)
        stored = StoredResponse(owner, *texts, self._clock() + MAX_AGE_S)
        if stored.num_bytes > self._most_bytes:
            return
        self._stored[response["id"]] = stored
        self._num_bytes += stored.num_bytes
        while len(self._stored) > self._most or self._num_bytes > self._most_bytes:
            self._remove(next(iter(self._stored)))

    def find(self, owner: str, name: str) -> StoredResponse | None:
        """Return the response with the id `name`, or None if it is not kept for `owner`."""
        while self._stored and next(iter(self._stored.values())).expires <= self._clock():
            self._remove(next(iter(self._stored)))
        stored = self._stored.get(name)
        return stored if stored is not None and stored.owner == owner else None

    def delete(self, owner: str, name: str) -> bool:
        """Remove a response; return whether it was kept for `owner`."""
        is_there = self.find(owner, name) is not None
        if is_there:
            self._remove(name)
        return is_there

    def _remove(self, name: str) -> None:
        self._num_bytes -= self._stored.pop(name).num_bytes
