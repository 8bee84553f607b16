"""Which contexts wait an iteration, because another one is about to compute what they begin with.

Knows only prefixes: nothing of how much memory there is, nor of who is taken.
"""

from __future__ import annotations

from collections.abc import Hashable

from gptmanager.kv_cache.manager import KvCacheManager
from gptmanager.request.llm_request import LlmRequest, LlmRequestState, RequestList
from gptmanager.scheduler.waiting import Wait, WaitReason

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT


class ReuseDelay:
    """One pass of a capacity scheduler over a cache whose blocks are reused.

    A context contributes its prompt up to the first full block that is not cached yet. Who would
    contribute the same as an earlier one of the pass, or as a context that is between two chunks,
    waits: soon it can have those blocks for nothing.
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
        self._contributed.discard(None)  # all of it is cached

    def delays(self, request: LlmRequest) -> bool:
        """Whether the request waits. If it does not, what it contributes is recorded."""
        if request.state is not _CONTEXT_INIT or not request.is_first_context_chunk:
            return False
        contribution = self._kv_cache_manager.find_new_context_block(request)
        if contribution in self._contributed:
            return True
        if contribution is not None:
            self._contributed.add(contribution)
        return False

    def wait(self, request: LlmRequest, requests: RequestList) -> Wait:
        """The wait of one that `delays` has told to wait: for the first of `requests` like it.

        That stands before it or is between two chunks; otherwise it has met its own record.
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
        """Those of `requests`, asked for one after the other, that do not wait."""
        contributed, add = self._contributed, self._contributed.add
        contributions = self._kv_cache_manager.find_new_context_blocks(requests)
        distinct = {*contributions}
        if (
            len(distinct) == len(contributions)
            and None not in distinct
            and contributed.isdisjoint(distinct)
        ):  # mostly: nobody is about to compute what another wants
            contributed |= distinct
            return requests
        result: RequestList = []
        for request, contribution in zip(requests, contributions, strict=True):
            if (
                contribution is not None
                and not request.context_current_position
                and request.state is _CONTEXT_INIT
            ):
                if contribution in contributed:
                    continue
                add(contribution)
            result.append(request)
        return result


def reuse_delay(
    kv_cache_manager: KvCacheManager, active_requests: RequestList
) -> ReuseDelay | None:
    """None where nothing is reused."""
    if getattr(kv_cache_manager, "enable_block_reuse", False):
        return ReuseDelay(kv_cache_manager, active_requests)
    return None
