"""`BulkCounts`: counts, in one call, the blocks that many requests need, for any KV cache manager.

Each sum adds up the numbers that the KV cache manager returns for single requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from gptmanager.kv_cache.manager import KvCacheManager
from gptmanager.request.llm_request import LlmRequest

_UNKNOWN = 1 << 62  # an upper bound without information: more blocks than are ever free


class BulkCounts(Protocol):
    """Counts of blocks over many requests. `KvCacheManager` has all four methods.

    A host's own KV cache manager may lack any of these methods. If it lacks a sum, the needs of
    single requests are added up. If it lacks an upper bound, schedulers skip the shortcut that uses
    the bound. Their decisions are the same in all cases.
    """

    def sum_remaining_blocks_to_completion(self, requests: Iterable[LlmRequest]) -> int:
        """Return the sum of `get_remaining_blocks_to_completion` over `requests`."""

    def most_blocks_to_completion(self, requests: Iterable[LlmRequest]) -> int:
        """Return an upper bound of `sum_remaining_blocks_to_completion`."""
        return _UNKNOWN

    def sum_needed_blocks_one_step(
        self, requests: Iterable[LlmRequest], two_step_lookahead: bool = False
    ) -> int:
        """Return the sum of `get_needed_blocks_one_step` over `requests`, which all generate."""

    def most_blocks_one_step(
        self, requests: Iterable[LlmRequest], two_step_lookahead: bool = False
    ) -> int:
        """Return an upper bound of the sum of `get_needed_blocks_one_step` over `requests`.

        The requests may be in any state.
        """
        return _UNKNOWN


def bulk_counts(kv_cache_manager: Any) -> BulkCounts:
    """Return the bulk counts of a KV cache manager, which may be a host's own."""
    if isinstance(kv_cache_manager, KvCacheManager):
        return kv_cache_manager
    return _CountsInPart(kv_cache_manager)


class _CountsInPart(BulkCounts):
    """The bulk counts of a host's own manager. A sum that it lacks is added up here."""

    def __init__(self, kv_cache_manager: Any) -> None:
        self._kv_cache_manager = kv_cache_manager
        for name in ("sum_remaining_blocks_to_completion", "most_blocks_to_completion",
                     "sum_needed_blocks_one_step", "most_blocks_one_step"):  # fmt: skip
            if hasattr(kv_cache_manager, name):
                setattr(self, name, getattr(kv_cache_manager, name))

    def sum_remaining_blocks_to_completion(self, requests: Iterable[LlmRequest]) -> int:
        return sum(map(self._kv_cache_manager.get_remaining_blocks_to_completion, requests))

    def sum_needed_blocks_one_step(
        self, requests: Iterable[LlmRequest], two_step_lookahead: bool = False
    ) -> int:
        needed = self._kv_cache_manager.get_needed_blocks_one_step
        return sum(needed(request, two_step_lookahead) for request in requests)
