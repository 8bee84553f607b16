"""Allocation: from a scheduler's decision to a frozen `Schedule`, memory and slots included.

The one place that calls the KV cache manager for running requests. Decides nothing: it checks
that a decision is possible, carries it out on the accounting, and writes it down.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, cast

from gptmanager.errors import GptManagerError, SchedulerError
from gptmanager.kv_cache import BlockCopy, KvCacheManager, LedgerError
from gptmanager.kv_cache.attention_window import AttentionWindow
from gptmanager.kv_cache.state import KvCacheState, kv_cache_state, restore_kv_cache
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.request.llm_request import LlmRequest, LlmRequestState
from gptmanager.scheduler import SchedulerOutput
from gptmanager.step import BeamFork, BlockAppend, Drafts, Row, Schedule, SequenceStart

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT
_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS


def check_output(
    output: SchedulerOutput,
    requests: Mapping[int, ActiveRequest],
    in_flight: Collection[int],
    scheduler: str,
    *,
    max_batch_size: int,
    max_num_tokens: int,
) -> None:
    """Raise SchedulerError naming the class `scheduler` and the request it must not return."""
    context, generation, paused = output
    chosen = [*context, *generation, *paused]
    find = requests.get
    ids = set()
    for request in chosen:
        request_id = request.request_id
        if find(request_id) is not request:
            raise SchedulerError(f"{scheduler} returned {request!r}, which is not active")
        ids.add(request_id)
    if len(ids) != len(chosen):
        twice = next(request for request in chosen if chosen.count(request) > 1)
        raise SchedulerError(f"{scheduler} returned request {twice.request_id} twice")
    num_tokens = 0
    for request in context:
        if request.request_id in in_flight:
            raise SchedulerError(f"{scheduler} returned {request!r}, which is in flight")
        size = request.context_chunk_size
        if request.state is not _CONTEXT_INIT or size == 0:
            raise SchedulerError(f"{scheduler} returned {request!r} as a context request")
        remaining = request.context_remaining_length
        if not request.context_current_position:  # the beginning may be cached
            remaining -= request.estimated_reusable_tokens
        num_tokens += remaining if size is None or size > remaining else size
        if request.is_last_context_chunk:
            num_tokens += request.num_draft_tokens
    for request in generation:
        if request.request_id in in_flight:
            raise SchedulerError(f"{scheduler} returned {request!r}, which is in flight")
        if request.state is not _IN_PROGRESS:
            raise SchedulerError(f"{scheduler} returned {request!r} as a generation request")
        num_tokens += request.beam_width + request.num_draft_tokens
    num_requests = len(context) + len(generation)
    if num_requests > max_batch_size:
        raise SchedulerError(
            f"{scheduler} returned {num_requests} requests, max_batch_size = {max_batch_size}; "
            f"request {chosen[max_batch_size].request_id} is the first one too many"
        )
    if num_tokens > max_num_tokens:
        raise SchedulerError(
            f"{scheduler} returned {num_tokens} tokens, max_num_tokens = {max_num_tokens}; "
            f"request {chosen[0].request_id} stands first"
        )


class AllocatorState(NamedTuple):
    """See `Allocator`; `paused`: since the last schedule."""

    kv_cache: KvCacheState
    free_slots: tuple[int, ...]
    num_starts: int
    num_schedules: int
    paused: tuple[int, ...]


class Allocator:
    """Slots and blocks of started sequences.

    `num_slots`: sequences that may be started at the same time.
    """

    def __init__(
        self, kv_cache: KvCacheManager, num_slots: int, window: AttentionWindow | None = None
    ) -> None:
        self.kv_cache = kv_cache
        self.num_slots = num_slots
        self.window = window
        self._free_slots = self._all_slots()
        self._num_starts = 0  # ever
        self._num_schedules = 0
        self._paused: list[int] = []  # since the last schedule

    def allocate(
        self,
        output: SchedulerOutput,
        now: float,
        max_input_len: int,
        scheduler: str,
        micro_batch_id: int = 0,
    ) -> Schedule | None:
        """Carry a checked decision out; None when it lets nobody run.

        Raises SchedulerError naming the class `scheduler` when memory does not suffice.
        """
        for request in output.paused_requests:
            self.release(request)
            request.pause(max_input_len)
            self._paused.append(request.request_id)
        starts: list[SequenceStart] = []
        appends: list[BlockAppend] = []
        copies: list[BlockCopy] = []
        forks: list[BeamFork] = []
        drafts: list[Drafts] = []
        context_rows = []
        starting = [request for request in output.context_requests if request.slot < 0]
        with self.kv_cache.holding_cached(starting):
            for request in starting:
                copies += self._start(cast(ActiveRequest, request), now, starts, appends, scheduler)
        for request in output.context_requests:
            row = _launch_context(request)
            if row.samples and request.num_draft_tokens:
                row = self._launch_drafts(
                    cast(ActiveRequest, request), row, appends, drafts, scheduler
                )
            context_rows.append(row)
            if request.state is not _CONTEXT_INIT:
                # whoever starts from the next launch on reads what this one writes
                self.kv_cache.store_context(request)
        generation_rows = self._launch_generation(
            output.generation_requests, appends, copies, forks, drafts, scheduler
        )
        copies += self.kv_cache.take_moves()
        if not context_rows and not generation_rows:
            return None
        paused, self._paused = self._paused, []
        self._num_schedules += 1
        return Schedule(
            iteration=self._num_schedules - 1,
            context_rows=tuple(context_rows),
            generation_rows=tuple(generation_rows),
            starts=tuple(starts),
            block_appends=tuple(appends),
            block_copies=tuple(copies),
            beam_forks=tuple(forks),
            drafts=tuple(drafts),
            paused=tuple(paused),
            micro_batch_id=micro_batch_id,
        )

    def state(self) -> AllocatorState:
        """As data, between two iterations."""
        return AllocatorState(
            kv_cache_state(self.kv_cache),
            tuple(self._free_slots),
            self._num_starts,
            self._num_schedules,
            tuple(self._paused),
        )

    def restore(self, state: AllocatorState, requests: Mapping[int, ActiveRequest]) -> None:
        """Bring empty accounts to `state`; raises LedgerError where it contradicts itself."""
        started = {id_: request for id_, request in requests.items() if request.slot >= 0}
        restore_kv_cache(self.kv_cache, state.kv_cache, started)
        self._free_slots = list(state.free_slots)
        slots = [*self._free_slots, *(request.slot for request in started.values())]
        if sorted(slots) != list(range(self.num_slots)):
            raise LedgerError(f"the slots are not 0 to {self.num_slots - 1}, each held or free")
        self._num_starts, self._num_schedules = state.num_starts, state.num_schedules
        self._paused = list(state.paused)

    def settle_drafts(self, request: ActiveRequest, num_drafts: int, num_accepted: int) -> None:
        """Give back the positions of guesses that were wrong."""
        request.settle_drafts(num_drafts, num_accepted)
        if num_accepted < num_drafts:
            self.kv_cache.rewind(request.request_id, num_drafts - num_accepted)

    def release(self, request: LlmRequest) -> None:
        """Free what a request holds. Later steps that reuse it run after those that read it."""
        if request.slot >= 0:
            self.kv_cache.remove(request.request_id)
            self._free_slots.append(request.slot)
            request.slot = -1
            request.epoch = 0
        self.kv_cache.forget_waiting(request.request_id)

    def reset(self) -> None:
        """Begin anew: all slots and blocks are free, whoever held them, and nothing is cached."""
        self.kv_cache.reset()
        self._free_slots = self._all_slots()
        self._paused = []

    def _all_slots(self) -> list[int]:
        return list(range(self.num_slots))[::-1]

    def check(self) -> None:
        """Raises GptManagerError unless every block and slot has the owners it should have."""
        self.kv_cache.check()
        if len(set(self._free_slots)) != len(self._free_slots):
            raise GptManagerError(f"a slot is free twice: {sorted(self._free_slots)}")

    def _start(
        self,
        request: ActiveRequest,
        now: float,
        starts: list[SequenceStart],
        appends: list[BlockAppend],
        scheduler: str,
    ) -> tuple[BlockCopy, ...]:
        """Give the request a slot and its blocks; what must be copied into those."""
        if not self._free_slots:
            raise SchedulerError(
                f"{scheduler} started request {request.request_id}, but all {self.num_slots} "
                "slots are held by started requests"
            )
        try:
            copies = self.kv_cache.add_sequence(request)
        except GptManagerError as error:
            raise _no_memory(scheduler, request, error) from error
        request.slot = self._free_slots.pop()
        self._num_starts += 1
        request.epoch = self._num_starts
        if request.first_scheduled is None:
            request.first_scheduled = now
            request.cached_tokens = self.kv_cache.num_cached_tokens(request.request_id)
        starts.append(
            SequenceStart(
                request.slot,
                tuple(request.tokens),
                request.orig_prompt_len,
                request.sampling,
                request.processor,
                request.client_id,
                request.wanted_from_start,
                request.prompt_table,
                request.beam_width,
                request.draft_logits if request.drafts else None,
                request.search is not None and request.search.params.sampled,
                1 if request.search is None else request.search.num_candidates,
            )
        )
        first_beam = self.kv_cache.block_ids(request.request_id)[0]  # which runs the context
        appends.append(BlockAppend(request.slot, 0, tuple(first_beam)))
        self._close_ring(request, len(first_beam), appends)
        return copies

    def _launch_generation(
        self,
        requests: Iterable[LlmRequest],
        appends: list[BlockAppend],
        copies: list[BlockCopy],
        forks: list[BeamFork],
        drafts: list[Drafts],
        scheduler: str,
    ) -> list[Row]:
        add_token = self.kv_cache.add_token
        tokens_per_block = self.kv_cache.tokens_per_block
        rows = []
        for request in requests:
            position = request.num_tokens - 1
            beam_width = request.beam_width
            try:
                if beam_width > 1:
                    copies += self._fork(cast(ActiveRequest, request), position, forks, appends)
                new_blocks = add_token(request.request_id)
            except GptManagerError as error:
                raise _no_memory(scheduler, request, error) from error
            if new_blocks:
                first = position // tokens_per_block
                if beam_width == 1:
                    appends.append(BlockAppend(request.slot, first, new_blocks))
                    self._close_ring(request, first + 1, appends)
                else:
                    appends += (
                        BlockAppend(request.slot, first, (block,), beam)
                        for beam, block in enumerate(new_blocks)
                    )
            row = Row(
                request.request_id, request.epoch, request.slot, position, 1, True, beam_width
            )
            if request.num_draft_tokens:
                row = self._launch_drafts(
                    cast(ActiveRequest, request), row, appends, drafts, scheduler
                )
            rows.append(row)
            request.launch_token()
        return rows

    def _launch_drafts(
        self,
        request: ActiveRequest,
        row: Row,
        appends: list[BlockAppend],
        drafts: list[Drafts],
        scheduler: str,
    ) -> Row:
        """The row with the guesses behind its tokens, for which blocks are taken as well."""
        tokens = request.take_drafts()
        first = row.position + row.num_tokens
        for position in range(first, first + len(tokens)):
            try:
                new_blocks = self.kv_cache.add_token(request.request_id)
            except GptManagerError as error:
                raise _no_memory(scheduler, request, error) from error
            if new_blocks:
                place = position // self.kv_cache.tokens_per_block
                appends.append(BlockAppend(request.slot, place, new_blocks))
        drafts.append(Drafts(request.slot, first, tokens))
        num_tokens = row.num_tokens + len(tokens)
        return row._replace(num_tokens=num_tokens, num_drafts=len(tokens))

    def _close_ring(self, request: LlmRequest, num_blocks: int, appends: list[BlockAppend]) -> None:
        """With its last block a sequence goes round: later positions lie where the oldest lay."""
        tokens_per_block = self.kv_cache.tokens_per_block
        total = -(-(request.prompt_len + request.max_new_tokens) // tokens_per_block)
        if self.window is not None and num_blocks == self.window.num_blocks < total:
            blocks = self.kv_cache.block_ids(request.request_id)[0]
            again = tuple(blocks[self.window.place(i)] for i in range(num_blocks, total))
            appends.append(BlockAppend(request.slot, num_blocks, again))

    def _fork(
        self,
        request: ActiveRequest,
        position: int,
        forks: list[BeamFork],
        appends: list[BlockAppend],
    ) -> tuple[BlockCopy, ...]:
        """Reorder the beams as the search has decided; what must be copied for it."""
        search = request.search
        if search is None:
            raise TypeError(f"request {request.request_id} has beams but no search")
        parents = tuple(search.parents)
        copies = self.kv_cache.fork(request.request_id, parents)
        tables = self.kv_cache.block_ids(request.request_id)
        for beam, table in enumerate(tables):
            if beam != parents[beam]:
                appends.append(BlockAppend(request.slot, 0, tuple(table), beam))
        forks.append(BeamFork(request.slot, position, parents, tuple(search.tokens)))
        return copies


def _launch_context(request: LlmRequest) -> Row:
    position = request.context_current_position
    request.move_to_next_context_chunk()
    samples = request.state is not _CONTEXT_INIT
    if samples:
        request.launch_token()
    num_tokens = request.context_current_position - position
    return Row(
        request.request_id,
        request.epoch,
        request.slot,
        position,
        num_tokens,
        samples,
        request.beam_width,
    )


def _no_memory(scheduler: str, request: LlmRequest, error: GptManagerError) -> SchedulerError:
    return SchedulerError(
        f"{scheduler} scheduled request {request.request_id}, for which memory does not suffice: "
        f"{error}"
    )
