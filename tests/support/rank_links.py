"""`Links` of ranks that are threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from own_time import own_time
from torch.distributed import HashStore

from gptmanager.ranks.links import Links

T = TypeVar("T")


@contextmanager
def linked(size: int, timeout_s: float = 20.0, host: str = "127.0.0.1") -> Iterator[list[Links]]:
    """Yield the links of each rank, by rank."""
    store = HashStore()

    def start(rank: int) -> Links:
        return Links(rank, size, store, host, timeout_s=timeout_s, boot_s=10.0)

    with own_time():
        links = at_once(start, range(size))
        try:
            yield links
        finally:
            for it in links:
                it.close()


def at_once(body: Callable[[Any], T], items: Any) -> list[T]:
    """What `body` gives for each, in threads; the first error is raised."""
    items = list(items)
    with ThreadPoolExecutor(len(items)) as threads:
        return [work.result() for work in [threads.submit(body, it) for it in items]]


def outcome(body: Callable[[], Any]) -> Any:
    """What it returns, or the error that it raises."""
    try:
        return body()
    except Exception as error:
        return error
