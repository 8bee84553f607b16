"""`ReuseDelay`: delays contexts with a prefix that another request is about to compute.

The class compares only prefixes. It knows neither how much memory is free nor which requests the
scheduler takes.
"""

from __future__ import annotations

from collections.abc import Hashable

from gptmanager.kv_cache.manager import KvCacheManager
from gptmanager.request.llm_request import LlmRequest, LlmRequestState, RequestList
from gptmanager.scheduler.wait_reasons import Wait, WaitReason

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT


class ReuseDelay:
    """The delays of one decision of a capacity scheduler over a cache with block reuse.

    The contribution of a context is its prompt up to and including the first full block that is not
    cached. A context waits if an earlier context of the decision, or a context between two chunks,
    has the same contribution, because the waiting context can soon reuse the blocks of the other.
    A request that does not read the cache does not wait, but others wait for it.
    """

    __slots__ = ("_contributed", "_kv_cache_manager")

    def __init__(self, kv_cache_manager: KvCacheManager, active_requests: RequestList) -> None:
        self._kv_cache_manager = kv_cache_manager
        self._contributed: set[Hashable] = set()
        for request in active_requests:
            if (
                request.context_current_position
                and request.state is _CONTEXT_INIT
                and not request.is_first_context_chunk
            ):
                self._contributed.add(kv_cache_manager.find_new_context_block(request))
        self._contributed.discard(None)  # from contexts with all full blocks in the cache

    def delays(self, request: LlmRequest) -> bool:
        """Return whether the request waits. If not, record its contribution."""
        if request.state is not _CONTEXT_INIT or not request.is_first_context_chunk:
            return False
        contribution = self._kv_cache_manager.find_new_context_block(request)
        if contribution in self._contributed:
            return request.reads_cache
        if contribution is not None:
            self._contributed.add(contribution)
        return False

    def wait(self, request: LlmRequest, requests: RequestList) -> Wait:
        """Return the wait of a delayed request for another request with the same contribution.

        The other request is the first in `requests` that is before the delayed one, or between two
        chunks. If there is none, `behind` is the id of the delayed request itself, because its
        contribution was recorded earlier in the decision.
        """
        find = self._kv_cache_manager.find_new_context_block
        contribution, is_before = find(request), True
        for other in requests:
            if other is request:
                is_before = False
            elif (
                other.state is _CONTEXT_INIT
                and (is_before or other.context_current_position)
                and find(other) == contribution
            ):
                return Wait(WaitReason.REUSE_DELAY, behind=other.request_id)
        return Wait(WaitReason.REUSE_DELAY, behind=request.request_id)

    def undelayed(self, requests: RequestList) -> RequestList:
        """Return the requests that do not wait. Later requests wait for earlier ones."""
        contributed, add = self._contributed, self._contributed.add
        contributions = self._kv_cache_manager.find_new_context_blocks(requests)
        distinct = {*contributions}
        if (
            len(distinct) == len(contributions)
            and None not in distinct
            and contributed.isdisjoint(distinct)
        ):  # the most frequent case, in which no two requests have the same contribution
            contributed |= distinct
            return requests
        result: RequestList = []
        for request, contribution in zip(requests, contributions, strict=True):
            if (
                contribution is not None
                and not request.context_current_position
                and request.state is _CONTEXT_INIT
            ):
                if contribution in contributed and request.reads_cache:
                    continue
                add(contribution)
            result.append(request)
        return result


def reuse_delay(
    kv_cache_manager: KvCacheManager, active_requests: RequestList
) -> ReuseDelay | None:
    """Return the delays of a decision, or None without block reuse."""
    if getattr(kv_cache_manager, "enable_block_reuse", False):
        return ReuseDelay(kv_cache_manager, active_requests)
    return None
