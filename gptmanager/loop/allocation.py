"""Allocation: converts a scheduler's decision to a frozen `Schedule`, with memory and slots.

This is the only module that allocates and frees blocks of running requests. It makes no decisions:
it checks that memory suffices, allocates, and records the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

from gptmanager.errors import GptManagerError, SchedulerError
from gptmanager.kv_cache import NO_SNAPSHOT, BlockCopy, KvCacheManager, LedgerError, StateCopy
from gptmanager.kv_cache.attention_window import AttentionWindow
from gptmanager.kv_cache.state import KvCacheState, kv_cache_state, restore_kv_cache
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.request.llm_request import LlmRequest, LlmRequestState
from gptmanager.scheduler import SchedulerOutput
from gptmanager.step import BeamFork, BlockAppend, Drafts, Row, Schedule, SequenceStart

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT


class AllocatorState(NamedTuple):
    """The state of an `Allocator`. `paused` has ids of requests paused since the last schedule."""

    kv_cache: KvCacheState
    free_slots: tuple[int, ...]
    num_starts: int
    num_schedules: int
    paused: tuple[int, ...]


class Allocator:
    """The slots and blocks of started sequences.

    A slot is the index of a sequence in the tables of the executor. At most `num_slots` sequences
    may be started at the same time. `window` is None without sliding-window attention.
    """

    def __init__(
        self, kv_cache: KvCacheManager, num_slots: int, window: AttentionWindow | None = None
    ) -> None:
        self.kv_cache = kv_cache
        self.num_slots = num_slots
        self.window = window
        self._saves_states = kv_cache.num_snapshots > 0
        self._free_slots = self._all_slots()
        self._num_starts = 0  # sequences that have started so far
        self.num_schedules = 0
        self._paused: list[int] = []  # ids of requests paused since the last schedule

    def allocate(
        self, output: SchedulerOutput, now: float, max_input_len: int, micro_batch_id: int = 0
    ) -> Schedule | None:
        """Allocate memory for a checked decision. Return the schedule, or None if no request runs.

        `max_input_len` is the limit that `pause` needs for the paused requests. Raise
        SchedulerError if too little memory or no slot is free. The text of the error starts with a
        verb, because `scheduler_call.blamed` puts the scheduler's name before the text.
        """
        for request in output.paused_requests:
            self.pause(request, max_input_len)
        parts = _Parts()
        context_rows: list[Row] = []
        if output.context_requests:
            context_rows = self._launch_contexts(output.context_requests, now, parts)
        generation_rows = self._launch_generation(output.generation_requests, parts)
        parts.copies += self.kv_cache.take_moves()
        if not context_rows and not generation_rows:
            return None
        paused, self._paused = self._paused, []
        self.num_schedules += 1
        return Schedule(
            iteration=self.num_schedules - 1,
            context_rows=tuple(context_rows),
            generation_rows=tuple(generation_rows),
            starts=tuple(parts.starts),
            block_appends=tuple(parts.appends),
            block_copies=tuple(parts.copies),
            beam_forks=tuple(parts.forks),
            drafts=tuple(parts.drafts),
            paused=tuple(paused),
            micro_batch_id=micro_batch_id,
            state_loads=tuple(parts.loads),
            state_saves=tuple(parts.saves),
        )

    def state(self) -> AllocatorState:
        """Return the allocator's state as data, between two iterations."""
        return AllocatorState(
            kv_cache_state(self.kv_cache),
            tuple(self._free_slots),
            self._num_starts,
            self.num_schedules,
            tuple(self._paused),
        )

    def restore(self, state: AllocatorState, requests: Mapping[int, ActiveRequest]) -> None:
        """Restore `state` into an empty allocator. Raise LedgerError if it is inconsistent."""
        started = {id_: request for id_, request in requests.items() if request.slot >= 0}
        restore_kv_cache(self.kv_cache, state.kv_cache, started)
        self._free_slots = list(state.free_slots)
        slots = [*self._free_slots, *(request.slot for request in started.values())]
        if sorted(slots) != list(range(self.num_slots)):
            raise LedgerError(f"the slots are not 0 to {self.num_slots - 1}, each held or free")
        self._num_starts, self.num_schedules = state.num_starts, state.num_schedules
        self._paused = list(state.paused)

    def settle_drafts(self, request: ActiveRequest, num_drafts: int, num_accepted: int) -> None:
        """Record the accepted drafts, and free the positions of the rejected ones."""
        request.settle_drafts(num_drafts, num_accepted)
        if num_accepted < num_drafts:
            self.kv_cache.rewind(request.request_id, num_drafts - num_accepted)

    def pause(self, request: LlmRequest, max_input_len: int) -> None:
        """Free a request's slot and blocks. When it restarts, its context is computed again.

        `LlmRequest.pause` describes the new context and `max_input_len`.
        """
        self.release(request)
        request.pause(max_input_len)
        self._paused.append(request.request_id)

    def release(self, request: LlmRequest) -> None:
        """Free a request's slot and blocks, if the request has started.

        The executor runs steps in order, so a later step may use the freed blocks at once.
        """
        if request.slot >= 0:
            self.kv_cache.remove(request.request_id)
            self._free_slots.append(request.slot)
            request.slot = -1
            request.epoch = 0
        self.kv_cache.forget_waiting(request.request_id)

    def reset(self) -> None:
        """Free all slots and blocks, and forget all cached blocks."""
        self.kv_cache.reset()
        self._free_slots = self._all_slots()
        self._paused = []

    def _all_slots(self) -> list[int]:
        return list(range(self.num_slots))[::-1]

    def check(self) -> None:
        """Raise GptManagerError if a block has wrong owners, or a slot is free twice."""
        self.kv_cache.check()
        if len(set(self._free_slots)) != len(self._free_slots):
            raise GptManagerError(f"a slot is free twice: {sorted(self._free_slots)}")

    def _launch_contexts(
        self, requests: Iterable[LlmRequest], now: float, parts: _Parts
    ) -> list[Row]:
        starting = [request for request in requests if request.slot < 0]
        with self.kv_cache.holding_cached(starting):
            for request in starting:
                self._start(cast(ActiveRequest, request), now, parts)
        rows = []
        for request in requests:
            row = self._launch_context(request)
            if self._saves_states:
                self._save_state(row, parts)
            if row.samples and request.num_draft_tokens:
                row = self._launch_drafts(cast(ActiveRequest, request), row, parts)
            rows.append(row)
            if request.state is not _CONTEXT_INIT:
                # later launches may read the blocks that this launch writes
                self.kv_cache.store_context(request)
        return rows

    def _launch_context(self, request: LlmRequest) -> Row:
        position, stop = request.context_current_position, None
        if self._saves_states:  # the chunk ends where a later request may begin
            stop = self.kv_cache.next_stop(request.request_id, position)
        request.move_to_next_context_chunk(stop)
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

    def _start(self, request: ActiveRequest, now: float, parts: _Parts) -> None:
        """Give the request a slot and its blocks."""
        if not self._free_slots:
            raise SchedulerError(
                f"started request {request.request_id}, but all {self.num_slots} "
                "slots are held by started requests"
            )
        try:
            parts.copies += self.kv_cache.add_sequence(request)
        except GptManagerError as error:
            raise _no_memory(request, error) from error
        request.slot = self._free_slots.pop()
        self._num_starts += 1
        request.epoch = self._num_starts
        if request.times.first_scheduled is None:
            request.times.first_scheduled = now
            request.cached_tokens = self.kv_cache.num_cached_tokens(request.request_id)
        parts.starts.append(_sequence_start(request))
        snapshot = self.kv_cache.found_snapshot(request.request_id)
        if snapshot != NO_SNAPSHOT:
            parts.loads.append(StateCopy(request.slot, snapshot))
        first_beam = self.kv_cache.block_ids(request.request_id)[0]  # beam 0 runs the context phase
        parts.appends.append(BlockAppend(request.slot, 0, tuple(first_beam)))
        self._close_ring(request, len(first_beam), parts)

    def _launch_generation(self, requests: Iterable[LlmRequest], parts: _Parts) -> list[Row]:
        add_token = self.kv_cache.add_token
        rows = []
        for request in requests:
            position = request.num_tokens - 1
            beam_width = request.beam_width
            try:
                if beam_width > 1:
                    self._fork(cast(ActiveRequest, request), position, parts)
                new_blocks = add_token(request.request_id)
            except GptManagerError as error:
                raise _no_memory(request, error) from error
            if new_blocks:
                self._append(request, position, new_blocks, parts)
            row = Row(
                request.request_id, request.epoch, request.slot, position, 1, True, beam_width
            )
            if request.num_draft_tokens:
                row = self._launch_drafts(cast(ActiveRequest, request), row, parts)
            if self._saves_states:
                self._save_state(row, parts)
            rows.append(row)
            request.launch_token()
        return rows

    def _save_state(self, row: Row, parts: _Parts) -> None:
        """Take a snapshot of the state after the row, if the row ends at a block boundary."""
        end = row.position + row.num_tokens
        if end % self.kv_cache.tokens_per_block:
            return
        snapshot = self.kv_cache.save_state(row.request_id, end)
        if snapshot != NO_SNAPSHOT:
            parts.saves.append(StateCopy(row.slot, snapshot))

    def _append(
        self, request: LlmRequest, position: int, new_blocks: tuple[int, ...], parts: _Parts
    ) -> None:
        """Record the new blocks, one per beam. Each of them holds `position` of its beam."""
        first = position // self.kv_cache.tokens_per_block
        if request.beam_width == 1:
            parts.appends.append(BlockAppend(request.slot, first, new_blocks))
            self._close_ring(request, first + 1, parts)
        else:
            parts.appends += (
                BlockAppend(request.slot, first, (block,), beam)
                for beam, block in enumerate(new_blocks)
            )

    def _launch_drafts(self, request: ActiveRequest, row: Row, parts: _Parts) -> Row:
        """Return the row extended by the request's drafts, and allocate blocks for them."""
        tokens = request.take_drafts()
        first = row.position + row.num_tokens
        for position in range(first, first + len(tokens)):
            try:
                new_blocks = self.kv_cache.add_token(request.request_id)
            except GptManagerError as error:
                raise _no_memory(request, error) from error
            if new_blocks:
                self._append(request, position, new_blocks, parts)
        parts.drafts.append(Drafts(request.slot, first, tokens))
        num_tokens = row.num_tokens + len(tokens)
        return row._replace(num_tokens=num_tokens, num_drafts=len(tokens))

    def _close_ring(self, request: LlmRequest, num_blocks: int, parts: _Parts) -> None:
        """Fill the rest of the block table, once the window's last block has been allocated.

        The added entries repeat the blocks of the window's ring buffer, so later positions
        overwrite the oldest positions in the ring.
        """
        tokens_per_block = self.kv_cache.tokens_per_block
        total = -(-(request.prompt_len + request.max_new_tokens) // tokens_per_block)
        if self.window is not None and num_blocks == self.window.num_blocks < total:
            blocks = self.kv_cache.block_ids(request.request_id)[0]
            again = tuple(blocks[self.window.index(i)] for i in range(num_blocks, total))
            parts.appends.append(BlockAppend(request.slot, num_blocks, again))

    def _fork(self, request: ActiveRequest, position: int, parts: _Parts) -> None:
        """Reorder the beams as the beam search has decided."""
        search = request.search
        if search is None:
            raise TypeError(f"request {request.request_id} has beams but no search")
        parents = tuple(search.parents)
        parts.copies += self.kv_cache.fork(request.request_id, parents)
        tables = self.kv_cache.block_ids(request.request_id)
        for beam, table in enumerate(tables):
            if beam != parents[beam]:
                parts.appends.append(BlockAppend(request.slot, 0, tuple(table), beam))
        parts.forks.append(BeamFork(request.slot, position, parents, tuple(search.tokens)))


class _Parts:
    """The parts of a schedule other than its rows, while they are collected."""

    __slots__ = ("appends", "copies", "drafts", "forks", "loads", "saves", "starts")

    def __init__(self) -> None:
        self.starts: list[SequenceStart] = []
        self.appends: list[BlockAppend] = []
        self.copies: list[BlockCopy] = []
        self.forks: list[BeamFork] = []
        self.drafts: list[Drafts] = []
        self.loads: list[StateCopy] = []
        self.saves: list[StateCopy] = []


def _sequence_start(request: ActiveRequest) -> SequenceStart:
    search = request.search
    return SequenceStart(
        request.slot,
        tuple(request.tokens),
        request.orig_prompt_len,
        request.sampling,
        request.processor,
        request.client_id,
        request.wanted_from_start,
        request.prompt_table,
        request.beam_width,
        request.drafts.logits,
        search is not None and search.params.sampled,
        1 if search is None else search.num_candidates,
        request.adapter_slot,
    )


def _no_memory(request: LlmRequest, error: GptManagerError) -> SchedulerError:
    return SchedulerError(
        f"scheduled request {request.request_id}, but memory does not suffice: {error}"
    )
