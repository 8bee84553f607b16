"""MAX_UTILIZATION: who gets memory where requests may be paused for others.

Decides by what the next step alone needs. Knows nothing of token budgets, of chunks to run, or of
batches in flight, and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

from gptmanager.arguments import at_least
from gptmanager.request.llm_request import LlmRequestState, RequestList
from gptmanager.scheduler.adapter_pages import AdapterPages
from gptmanager.scheduler.bulk_counts import bulk_counts
from gptmanager.scheduler.capacity import KvCapacityScheduler
from gptmanager.scheduler.pausing_walk import PausingWalk, Room
from gptmanager.scheduler.reuse_delay import reuse_delay
from gptmanager.scheduler.start_headroom import StartHeadroom
from gptmanager.scheduler.waiting import Wait, Waits

_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS


@dataclass(eq=False, repr=False)
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

    _: KW_ONLY
    max_pauses: int | None = None
    resume_headroom_blocks: int = 0
    start_headroom_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_pauses is not None:
            self.max_pauses = at_least(0, "max_pauses", self.max_pauses)
        for name in ("resume_headroom_blocks", "start_headroom_steps"):
            setattr(self, name, at_least(0, name, getattr(self, name)))

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
        self.kv_cache_manager.start_scheduling()
        delay = reuse_delay(self.kv_cache_manager, active_requests)
        walk = self.schedulable(active_requests)
        fitting, blocks = self._generating_first(walk)
        if waits is None and self._rest_fits(walk, len(fitting), blocks):
            rest = walk[len(fitting) :]
            return fitting + (rest if delay is None else delay.undelayed(rest)), []
        room = Room(
            self.kv_cache_manager,
            AdapterPages(self.peft_cache_manager),
            self._headroom(),
            self.max_num_requests,
            self.two_step_lookahead,
        )
        pausing = PausingWalk(walk, room, delay, self.max_pauses, waits)
        return pausing.decide(fitting, blocks)

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
