"""MAX_UTILIZATION: decides which requests get memory, and may pause requests for others.

The policy compares the blocks that the next step needs with the free blocks, and allocates nothing.
The policy does not consider token budgets, the chunks to run, or batches in flight.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

from gptmanager.arguments import at_least
from gptmanager.request.llm_request import LlmRequest, LlmRequestState, RequestList
from gptmanager.scheduler.adapter_pages import AdapterPages
from gptmanager.scheduler.bulk_counts import bulk_counts
from gptmanager.scheduler.capacity import KvCapacityScheduler
from gptmanager.scheduler.reuse_delay import ReuseDelay, reuse_delay
from gptmanager.scheduler.wait_reasons import Wait, WaitReason, Waits, full, lacking

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT
_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS
_TO_COMPLETE = LlmRequestState.GENERATION_TO_COMPLETE


@dataclass(eq=False, repr=False)
class MaxUtilizationScheduler(KvCapacityScheduler):
    """Takes a request if the blocks of its next step are free, and pauses others to free them.

    The policy walks down the list of requests. If a request does not fit, the victim is the last
    started request of the list that is not taken yet, possibly the request itself. The victim is
    paused, the walk now ends before the victim, and the request is tried again. Requests taken
    earlier in the walk are never paused. If another request is about to compute blocks that a
    context can reuse, the context is skipped. With block reuse, a context for which a request was
    paused is skipped, too: the first try has recorded the context's own prefix.
    `cross_kv_cache_manager` is not used.

    Three guards against thrashing are off by default:

    - `max_pauses`: a request that was paused this many times is paused again only if a started
      request could not continue otherwise, and no other victim is left.
    - `resume_headroom_blocks`: while other requests are taken, a paused request starts again only
      if this many blocks stay free. No request is paused to free them.
    - `start_headroom_steps`: while other requests are taken, a new or paused request starts only if
      the free blocks suffice for all taken requests to run this many steps, or to their ends. A
      first start may still pause requests of lower rank.

    With the guards, requests after a victim, or after a request that does not fit, are still
    considered if they have started.
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

    def _decide(
        self, active_requests: RequestList, waits: Waits | None = None
    ) -> tuple[RequestList, RequestList]:
        self.kv_cache_manager.start_scheduling()
        delay = reuse_delay(self.kv_cache_manager, active_requests)
        walk = self.schedulable(active_requests)
        fitting, blocks = self._generating_first(walk)
        if waits is None and self._rest_fits(walk, len(fitting), blocks):
            rest = walk[len(fitting) :]
            return fitting + (rest if delay is None else delay.undelayed(rest)), []
        return _PausingWalk(self, walk, fitting, blocks, delay, waits).decide()

    def _generating_first(self, walk: RequestList) -> tuple[RequestList, int]:
        """Return the generating requests at the head of `walk`, and how many blocks they need.

        The first request with an adapter and all requests after it are not included. Return no
        requests unless all included requests fit. The walk over single requests would take the
        returned requests as well, but more slowly.
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
        """Return whether all requests after the first `num_taken` certainly fit.

        `blocks` is the number of blocks that the first `num_taken` requests need. The needs of the
        other requests are estimated from above. The result is also False without other
        requests, if one of them has an adapter, or if `walk` exceeds `max_num_requests`. If the
        result is True, the walk over single requests would take the same requests, but more slowly.
        """
        manager, lookahead = self.kv_cache_manager, self.two_step_lookahead
        bound = bulk_counts(manager).most_blocks_one_step
        if num_taken == len(walk) or len(walk) > self.max_num_requests:
            return False
        has_free_blocks = manager.scheduling_has_free_blocks
        if not has_free_blocks(blocks + bound([walk[num_taken]], lookahead)):
            return False  # in most cases the next request does not fit: do not sum up the others
        rest = walk[num_taken:]
        headroom = self.resume_headroom_blocks
        if self.start_headroom_steps:
            beams = sum([request.beam_width for request in walk])
            headroom += -(-self.start_headroom_steps // manager.tokens_per_block) * beams
        return has_free_blocks(blocks + bound(rest, lookahead) + headroom) and all(
            [request.lora_task_id is None for request in rest]
        )


@dataclass(slots=True, eq=False)
class _PausingWalk:
    """Walks down `walk`, and truncates the list at a request that is paused or does not fit.

    `fitting` has the requests taken so far, and `blocks` is the number of blocks that they need. At
    the start, `fitting` has the requests at the head of the walk. Unless `waits` is None, it
    records why requests are left out.
    """

    policy: MaxUtilizationScheduler
    walk: RequestList
    fitting: RequestList
    blocks: int
    delay: ReuseDelay | None
    waits: Waits | None
    _schedulable: RequestList = field(init=False)
    _pages: AdapterPages = field(init=False)
    _index: int = field(init=False)
    _paused: RequestList = field(default_factory=list)
    # the last request that did not fit; others may have been paused for it
    _preempting: LlmRequest | None = None
    _misfits: list[tuple[LlmRequest, Wait, RequestList]] = field(default_factory=list)
    _growth: int = 0  # `_growth_of` the first `_num_grown` fitting requests
    _num_grown: int = 0

    def __post_init__(self) -> None:
        self._schedulable = self.walk if self.waits is None else [*self.walk]
        self._pages = AdapterPages(self.policy.peft_cache_manager)
        self._index = len(self.fitting)

    def decide(self) -> tuple[RequestList, RequestList]:
        """Return the fitting and the paused requests."""
        policy, walk, fitting, delay = self.policy, self.walk, self.fitting, self.delay
        needed_one_step = policy.kv_cache_manager.get_needed_blocks_one_step
        has_free_blocks = policy.kv_cache_manager.scheduling_has_free_blocks
        is_guarded = policy.resume_headroom_blocks > 0 or policy.start_headroom_steps > 0
        while self._index < len(walk):
            request = walk[self._index]
            if delay is not None and delay.delays(request):
                self._skip(request, delay)
                continue
            needed = needed_one_step(request, policy.two_step_lookahead)
            # if `needed` is 0, the blocks suffice: `blocks` fitted before, and pauses free more
            fits = len(fitting) < policy.max_num_requests and (
                not needed or has_free_blocks(self.blocks + needed)
            )
            if is_guarded and self._starts_too_early(request, needed, fits):
                continue
            if fits and (request.lora_task_id is None or self._pages.take(request.lora_task_id)):
                fitting.append(request)
                if delay is not None and request.state is _CONTEXT_INIT:
                    policy.kv_cache_manager.scheduling_add_sequence(request)
                self.blocks += needed
                self._index += 1
            else:
                self._pause_for(request, needed, fits)
        if self.waits is not None:
            self._record_misfits(self.waits)
        return fitting, self._paused

    def _skip(self, request: LlmRequest, delay: ReuseDelay) -> None:
        """Skip a request that waits until another request has computed a prefix.

        If the request was tried before and did not fit, the recorded prefix is its own. The
        reported wait is then for the resource that the request lacked.
        """
        if self.waits is not None:
            is_own = request is self._preempting
            wait = self._misfits[-1][1] if is_own else delay.wait(request, self._schedulable)
            self.waits.put(request, wait)
        self._index += 1

    def _starts_too_early(self, request: LlmRequest, needed: int, fits: bool) -> bool:
        """Return whether a request must not start because too few blocks would stay free.

        If so, remove the request from the walk, with all requests after it that have not started.
        """
        fitting = self.fitting
        if not fitting or request is self._preempting or _is_started(request):
            return False
        if fits:
            headroom = self._headroom_for(request)
            blocks = self.blocks + needed + headroom
            if not headroom or self.policy.kv_cache_manager.scheduling_has_free_blocks(blocks):
                return False
        # requests of lower rank; the test before `_is_started` is faster and excludes most
        started = [
            other
            for other in self.walk[self._index + 1 :]
            if (other.context_current_position or other.state is not _CONTEXT_INIT)
            and _is_started(other)
        ]
        if started and not request.pause_count:
            return False  # a first start may pause requests of lower rank
        if self.waits is not None:
            wait = self._lacking(needed, self._headroom_for(request))
            self.waits.end(request, wait, [*fitting, *started], self.walk)
        self.walk[self._index :] = started
        return True

    def _headroom_for(self, request: LlmRequest) -> int:
        """Return how many blocks must stay free if `request` starts in addition to `fitting`."""
        policy, fitting = self.policy, self.fitting
        resume = policy.resume_headroom_blocks if request.pause_count else 0
        if not policy.start_headroom_steps:
            return resume
        if len(fitting) > self._num_grown:
            self._growth += self._growth_of(fitting[self._num_grown :])
            self._num_grown = len(fitting)
        return max(resume, self._growth + self._growth_of([request]))

    def _growth_of(self, requests: RequestList) -> int:
        """Return how many blocks `requests` take in `start_headroom_steps` steps.

        Steps after a request's end do not count.
        """
        steps, manager = self.policy.start_headroom_steps, self.policy.kv_cache_manager
        growth, size, kept = 0, manager.tokens_per_block, manager.max_kept_tokens
        for request in requests:
            stored = request.num_tokens
            if stored >= kept:
                continue
            end = request.prompt_len + request.max_new_tokens - 1
            if end > kept:
                end = kept
            last = stored + steps
            if last > end:
                last = end
            if last > stored:
                growth += ((last - 1) // size - (stored - 1) // size) * request.beam_width
        return growth

    def _pause_for(self, request: LlmRequest, needed: int, fits: bool) -> None:
        """Truncate the walk because the request does not fit, and pause a victim if one is found.

        The victim is removed from the walk, with all requests after it that `max_pauses` does not
        protect. If no victim is found, the same happens to `request` and the requests after it.
        """
        self._preempting = request
        if self.waits is not None:
            wait = self._lacking(needed)
            if fits:
                wait = self._pages.wait(request.lora_task_id, self.fitting)
            self._misfits.append((request, wait, [*self.walk]))
        cut, spared = self._find_victim()
        if cut is None:
            cut = self._index
        else:
            victim = self.walk[cut]
            self._paused.append(victim)
            self.policy.kv_cache_manager.scheduling_remove_sequence(victim.request_id)
        self.walk[cut:] = spared

    def _record_misfits(self, waits: Waits) -> None:
        """Record why requests did not fit. Requests that were after them in the walk wait for them.

        A request that other requests were paused for may have fitted in the end. It does not wait.
        """
        for request, wait, _ in reversed(self._misfits):
            if request not in self.fitting:
                waits.put(request, wait)
        for request, wait, walk in reversed(self._misfits):
            waits.all_but(self.fitting, walk, wait.of_those_behind(request.request_id))

    def _lacking(self, needed: int, headroom: int = 0) -> Wait:
        """Return the wait for a place in the batch if `fitting` fills it, otherwise for blocks.

        `headroom` is the number of blocks that must stay free in addition to the `needed` blocks.
        """
        policy, taken = self.policy, self.fitting
        if len(taken) >= policy.max_num_requests:
            return full(taken, policy.max_num_requests)
        free = policy.kv_cache_manager.scheduling_num_free_blocks
        return lacking(WaitReason.KV_BLOCKS, needed, free, free - self.blocks - headroom, taken)

    def _find_victim(self) -> tuple[int | None, RequestList]:
        """Return the victim's index in the walk, and the protected requests after the victim.

        Without a victim, return None and all protected requests from `_index` on.
        """
        walk, first, max_pauses = self.walk, self._index, self.policy.max_pauses
        exempt: list[int] = []
        for index in range(len(walk) - 1, first - 1, -1):
            request = walk[index]
            if request.state is _CONTEXT_INIT and not request.context_current_position:
                continue  # a faster `not _is_started`: most requests of a long list wait
            if _is_started(request):
                if max_pauses is None or request.pause_count < max_pauses:
                    return index, [walk[other] for other in reversed(exempt)]
                exempt.append(index)
        if exempt and exempt[-1] == first:
            return exempt[0], []
        return None, [walk[index] for index in reversed(exempt)]


def _is_started(request: LlmRequest) -> bool:
    """Return whether a request holds blocks: it generates, or is past its first context chunk."""
    state = request.state
    if state is _CONTEXT_INIT:
        return not request.is_first_context_chunk
    return state is _IN_PROGRESS or state is _TO_COMPLETE
