"""Which active requests get memory in an iteration.

Decides from states, block counts and adapter pages alone. Knows nothing of token budgets, of
chunks to run, or of batches in flight (`micro_batch` decides those), and allocates nothing: it
compares what the KV cache manager says that a request needs with what is free.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import ClassVar

from gptmanager.arguments import able, at_least, flag
from gptmanager.errors import ConfigError
from gptmanager.kv_cache.manager import KvCacheManager
from gptmanager.request import LlmRequest, LlmRequestState, RequestList
from gptmanager.scheduler.adapter_pages import AdapterPages, PeftCacheManager
from gptmanager.scheduler.reuse_delay import ReuseDelay, reuse_delay
from gptmanager.scheduler.start_headroom import StartHeadroom, is_started

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT
_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS
_TO_COMPLETE = LlmRequestState.GENERATION_TO_COMPLETE


class CapacityScheduler(ABC):
    """A policy: which of the active requests get memory now. Subclass it to write another one."""

    # a request is schedulable if no_schedule_until_state <= state < no_schedule_after_state
    no_schedule_until_state: ClassVar[LlmRequestState] = LlmRequestState.CONTEXT_INIT
    no_schedule_after_state: ClassVar[LlmRequestState] = LlmRequestState.GENERATION_COMPLETE

    @abstractmethod
    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        """The fitting requests and the requests to pause, each in the order of the decision.

        `active_requests` stands in scheduling order, highest rank first, and is not changed.
        """

    def schedulable(self, active_requests: RequestList) -> RequestList:
        """The requests whose state permits scheduling, in order."""
        states = _states(self.no_schedule_until_state, self.no_schedule_after_state)
        return [request for request in active_requests if request.state in states]


class MaxRequestsScheduler(CapacityScheduler):
    """The first `max_num_requests` schedulable requests: for models without a KV cache."""

    def __init__(self, max_num_requests: int) -> None:
        self.max_num_requests = at_least(1, "max_num_requests", max_num_requests)

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        return self.schedulable(active_requests)[: self.max_num_requests], []


class _KvCapacityScheduler(CapacityScheduler):
    """What the policies over a KV cache are constructed from."""

    def __init__(
        self,
        max_num_requests: int,
        kv_cache_manager: KvCacheManager,
        *,
        cross_kv_cache_manager: KvCacheManager | None = None,
        peft_cache_manager: PeftCacheManager | None = None,
        two_step_lookahead: bool = False,
    ) -> None:
        self.max_num_requests = at_least(1, "max_num_requests", max_num_requests)
        if kv_cache_manager is None:
            raise ConfigError("kv_cache_manager = None: MaxRequestsScheduler needs no KV cache")
        self.kv_cache_manager = _kv_cache("kv_cache_manager", kv_cache_manager)
        if cross_kv_cache_manager is not None:
            _kv_cache("cross_kv_cache_manager", cross_kv_cache_manager)
        self.cross_kv_cache_manager = cross_kv_cache_manager
        if peft_cache_manager is not None:
            able("peft_cache_manager", peft_cache_manager, "determine_num_pages", "adapter cache")
        self.peft_cache_manager = peft_cache_manager
        self.two_step_lookahead = flag("two_step_lookahead", two_step_lookahead)


class GuaranteedNoEvictScheduler(_KvCapacityScheduler):
    """A request starts only when the blocks of its whole life are free, and is never paused.

    Generating requests are always taken and reserve what they may still need. Then contexts are
    taken in order; the first whose blocks are not there stops admission, so that a large request
    is not overtaken for ever. One whose adapter does not fit is passed over alone, and so is one
    that soon finds in the cache what another is about to compute. A whole life covers any number
    of steps: `two_step_lookahead` changes nothing.

    A guard, off by default. `started_contexts_first`: contexts that have run some chunks are taken
    before those that have not begun. Otherwise a newcomer of higher rank may stop admission in
    front of one that holds blocks half-run, and neither ever gets what it needs.
    """

    def __init__(
        self,
        max_num_requests: int,
        kv_cache_manager: KvCacheManager,
        *,
        cross_kv_cache_manager: KvCacheManager | None = None,
        peft_cache_manager: PeftCacheManager | None = None,
        two_step_lookahead: bool = False,
        started_contexts_first: bool = False,
    ) -> None:
        super().__init__(
            max_num_requests,
            kv_cache_manager,
            cross_kv_cache_manager=cross_kv_cache_manager,
            peft_cache_manager=peft_cache_manager,
            two_step_lookahead=two_step_lookahead,
        )
        self.started_contexts_first = flag("started_contexts_first", started_contexts_first)

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        schedulable = self.schedulable(active_requests)
        fitting = self._running(schedulable)
        if len(fitting) < min(self.max_num_requests, len(schedulable)):
            delay = reuse_delay(self.kv_cache_manager, active_requests)
            self._admit(schedulable, fitting, delay)
        return fitting, []

    def _running(self, schedulable: RequestList) -> RequestList:
        """The generating requests, as many as may run."""
        running = [
            request
            for request in schedulable
            if (state := request.state) is _IN_PROGRESS or state is _TO_COMPLETE
        ]
        return running[: self.max_num_requests]

    def _admit(
        self, schedulable: RequestList, fitting: RequestList, delay: ReuseDelay | None
    ) -> None:
        """Append to `fitting`, which holds the running requests, the contexts that fit beside."""
        max_num_requests = self.max_num_requests
        needed_to_completion = self.kv_cache_manager.get_remaining_blocks_to_completion
        free_blocks = _unreserved_blocks(self.kv_cache_manager, fitting)
        cross = self.cross_kv_cache_manager
        free_cross_blocks = 0 if cross is None else _unreserved_blocks(cross, fitting)
        pages = AdapterPages(self.peft_cache_manager, fitting)
        if self.started_contexts_first:
            schedulable = sorted(schedulable, key=_is_unstarted)
        for request in schedulable:
            if request.state is not _CONTEXT_INIT:
                continue
            if delay is not None and delay.delays(request):
                continue
            if len(fitting) >= max_num_requests:
                break
            needed = needed_to_completion(request)
            needed_cross = 0 if cross is None else cross.get_remaining_blocks_to_completion(request)
            if needed > free_blocks or needed_cross > free_cross_blocks:
                break
            if request.lora_task_id is None or pages.take(request.lora_task_id):
                fitting.append(request)
                free_blocks -= needed
                free_cross_blocks -= needed_cross


class StaticBatchScheduler(GuaranteedNoEvictScheduler):
    """As GUARANTEED_NO_EVICT, but a batch is filled only when the one before it has ended.

    Nothing waits for what another is about to compute.
    """

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        schedulable = self.schedulable(active_requests)
        fitting = self._running(schedulable)
        if not fitting:
            self._admit(schedulable, fitting, None)
        return fitting, []


class MaxUtilizationScheduler(_KvCapacityScheduler):
    """A request is taken when the blocks of its next step are free; others are paused for it.

    On a misfit the last started request, from the end of the list back to the misfit itself, is
    paused, and the walk then ends before it. Requests taken earlier in the walk are safe. A context
    that soon finds in the cache what another is about to compute is passed over; so is one that
    is tried again after a pause, since it meets its own record.
    `cross_kv_cache_manager` is not consulted.

    Three guards against thrash, off by default. `max_pauses`: a request paused that often is
    exempt; it is paused again only if a started request cannot go on otherwise and there is no
    other victim. `resume_headroom_blocks`: beside others, a paused request starts again only if so
    many blocks stay free, and pauses nobody for them. `start_headroom_steps`: beside others, a
    request starts, again or for the first time, only if it and those taken could go on for so many
    steps, or to their ends, before a block is lacking; but a first start may still pause requests
    of lower rank. Under the guards started requests behind a victim or a misfit are still walked,
    but nothing new starts there.
    """

    def __init__(
        self,
        max_num_requests: int,
        kv_cache_manager: KvCacheManager,
        *,
        cross_kv_cache_manager: KvCacheManager | None = None,
        peft_cache_manager: PeftCacheManager | None = None,
        two_step_lookahead: bool = False,
        max_pauses: int | None = None,
        resume_headroom_blocks: int = 0,
        start_headroom_steps: int = 0,
    ) -> None:
        super().__init__(
            max_num_requests,
            kv_cache_manager,
            cross_kv_cache_manager=cross_kv_cache_manager,
            peft_cache_manager=peft_cache_manager,
            two_step_lookahead=two_step_lookahead,
        )
        self.max_pauses = None if max_pauses is None else at_least(0, "max_pauses", max_pauses)
        self.resume_headroom_blocks = at_least(0, "resume_headroom_blocks", resume_headroom_blocks)
        self.start_headroom_steps = at_least(0, "start_headroom_steps", start_headroom_steps)

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        kv_cache_manager = self.kv_cache_manager
        kv_cache_manager.start_scheduling()
        needed_one_step = kv_cache_manager.get_needed_blocks_one_step
        has_free_blocks = kv_cache_manager.scheduling_has_free_blocks
        max_num_requests, lookahead = self.max_num_requests, self.two_step_lookahead
        headroom = self._headroom()
        pages = AdapterPages(self.peft_cache_manager)
        delay = reuse_delay(kv_cache_manager, active_requests)
        walk = self.schedulable(active_requests)
        fitting, blocks = self._generating_first(walk)
        paused: RequestList = []
        preempting: LlmRequest | None = None  # whom others have been paused for
        position = len(fitting)
        while position < len(walk):
            request = walk[position]
            if delay is not None and delay.delays(request):
                position += 1
                continue
            needed = needed_one_step(request, lookahead)
            # `blocks` alone was found free before, and since then only more became free
            fits = len(fitting) < max_num_requests and (
                not needed or has_free_blocks(blocks + needed)
            )
            if (
                headroom is not None
                and fitting
                and request is not preempting
                and not is_started(request)
                and not (fits and headroom.suffices(request, needed, fitting, blocks))
            ):
                started = _started_behind(walk, position)
                if request.pause_count or not started:
                    walk[position:] = started
                    continue
            if fits and (request.lora_task_id is None or pages.take(request.lora_task_id)):
                fitting.append(request)
                if delay is not None and request.state is _CONTEXT_INIT:
                    kv_cache_manager.scheduling_add_sequence(request)
                blocks += needed
                position += 1
            else:
                preempting = request
                self._make_room(walk, position, paused)
        return fitting, paused

    def _generating_first(self, walk: RequestList) -> tuple[RequestList, int]:
        """The generating requests at the head of `walk`, and their blocks, if all of them fit.

        The walk would take them one by one; mostly that is all it does.
        """
        needed_by_all = getattr(self.kv_cache_manager, "sum_needed_blocks_one_step", None)
        if needed_by_all is None:
            return [], 0
        end = 0
        for request in walk:
            if request.state is not _IN_PROGRESS or request.lora_task_id is not None:
                break
            end += 1
        head = walk[: min(end, self.max_num_requests)]
        blocks: int = needed_by_all(head, self.two_step_lookahead)
        if self.kv_cache_manager.scheduling_has_free_blocks(blocks):
            return head, blocks
        return [], 0

    def _headroom(self) -> StartHeadroom | None:
        blocks, steps = self.resume_headroom_blocks, self.start_headroom_steps
        return StartHeadroom(self.kv_cache_manager, blocks, steps) if blocks or steps else None

    def _make_room(self, walk: RequestList, position: int, paused: RequestList) -> None:
        """Cut `walk` short because the request at `position` does not fit; pause a victim if any.

        The victim, or without one the misfit, leaves the walk with all behind it but those that
        `max_pauses` spared.
        """
        cut, spared = self._find_victim(walk, position)
        if cut is None:
            cut = position
        else:
            victim = walk[cut]
            paused.append(victim)
            self.kv_cache_manager.scheduling_remove_sequence(victim.request_id)
        walk[cut:] = spared

    def _find_victim(self, walk: RequestList, position: int) -> tuple[int | None, RequestList]:
        """The victim's place in `walk` at or behind `position`, and the spared ones behind it."""
        max_pauses = self.max_pauses
        exempt: list[int] = []
        for place in range(len(walk) - 1, position - 1, -1):
            request = walk[place]
            if request.state is _CONTEXT_INIT and not request.context_current_position:
                continue  # as `is_started` would say, but sooner: most of a long list waits
            if is_started(request):
                if max_pauses is None or request.pause_count < max_pauses:
                    return place, [walk[other] for other in reversed(exempt)]
                exempt.append(place)
        if exempt and exempt[-1] == position:
            return exempt[0], []
        return None, [walk[place] for place in reversed(exempt)]


