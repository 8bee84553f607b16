"""One walk down the list where requests may be paused for others: who is taken, and who is paused.

The rules are told by `MaxUtilizationScheduler`; what a request needs and what is free, by `Room`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gptmanager.kv_cache.manager import KvCacheManager
from gptmanager.request.llm_request import LlmRequest, LlmRequestState, RequestList
from gptmanager.scheduler.adapter_pages import AdapterPages
from gptmanager.scheduler.reuse_delay import ReuseDelay
from gptmanager.scheduler.start_headroom import StartHeadroom, is_started
from gptmanager.scheduler.waiting import Wait, WaitReason, Waits, counted, full

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT


@dataclass(frozen=True, slots=True)
class Room:
    """What there is for the requests of one walk; memory as in the what-if of `kv_cache_manager`.

    `headroom` None: who fits may start.
    """

    kv_cache_manager: KvCacheManager
    pages: AdapterPages
    headroom: StartHeadroom | None
    max_num_requests: int
    two_step_lookahead: bool

    def lacking(self, needed: int, taken_blocks: int, beside: int, taken: RequestList) -> Wait:
        """The wait of one that needs more than `taken`, with `taken_blocks`, leave: a cell of the
        batch, or blocks, of which so many must stay free `beside`.
        """
        if len(taken) >= self.max_num_requests:
            return full(taken, self.max_num_requests)
        free = self.kv_cache_manager.scheduling_num_free_blocks
        return Wait(WaitReason.KV_BLOCKS, needed, free, taken_blocks + beside, *counted(taken))


@dataclass(slots=True, eq=False)
class PausingWalk:
    """Walks down `walk`, which it cuts short where requests are paused for others.

    `waits`, if there are any, are told of those that are left out.
    """

    walk: RequestList
    room: Room
    delay: ReuseDelay | None
    max_pauses: int | None
    waits: Waits | None
    _schedulable: RequestList = field(init=False)
    _fitting: RequestList = field(init=False)
    _blocks: int = field(init=False)
    _index: int = field(init=False)
    _paused: RequestList = field(default_factory=list)
    _preempting: LlmRequest | None = None  # whom others have been paused for
    _misfits: list[tuple[LlmRequest, Wait, RequestList]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._schedulable = self.walk if self.waits is None else [*self.walk]

    def decide(self, fitting: RequestList, blocks: int) -> tuple[RequestList, RequestList]:
        """The fitting requests and the paused. `fitting` are taken already, with `blocks`."""
        self._fitting, self._blocks, self._index = fitting, blocks, len(fitting)
        room, walk, delay = self.room, self.walk, self.delay
        needed_one_step = room.kv_cache_manager.get_needed_blocks_one_step
        has_free_blocks = room.kv_cache_manager.scheduling_has_free_blocks
        while self._index < len(walk):
            request = walk[self._index]
            if delay is not None and delay.delays(request):
                self._skip(request, delay)
                continue
            needed = needed_one_step(request, room.two_step_lookahead)
            # `blocks` alone was found free before, and since then only more became free
            fits = len(fitting) < room.max_num_requests and (
                not needed or has_free_blocks(self._blocks + needed)
            )
            if room.headroom is not None and self._starts_too_early(request, needed, fits):
                continue
            if fits and (request.lora_task_id is None or room.pages.take(request.lora_task_id)):
                fitting.append(request)
                if delay is not None and request.state is _CONTEXT_INIT:
                    room.kv_cache_manager.scheduling_add_sequence(request)
                self._blocks += needed
                self._index += 1
            else:
                self._pause_for(request, needed, fits)
        if self.waits is not None:
            _tell_of_misfits(self._misfits, fitting, self.waits)
        return fitting, self._paused

    def _skip(self, request: LlmRequest, delay: ReuseDelay) -> None:
        """It waits for a prefix; one that others were paused for only meets its own record."""
        if self.waits is not None and request is not self._preempting:
            self.waits.put(request, delay.wait(request, self._schedulable))
        self._index += 1

    def _starts_too_early(self, request: LlmRequest, needed: int, fits: bool) -> bool:
        """Whether too little stays free beside it: then nothing new starts from here on."""
        headroom, fitting = self.room.headroom, self._fitting
        if (
            headroom is None
            or not fitting
            or request is self._preempting
            or is_started(request)
            or (fits and headroom.suffices(request, needed, fitting, self._blocks))
        ):
            return False
        started = _started_behind(self.walk, self._index)
        if started and not request.pause_count:
            return False  # a first start may pause requests of lower rank
        if self.waits is not None:
            beside = headroom.blocks_beside(request, fitting)
            wait = self.room.lacking(needed, self._blocks, beside, fitting)
            self.waits.end(request, wait, [*fitting, *started], self.walk)
        self.walk[self._index :] = started
        return True

    def _pause_for(self, request: LlmRequest, needed: int, fits: bool) -> None:
        """Cut the walk short because the request does not fit; pause a victim if there is any.

        The victim, or without one the misfit, leaves the walk with all behind it but those that
        `max_pauses` spared.
        """
        self._preempting = request
        if self.waits is not None:
            wait = self.room.lacking(needed, self._blocks, 0, self._fitting)
            if fits:
                wait = self.room.pages.wait(request.lora_task_id, self._fitting)
            self._misfits.append((request, wait, [*self.walk]))
        cut, spared = self._find_victim()
        if cut is None:
            cut = self._index
        else:
            victim = self.walk[cut]
            self._paused.append(victim)
            self.room.kv_cache_manager.scheduling_remove_sequence(victim.request_id)
        self.walk[cut:] = spared

    def _find_victim(self) -> tuple[int | None, RequestList]:
        """The victim's index in the walk, from the misfit's on, and the spared ones behind it."""
        walk, first, max_pauses = self.walk, self._index, self.max_pauses
        exempt: list[int] = []
        for index in range(len(walk) - 1, first - 1, -1):
            request = walk[index]
            if request.state is _CONTEXT_INIT and not request.context_current_position:
                continue  # as `is_started` would say, but sooner: most of a long list waits
            if is_started(request):
                if max_pauses is None or request.pause_count < max_pauses:
                    return index, [walk[other] for other in reversed(exempt)]
                exempt.append(index)
        if exempt and exempt[-1] == first:
            return exempt[0], []
        return None, [walk[index] for index in reversed(exempt)]


def _tell_of_misfits(
    misfits: list[tuple[LlmRequest, Wait, RequestList]], fitting: RequestList, waits: Waits
) -> None:
    """Those that did not fit, each with the walk that it stood in, in the order of the walk.

    One that others are paused for may be among the fitting in the end, and does not wait itself.
    """
    for request, wait, _ in reversed(misfits):
        if request not in fitting:
            waits.put(request, wait)
    for request, wait, walk in reversed(misfits):
        waits.all_but(fitting, walk, wait.of_those_behind(request.request_id))


def _started_behind(walk: RequestList, position: int) -> RequestList:
    """Started requests of lower rank than the one at `position`; most of a long list waits."""
    return [
        request
        for request in walk[position + 1 :]
        if (request.context_current_position or request.state is not _CONTEXT_INIT)
        and is_started(request)
    ]
