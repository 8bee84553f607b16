"""Capacity schedulers: which active requests get memory in an iteration.

A capacity scheduler compares the KV cache blocks that requests need with the free blocks, and the
pages that adapters need with the free pages. It allocates nothing. `micro_batch` handles token
budgets, chunks to run and batches in flight.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from gptmanager.arguments import able, at_least, flag
from gptmanager.errors import ConfigError
from gptmanager.kv_cache.manager import KvCacheManager
from gptmanager.request.llm_request import LlmRequestState, RequestList
from gptmanager.scheduler.adapter_pages import AdapterPages, PeftCacheManager
from gptmanager.scheduler.bulk_counts import bulk_counts
from gptmanager.scheduler.reuse_delay import ReuseDelay, reuse_delay
from gptmanager.scheduler.wait_reasons import (
    Wait,
    WaitReason,
    Waits,
    counted,
    full,
    lacking,
    traced,
)

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT
_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS
_TO_COMPLETE = LlmRequestState.GENERATION_TO_COMPLETE


class CapacityScheduler(ABC):
    """A policy that decides which active requests get memory. Subclass it to write your own."""

    # a request is schedulable if no_schedule_until_state <= state < no_schedule_after_state
    no_schedule_until_state: ClassVar[LlmRequestState] = LlmRequestState.CONTEXT_INIT
    no_schedule_after_state: ClassVar[LlmRequestState] = LlmRequestState.GENERATION_COMPLETE

    @abstractmethod
    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        """Return the fitting requests and the requests to pause, each in the order of the decision.

        `active_requests` is in scheduling order, highest rank first. It must not be changed.
        """

    def why_waiting(self, active_requests: RequestList) -> Mapping[int, Wait] | None:
        """Return, by request id, why `schedule_request` would now leave requests out.

        Return None if the policy does not support it. Change nothing that a decision depends on.
        """
        return None

    def schedulable(self, active_requests: RequestList) -> RequestList:
        """Return the requests with a state that permits scheduling, in order."""
        states = _states(self.no_schedule_until_state, self.no_schedule_after_state)
        return [request for request in active_requests if request.state in states]


class MaxRequestsScheduler(CapacityScheduler):
    """Takes the first `max_num_requests` schedulable requests, for models without a KV cache."""

    def __init__(self, max_num_requests: int) -> None:
        self.max_num_requests = at_least(1, "max_num_requests", max_num_requests)

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        return self.schedulable(active_requests)[: self.max_num_requests], []

    def why_waiting(self, active_requests: RequestList) -> Mapping[int, Wait] | None:
        schedulable, limit = self.schedulable(active_requests), self.max_num_requests
        wait = full(schedulable[:limit], limit)
        return {request.request_id: wait for request in schedulable[limit:]}


@dataclass(eq=False, repr=False)
class KvCapacityScheduler(CapacityScheduler):
    """Base class of policies over a KV cache, with their constructor's arguments.

    `cross_kv_cache_manager` counts the blocks of cross attention; it is None if the model has no
    encoder. If `two_step_lookahead`, which is for overlapped steps, a request needs the blocks of
    its next two steps. The constructor raises ConfigError for invalid arguments.
    """

    max_num_requests: int
    kv_cache_manager: KvCacheManager
    _: KW_ONLY
    cross_kv_cache_manager: KvCacheManager | None = None
    peft_cache_manager: PeftCacheManager | None = None
    two_step_lookahead: bool = False

    def __post_init__(self) -> None:
        self.max_num_requests = at_least(1, "max_num_requests", self.max_num_requests)
        if self.kv_cache_manager is None:
            raise ConfigError(
                "kv_cache_manager must not be None: use MaxRequestsScheduler without a KV cache"
            )
        able("kv_cache_manager", self.kv_cache_manager, "get_num_free_blocks", "KvCacheManager")
        cross, adapters = self.cross_kv_cache_manager, self.peft_cache_manager
        if cross is not None:
            able("cross_kv_cache_manager", cross, "get_num_free_blocks", "KvCacheManager")
        if adapters is not None:
            able("peft_cache_manager", adapters, "determine_num_pages", "LoRA cache")
        self.two_step_lookahead = flag("two_step_lookahead", self.two_step_lookahead)

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        return self._decide(active_requests)

    def why_waiting(self, active_requests: RequestList) -> Mapping[int, Wait] | None:
        if type(self).schedule_request is not KvCapacityScheduler.schedule_request:
            return None  # a subclass overrides the decision
        waits = Waits()
        self._decide(active_requests, waits)
        return traced(waits)

    @abstractmethod
    def _decide(
        self, active_requests: RequestList, waits: Waits | None = None
    ) -> tuple[RequestList, RequestList]:
        """Decide, and record in `waits` why requests are left out."""


@dataclass(eq=False, repr=False)
class GuaranteedNoEvictScheduler(KvCapacityScheduler):
    """A policy that starts a request only if the blocks of its whole life are free.

    It never pauses a request.

    The first `max_num_requests` generating requests are taken and reserve the blocks that they may
    still need. Then contexts are taken in order. The first context without enough blocks stops
    admission, so that small requests cannot overtake a large one forever. A context is skipped,
    without stopping admission, if its adapter does not fit, or if another request is about to
    compute blocks that it can reuse. A whole life covers any number of steps, so
    `two_step_lookahead` has no effect.

    If `started_contexts_first`, which is off by default, partly computed contexts are taken before
    contexts that have not started. Otherwise a new request of higher rank may stop admission while
    a partly computed context of lower rank holds blocks. Then both requests wait for each other
    forever.
    """

    _: KW_ONLY
    started_contexts_first: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.started_contexts_first = flag("started_contexts_first", self.started_contexts_first)

    def _decide(
        self, active_requests: RequestList, waits: Waits | None = None
    ) -> tuple[RequestList, RequestList]:
        schedulable = self.schedulable(active_requests)
        fitting = self._running(schedulable)
        if len(fitting) < min(self.max_num_requests, len(schedulable)):
            delay = reuse_delay(self.kv_cache_manager, active_requests)
            self._admit(schedulable, fitting, delay, waits)
        elif waits is not None:
            waits.all_but(fitting, schedulable, full(fitting, self.max_num_requests))
        return fitting, []

    def _running(self, schedulable: RequestList) -> RequestList:
        """Return the first `max_num_requests` generating requests."""
        running = [
            request
            for request in schedulable
            if (state := request.state) is _IN_PROGRESS or state is _TO_COMPLETE
        ]
        return running[: self.max_num_requests]

    def _admit(
        self,
        schedulable: RequestList,
        fitting: RequestList,
        delay: ReuseDelay | None,
        waits: Waits | None = None,
    ) -> None:
        """Append the contexts that fit to `fitting`, which holds the generating requests."""
        max_num_requests = self.max_num_requests
        needed_to_completion = self.kv_cache_manager.get_remaining_blocks_to_completion
        free_blocks = _unreserved_blocks(self.kv_cache_manager, fitting)
        cross = self.cross_kv_cache_manager
        free_cross_blocks = 0 if cross is None else _unreserved_blocks(cross, fitting)
        pages = AdapterPages(self.peft_cache_manager, fitting)
        if self.started_contexts_first:
            schedulable = sorted(schedulable, key=lambda r: r.context_current_position == 0)
        if cross is None and waits is None:
            contexts = self._contexts_if_all_fit(schedulable, len(fitting), free_blocks)
            if contexts:
                fitting += contexts if delay is None else delay.undelayed(contexts)
                return
        for request in schedulable:
            if request.state is not _CONTEXT_INIT:
                continue
            if delay is not None and delay.delays(request):
                if waits is not None:
                    waits.put(request, delay.wait(request, schedulable))
                continue
            if len(fitting) >= max_num_requests:
                if waits is not None:
                    waits.all_but(fitting, schedulable, full(fitting, max_num_requests))
                break
            needed = needed_to_completion(request)
            needed_cross = 0 if cross is None else cross.get_remaining_blocks_to_completion(request)
            if needed > free_blocks or needed_cross > free_cross_blocks:
                if waits is not None:
                    free, left = self.kv_cache_manager.get_num_free_blocks(), free_blocks
                    if cross is not None and needed <= free_blocks:
                        needed, left = needed_cross, free_cross_blocks
                        free = cross.get_num_free_blocks()
                    wait = lacking(WaitReason.KV_BLOCKS, needed, free, left, fitting)
                    waits.end(request, wait, fitting, schedulable)
                break
            if request.lora_task_id is None or pages.take(request.lora_task_id):
                fitting.append(request)
                free_blocks -= needed
                free_cross_blocks -= needed_cross
            elif waits is not None:
                waits.put(request, pages.wait(request.lora_task_id, fitting))

    def _contexts_if_all_fit(
        self, schedulable: RequestList, num_running: int, free_blocks: int
    ) -> RequestList:
        """Return all contexts if their number and an upper bound of their blocks fit.

        Return an empty list if they do not fit, or if a context has an adapter. If all fit, the
        loop over single requests in `_admit` would take the same contexts, but more slowly.
        """
        bound = bulk_counts(self.kv_cache_manager).most_blocks_to_completion
        first = next((r for r in schedulable if r.state is _CONTEXT_INIT), None)
        if first is None or bound([first]) > free_blocks:
            return []  # usually the first context does not fit: do not count the rest
        contexts = [request for request in schedulable if request.state is _CONTEXT_INIT]
        if (
            num_running + len(contexts) > self.max_num_requests
            or bound(contexts) > free_blocks
            or not all([request.lora_task_id is None for request in contexts])
        ):
            return []
        return contexts


class StaticBatchScheduler(GuaranteedNoEvictScheduler):
    """GUARANTEED_NO_EVICT with whole batches: no context runs while any request generates.

    A context does not wait for reusable blocks that another request is about to compute.
    """

    def _decide(
        self, active_requests: RequestList, waits: Waits | None = None
    ) -> tuple[RequestList, RequestList]:
        schedulable = self.schedulable(active_requests)
        fitting = self._running(schedulable)
        if not fitting:
            self._admit(schedulable, fitting, None, waits)
        elif waits is not None:
            wait = Wait(WaitReason.STATIC_BATCH, 0, 0, 0, *counted(fitting))
            waits.all_but(fitting, schedulable, wait)
        return fitting, []


def _unreserved_blocks(kv_cache_manager: KvCacheManager, running: RequestList) -> int:
    """Return the number of free blocks that the running requests cannot need."""
    reserved = bulk_counts(kv_cache_manager).sum_remaining_blocks_to_completion(running)
    return kv_cache_manager.get_num_free_blocks() - reserved


@functools.cache
def _states(first: LlmRequestState, end: LlmRequestState) -> tuple[LlmRequestState, ...]:
    """Return the states first <= state < end, the frequent ones first, so that `in` is fast."""
    members = (_IN_PROGRESS, _CONTEXT_INIT, _TO_COMPLETE, *LlmRequestState)
    return tuple(dict.fromkeys(state for state in members if first <= state < end))