def _kv_cache(name: str, value: KvCacheManager) -> KvCacheManager:
    return able(name, value, "get_num_free_blocks", "KvCacheManager")


def _started_behind(walk: RequestList, position: int) -> RequestList:
    """Started requests of lower rank than the one at `position`; most of a long list waits."""
    return [
        request
        for request in walk[position + 1 :]
        if (request.context_current_position or request.state is not _CONTEXT_INIT)
        and is_started(request)
    ]


def _unreserved_blocks(kv_cache_manager: KvCacheManager, running: RequestList) -> int:
    """Free blocks less what the running requests may still need."""
    needed_by_all = getattr(kv_cache_manager, "sum_remaining_blocks_to_completion", None)
    if needed_by_all is None:
        reserved = sum(map(kv_cache_manager.get_remaining_blocks_to_completion, running))
    else:
        reserved = needed_by_all(running)
    return kv_cache_manager.get_num_free_blocks() - reserved


def _is_unstarted(request: LlmRequest) -> bool:
    return request.context_current_position == 0


@functools.cache
def _states(first: LlmRequestState, end: LlmRequestState) -> tuple[LlmRequestState, ...]:
    """first <= state < end; frequent ones first, as identity decides membership where it holds."""
    members = (_IN_PROGRESS, _CONTEXT_INIT, _TO_COMPLETE, *LlmRequestState)
    return tuple(dict.fromkeys(state for state in members if first <= state < end))
