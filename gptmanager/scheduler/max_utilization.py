"""MAX_UTILIZATION: who gets memory where requests may be paused for others.

Decides by what the next step alone needs. Knows nothing of token budgets, of chunks to run, or of
batches in flight, and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from gptmanager.arguments import at_least
from gptmanager.kv_cache.manager import KvCacheManager
from gptmanager.request.llm_request import LlmRequest, LlmRequestState, RequestList
from gptmanager.scheduler.adapter_pages import AdapterPages, PeftCacheManager
from gptmanager.scheduler.bulk_counts import bulk_counts
from gptmanager.scheduler.capacity import KvCapacityScheduler
from gptmanager.scheduler.reuse_delay import reuse_delay
from gptmanager.scheduler.start_headroom import StartHeadroom, is_started
from gptmanager.scheduler.waiting import Wait, WaitReason, Waits, counted, full

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT
_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS


class MaxUtilizationScheduler(KvCapacityScheduler):
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
        return self._decide(active_requests)

    def why_waiting(self, active_requests: RequestList) -> Mapping[int, Wait] | None:
        if type(self).schedule_request is not MaxUtilizationScheduler.schedule_request:
            return None  # another decision than this class's
        waits = Waits()
        self._decide(active_requests, waits)
        return waits.by_id

    def _decide(
        self, active_requests: RequestList, waits: Waits | None = None
    ) -> tuple[RequestList, RequestList]:
        """The decision; `waits` is told of those that it leaves out."""
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
        if waits is None and self._rest_fits(walk, len(fitting), blocks):
            rest = walk[len(fitting) :]
            return fitting + (rest if delay is None else delay.undelayed(rest)), paused
        preempting: LlmRequest | None = None  # whom others have been paused for
        misfits: list[tuple[LlmRequest, Wait, RequestList]] = []
        position = len(fitting)
        while position < len(walk):
            request = walk[position]
            if delay is not None and delay.delays(request):
                if waits is not None and request is not preempting:  # that meets its own record
                    waits.put(request, delay.wait(request, active_requests))
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
                    if waits is not None:
                        beside = headroom.blocks_beside(request, fitting)
                        wait = self._lacking(needed, blocks, beside, fitting)
                        waits.end(request, wait, [*fitting, *started], walk)
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
                if waits is not None:
                    wait = self._lacking(needed, blocks, 0, fitting)
                    if fits:
                        wait = pages.wait(request.lora_task_id, fitting)
                    misfits.append((request, wait, [*walk]))
                self._make_room(walk, position, paused)
        if waits is not None:
            _tell_of_misfits(misfits, fitting, waits)
        return fitting, paused

    def _lacking(self, needed: int, taken_blocks: int, beside: int, taken: RequestList) -> Wait:
        """The wait of one that needs more than `taken`, with `taken_blocks`, leave: a place, or
        blocks, of which so many must stay free `beside`.
        """
        if len(taken) >= self.max_num_requests:
            return full(taken, self.max_num_requests)
        free = self.kv_cache_manager.scheduling_num_free_blocks
        return Wait(WaitReason.KV_BLOCKS, needed, free, taken_blocks + beside, *counted(taken))

    def _generating_first(self, walk: RequestList) -> tuple[RequestList, int]:
        """The generating requests at the head of `walk`, and their blocks, if all of them fit.

        The walk would take them one by one; mostly that is all it does.
        """
        end = 0
        for request in walk:
            if request.state is not _IN_PROGRESS or request.lora_task_id is not None:
                break
            end += 1
        head = walk[: min(end, self.max_num_requests)]
        counts = bulk_counts(self.kv_cache_manager)
        blocks = counts.sum_needed_blocks_one_step(head, self.two_step_lookahead)
        if self.kv_cache_manager.scheduling_has_free_blocks(blocks):
            return head, blocks
        return [], 0

    def _rest_fits(self, walk: RequestList, num_taken: int, blocks: int) -> bool:
        """Whether all behind the first `num_taken`, which take `blocks`, fit by any count.

        The walk would take them one by one; where much is free that is all it does.
        """
        manager, lookahead = self.kv_cache_manager, self.two_step_lookahead
        bound = bulk_counts(manager).most_blocks_one_step
        if num_taken == len(walk) or len(walk) > self.max_num_requests:
            return False
        has_free_blocks = manager.scheduling_has_free_blocks
        if not has_free_blocks(blocks + bound([walk[num_taken]], lookahead)):
            return False  # mostly: the others are not looked at
        rest = walk[num_taken:]
        headroom = self.resume_headroom_blocks
        if self.start_headroom_steps:
            beams = sum([request.beam_width for request in walk])
            headroom += -(-self.start_headroom_steps // manager.tokens_per_block) * beams
        return has_free_blocks(blocks + bound(rest, lookahead) + headroom) and all(
            [request.lora_task_id is None for request in rest]
        )

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
