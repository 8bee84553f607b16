"""`KvSequences`: the blocks that each sequence holds, from its first chunk to its end.

The module only counts block ids and hands them out: it knows no tensors, clocks or policies, and
never waits. The executor owns the memory of the blocks, and orders the accesses to this memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gptmanager.errors import CapacityError, DuplicateRequestIdError
from gptmanager.kv_cache.block import NEVER, BlockCopy, BlockPool, BlockTables, KvCacheReport, audit
from gptmanager.kv_cache.block_reuse import BlockReuse
from gptmanager.kv_cache.needs import BlockNeeds
from gptmanager.request.llm_request import LlmRequest, LlmRequestState

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT


class KvSequences:
    """The block tables of `live` sequences, by request id, and the `pool` of their blocks.

    `KvCacheManager` has methods with the same names, and documents them. A call that cannot be
    satisfied raises and changes nothing. An unknown request id raises ValueError.
    """

    __slots__ = ("live", "needs", "num_blocks", "pool", "reuse")

    def __init__(self, num_blocks: int, needs: BlockNeeds, reuse: BlockReuse | None) -> None:
        self.num_blocks = num_blocks
        self.needs = needs
        self.reuse = reuse
        self.pool = BlockPool(num_blocks) if reuse is None else reuse.pool
        self.live: dict[int, BlockTables] = {}

    # Changes of sequences -------------------------------------------------------------------

    def add_sequence(self, request: LlmRequest) -> tuple[BlockCopy, ...]:
        request_id, beam_width = request.request_id, request.beam_width
        if request_id in self.live:
            raise DuplicateRequestIdError(f"request {request_id} already holds KV cache blocks")
        shared, private = self.needs.context(request)
        if self.reuse is not None and self.reuse.lookups.applies_to(request):
            return self._add_reusing(self.reuse, request, shared, private)
        self._require(request_id, shared + private)
        common = self.pool.take(shared, beam_width)
        tables = [common, *(common.copy() for _ in range(beam_width - 1))]
        if private:
            for table, block in zip(tables, self.pool.take(private), strict=True):
                table.append(block)
        self._hold(BlockTables(request_id, self.needs.context_slots(request), tables), request)
        return self.take_moves()

    def add_token(self, request_id: int) -> tuple[int, ...]:
        try:
            sequence = self.live[request_id]
        except KeyError:
            raise _unknown(request_id) from None
        num_slots = sequence.num_slots
        if num_slots != sequence.grows_at:
            sequence.num_slots = num_slots + 1
            return ()
        if not self.needs.grows:
            raise ValueError(f"request {request_id}: a cross KV cache accepts no further tokens")
        if self.reuse is not None and num_slots == self.needs.max_slots:
            self.reuse.end_sharing(sequence)
            sequence.num_slots = num_slots + 1
            self.table_changed(sequence)
            return ()
        tables = sequence.tables
        self._require(request_id, len(tables))
        blocks = self.pool.take(len(tables))
        for table, block in zip(tables, blocks, strict=True):
            table.append(block)
        sequence.num_slots = num_slots + 1
        self.table_changed(sequence)
        return tuple(blocks)

    def rewind(self, request_id: int, num_tokens: int) -> None:
        sequence = self._sequence(request_id)
        stored, window = sequence.num_slots - self.needs.bubble, self.needs.window
        if len(sequence.tables) > 1 or not self.needs.grows:
            raise ValueError(f"request {request_id}: beams and cross caches cannot be rewound")
        if not 0 <= num_tokens <= stored:
            raise ValueError(f"request {request_id}: cannot rewind {num_tokens} of {stored} tokens")
        left = sequence.num_slots - num_tokens
        peak = max(sequence.peak_slots, sequence.num_slots)
        if peak > self.needs.max_slots and left < peak - 1:
            raise ValueError(
                f"request {request_id} is past its attention window of {window} tokens: only the "
                f"last can be rewound, not {num_tokens}"
            )
        if self.reuse is not None:
            self.reuse.make_writable(sequence, left)
        sequence.num_slots, sequence.peak_slots = left, peak
        table = sequence.tables[0]
        keep = self.needs.table_length(sequence.num_slots)
        self.pool.release(reversed(table[keep:]))
        del table[keep:]
        self.table_changed(sequence)

    def fork(self, request_id: int, parents: Sequence[int]) -> tuple[BlockCopy, ...]:
        sequence = self._sequence(request_id)
        tables, needs = sequence.tables, self.needs
        if len(parents) != len(tables) or not all(0 <= p < len(tables) for p in parents):
            raise ValueError(f"request {request_id} has {len(tables)} beams, not parents {parents}")
        if not needs.grows:
            return ()  # all beams read the same encoder output, so there is nothing to copy
        if sequence.num_slots > needs.max_slots:
            raise ValueError(
                f"request {request_id} is past its attention window: its beams cannot be forked"
            )
        num_full, num_tail = divmod(sequence.num_slots, self.needs.tokens_per_block)
        sequence.tables, copies = self.pool.fork(tables, parents, num_full, num_tail)
        return self.take_moves() + copies

    def take_moves(self) -> tuple[BlockCopy, ...]:
        return () if self.reuse is None else self.reuse.pool.take_copies()

    def store_context(self, request: LlmRequest) -> None:
        if self.reuse is not None:
            self.reuse.store_context(self._sequence(request.request_id), request)

    def remove(self, request_id: int, store: bool = True) -> None:
        sequence = self._sequence(request_id)
        del self.live[request_id]
        if self.reuse is not None:
            self.reuse.end(sequence, store)
        for table in sequence.tables:
            self.pool.release(reversed(table))

    def withdraw(self, request_id: int) -> None:
        if self.reuse is not None:
            self.reuse.withdraw(self._sequence(request_id), self.live.values())

    def clear_cached(self) -> None:
        if self.reuse is not None:
            self.reuse.clear()

    # Blocks held ----------------------------------------------------------------------------

    def block_ids(self, request_id: int) -> list[list[int]]:
        return [table.copy() for table in self._sequence(request_id).tables]

    def num_tokens(self, request_id: int) -> int:
        return self._sequence(request_id).num_slots - self.needs.bubble

    def num_cached_tokens(self, request_id: int) -> int:
        return self._sequence(request_id).num_cached

    def audit(self) -> KvCacheReport:
        report = audit(
            self.pool,
            self.live.values(),
            tokens_per_block=self.needs.tokens_per_block,
            max_slots=self.needs.max_slots,
            private_tails=self.needs.grows,
        )
        if self.reuse is None:
            return report
        counts = self.reuse.counts
        return replace(
            report,
            problem=report.problem or self.reuse.problem(self.live.values()),
            cached=counts.cached_blocks,
            host_total=counts.host_blocks,
            host_free=counts.host_blocks - counts.cached_host_blocks,
            host_used=counts.cached_host_blocks,
        )

    # Private --------------------------------------------------------------------------------

    def _add_reusing(
        self, reuse: BlockReuse, request: LlmRequest, shared: int, private: int
    ) -> tuple[BlockCopy, ...]:
        tables, num_cached, copies = reuse.start(request, shared, private, self._require)
        sequence = BlockTables(request.request_id, request.prompt_len, tables)
        sequence.num_cached, sequence.may_share = num_cached, True
        self._hold(sequence, request)
        if request.state is _CONTEXT_INIT and request.context_current_position < num_cached:
            request.skip_cached_context(num_cached, self.needs.tokens_per_block)
        return copies

    def _hold(self, sequence: BlockTables, request: LlmRequest) -> None:
        if request.beam_width == 1 and self.needs.grows:
            sequence.life_tokens = request.prompt_len + request.max_new_tokens
            sequence.total_blocks = self.needs.whole_life(request)
        self.live[request.request_id] = sequence
        self.table_changed(sequence)

    def _sequence(self, request_id: int) -> BlockTables:
        try:
            return self.live[request_id]
        except KeyError:
            raise _unknown(request_id) from None

    def _require(self, request_id: int, num_blocks: int) -> None:
        free = len(self.pool.free)
        if num_blocks > free:
            need = f"request {request_id} needs {num_blocks} more KV cache blocks"
            raise CapacityError(f"{need}, {free} of {self.num_blocks} are free")

    def table_changed(self, sequence: BlockTables) -> None:
        length = len(sequence.tables[0])
        if not self.needs.grows:
            sequence.grows_at = sequence.num_slots
        elif length < self.needs.max_table_length:
            sequence.grows_at = length * self.needs.tokens_per_block
        else:  # shared blocks must not be overwritten when the window moves on
            sequence.grows_at = self.needs.max_slots if sequence.may_share else NEVER
        sequence.remaining_blocks = max(0, sequence.total_blocks - length)


def _unknown(request_id: int) -> ValueError:
    return ValueError(f"request {request_id} holds no KV cache blocks")
