"""`KvSequences`: the blocks that each sequence holds, from its first chunk to its end.

The module only counts block ids and hands them out: it knows no tensors, clocks or policies, and
never waits. The executor owns the memory of the blocks, and orders the accesses to this memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gptmanager.errors import CapacityError, DuplicateRequestIdError
from gptmanager.kv_cache.block import (
    NEVER,
    BlockCopy,
    BlockPool,
    BlockTables,
    KvCacheReport,
    LedgerError,
    audit,
)
from gptmanager.kv_cache.block_reuse import BlockReuse, ReuseCounts
from gptmanager.kv_cache.needs import BlockNeeds
from gptmanager.kv_cache.offloading import HostCounts
from gptmanager.kv_cache.state_snapshots import NO_SNAPSHOT
from gptmanager.request.llm_request import LlmRequest, LlmRequestState

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT


class KvSequences:
    """The base of `KvCacheManager`: the block tables of live sequences, by request id.

    A call that cannot be satisfied raises and changes nothing. An unknown request id raises
    ValueError.
    """

    __slots__ = ("num_blocks", "_live", "_needs", "_pool", "_reuse")

    def __init__(self, num_blocks: int, needs: BlockNeeds, reuse: BlockReuse | None) -> None:
        self.num_blocks = num_blocks
        self._needs = needs
        self._begin(reuse)

    def _begin(self, reuse: BlockReuse | None) -> None:
        """Begin without sequences, so that all blocks are free."""
        self._reuse = reuse
        self._pool = BlockPool(self.num_blocks) if reuse is None else reuse.pool
        self._live: dict[int, BlockTables] = {}

    def reset(self) -> None:
        """Drop all sequences and cached content, so that all blocks are free."""
        self._begin(None if self._reuse is None else self._reuse.anew())

    # Changes of sequences -------------------------------------------------------------------

    def add_sequence(self, request: LlmRequest) -> tuple[BlockCopy, ...]:
        """Take the blocks of the whole prompt, even if only its first chunk runs now.

        All beams share the full blocks. Each beam has its own partial last block. With block reuse
        the context of `request` starts after its cached tokens. If the partial last block begins
        with cached tokens, only the first beam has them: compute the context in the first beam, and
        fork the other beams from it. The returned copies must be made in order, after the copies of
        earlier calls and before any block is written. They include pending copies of `add_token`.
        Raise DuplicateRequestIdError, or CapacityError if too few blocks are free.
        """
        request_id, beam_width = request.request_id, request.beam_width
        if request_id in self._live:
            raise DuplicateRequestIdError(f"request {request_id} already holds KV cache blocks")
        shared, private = self._needs.context(request)
        if self._reuse is not None and self._reuse.lookups.applies_to(request):
            return self._add_reusing(self._reuse, request, shared, private)
        self._require(request_id, shared + private)
        common = self._pool.take(shared, beam_width)
        tables = [common, *(common.copy() for _ in range(beam_width - 1))]
        if private:
            for table, block in zip(tables, self._pool.take(private), strict=True):
                table.append(block)
        self._hold(BlockTables(request_id, self._needs.context_slots(request), tables), request)
        return self.take_moves()

    def add_token(self, request_id: int) -> tuple[int, ...]:
        """Store one more position in each beam of the request.

        Return the blocks that were taken, one per beam; () in most calls. Raise CapacityError if
        too few blocks are free. With a host tier `take_moves` returns the copies to make before
        these blocks are written.
        """
        try:
            sequence = self._live[request_id]
        except KeyError:
            raise _unknown(request_id) from None
        num_slots = sequence.num_slots
        if num_slots != sequence.grows_at:
            sequence.num_slots = num_slots + 1
            return ()
        if not self._needs.grows:
            raise ValueError(f"request {request_id}: a cross KV cache accepts no further tokens")
        if self._reuse is not None and num_slots == self._needs.max_slots:
            self._reuse.end_sharing(sequence)
            sequence.num_slots = num_slots + 1
            self._table_changed(sequence)
            return ()
        tables = sequence.tables
        self._require(request_id, len(tables))
        blocks = self._pool.take(len(tables))
        for table, block in zip(tables, blocks, strict=True):
            table.append(block)
        sequence.num_slots = num_slots + 1
        self._table_changed(sequence)
        return tuple(blocks)

    def rewind(self, request_id: int, num_tokens: int) -> None:
        """Remove the last `num_tokens` positions. Blocks that become empty are freed.

        Raise ValueError for beams and cross caches, for recurrent states, for more tokens than are
        stored, and if the new end is inside a block that other sequences share. Past the attention
        window only the last token can be removed, because more would need positions that were
        overwritten.
        """
        sequence = self._sequence(request_id)
        stored, window = sequence.num_slots - self._needs.bubble, self._needs.window
        if len(sequence.tables) > 1 or not self._needs.grows:
            raise ValueError(f"request {request_id}: beams and cross caches cannot be rewound")
        if self._reuse is not None and self._reuse.snapshots is not None:
            raise ValueError(f"request {request_id}: a recurrent state cannot be rewound")
        if not 0 <= num_tokens <= stored:
            raise ValueError(f"request {request_id}: cannot rewind {num_tokens} of {stored} tokens")
        left = sequence.num_slots - num_tokens
        peak = max(sequence.peak_slots, sequence.num_slots)
        if peak > self._needs.max_slots and left < peak - 1:
            raise ValueError(
                f"request {request_id} is past its attention window of {window} tokens: only the "
                f"last can be rewound, not {num_tokens}"
            )
        if self._reuse is not None:
            self._reuse.make_writable(sequence, left)
        sequence.num_slots, sequence.peak_slots = left, peak
        table = sequence.tables[0]
        keep = self._needs.table_length(sequence.num_slots)
        self._pool.release(reversed(table[keep:]))
        del table[keep:]
        self._table_changed(sequence)

    def fork(self, request_id: int, parents: Sequence[int]) -> tuple[BlockCopy, ...]:
        """Let beam i continue from the blocks of beam `parents[i]`, without taking blocks.

        Full blocks become shared; a partial last block stays private to each beam. Return the
        copies to make before the next position is stored, in the order that `add_sequence`
        describes. The table of each beam that is not its own parent changes. Raise ValueError past
        the attention window.
        """
        sequence = self._sequence(request_id)
        tables, needs = sequence.tables, self._needs
        if len(parents) != len(tables) or not all(0 <= p < len(tables) for p in parents):
            raise ValueError(f"request {request_id} has {len(tables)} beams, not parents {parents}")
        if not needs.grows:
            return ()  # all beams read the same encoder output, so there is nothing to copy
        if sequence.num_slots > needs.max_slots:
            raise ValueError(
                f"request {request_id} is past its attention window: its beams cannot be forked"
            )
        num_full, num_tail = divmod(sequence.num_slots, self._needs.tokens_per_block)
        sequence.tables, copies = self._pool.fork(tables, parents, num_full, num_tail)
        return self.take_moves() + copies

    def take_moves(self) -> tuple[BlockCopy, ...]:
        """Return the copies, in order, that no call has returned yet; () without a host tier."""
        return () if self._reuse is None else self._reuse.pool.take_copies()

    def store_context(self, request: LlmRequest) -> None:
        """Make the full blocks of the computed context of `request` available for reuse.

        Steps run in order, so a part of the context counts as computed once its step is launched.
        Do nothing without block reuse.
        """
        if self._reuse is not None:
            self._reuse.store_context(self._sequence(request.request_id), request)

    def found_snapshot(self, request_id: int) -> int:
        """Return the snapshot that the state of the sequence begins with; NO_SNAPSHOT without one.

        Ask when the sequence was added. The snapshot must be copied before the step's rows run.
        """
        plan = None
        if self._reuse is not None and self._reuse.snapshots is not None:
            plan = self._reuse.snapshots.plans.get(request_id)
        return NO_SNAPSHOT if plan is None else plan.source

    def next_stop(self, request_id: int, position: int) -> int | None:
        """Return where a context chunk from `position` on must end at the latest, or None.

        The state there gets a snapshot, so that later requests can begin there.
        """
        return None if self._reuse is None else self._reuse.next_stop(request_id, position)

    def save_state(self, request_id: int, end: int) -> int:
        """Return the snapshot for the state after `end` tokens; NO_SNAPSHOT for no copy.

        Call it when the step that computes position `end - 1` is launched, if `end` is a multiple
        of `tokens_per_block`. The snapshot must be copied after the step's rows have run.
        """
        if self._reuse is None:
            return NO_SNAPSHOT
        return self._reuse.save_state(self._sequence(request_id), end)

    def remove(self, request_id: int, store: bool = True) -> None:
        """End the sequence. With `store`, its content except the newest token may be reused.

        The content is the confirmed tokens of the request. With several beams it is only the
        prompt. Blocks are freed from the last to the first, so that a prefix is evicted after its
        continuations.
        """
        sequence = self._sequence(request_id)
        del self._live[request_id]
        if self._reuse is not None:
            self._reuse.end(sequence, store)
        for table in sequence.tables:
            self._pool.release(reversed(table))

    def withdraw(self, request_id: int) -> None:
        """Remove the blocks of a sequence from the cache, and do not store them when it ends.

        Do the same for every sequence that shares one of these blocks. Do nothing without block
        reuse.
        """
        if self._reuse is not None:
            self._reuse.withdraw(self._sequence(request_id), self._live.values())

    def clear_cached(self) -> None:
        """Drop all cached content, even of live sequences, after a change of weights."""
        if self._reuse is not None:
            self._reuse.clear()

    # Blocks held ----------------------------------------------------------------------------

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._live

    @property
    def num_free_blocks(self) -> int:
        return len(self._pool.free)

    def get_num_free_blocks(self) -> int:
        return len(self._pool.free)

    def get_max_resource_count(self) -> int:
        """Return the number of blocks in the pool, free or not."""
        return self.num_blocks

    def block_ids(self, request_id: int) -> list[list[int]]:
        """Return the block table of each beam, as new lists."""
        return [table.copy() for table in self._sequence(request_id).tables]

    def num_tokens(self, request_id: int) -> int:
        """Return the number of positions that each beam has stored, overwritten ones included."""
        return self._sequence(request_id).num_slots - self._needs.bubble

    def num_cached_tokens(self, request_id: int) -> int:
        """Return how many prompt tokens were found in the cache when the sequence was added."""
        return self._sequence(request_id).num_cached

    def audit(self) -> KvCacheReport:
        """Recount all blocks; the report has the owners of each held block."""
        report = audit(
            self._pool,
            self._live.values(),
            tokens_per_block=self._needs.tokens_per_block,
            max_slots=self._needs.max_slots,
            private_tails=self._needs.grows,
        )
        if self._reuse is None:
            return report
        counts = self._reuse.counts
        return replace(
            report,
            problem=report.problem or self._reuse.problem(self._live.values()),
            cached=counts.cached_blocks,
            host_total=counts.host_blocks,
            host_free=counts.host_blocks - counts.cached_host_blocks,
            host_used=counts.cached_host_blocks,
        )

    def check(self) -> None:
        """Raise LedgerError, with block and owner, unless every count agrees with the tables."""
        problem = self.audit().problem
        if problem is not None:
            raise LedgerError(problem)

    # Block reuse ----------------------------------------------------------------------------

    @property
    def enable_block_reuse(self) -> bool:
        return self._reuse is not None

    @property
    def num_snapshots(self) -> int:
        """The number of snapshots of recurrent states; 0 without such states."""
        if self._reuse is None or self._reuse.snapshots is None:
            return 0
        return self._reuse.snapshots.num_snapshots

    @property
    def reuse_counts(self) -> ReuseCounts:
        reuse = self._reuse
        return ReuseCounts() if reuse is None else reuse.counts

    @property
    def host_counts(self) -> HostCounts:
        counts = self.reuse_counts
        free = counts.host_blocks - counts.cached_host_blocks
        return HostCounts(
            counts.host_blocks, free, counts.offloaded_blocks, counts.onboarded_blocks
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
            request.skip_cached_context(num_cached, self._needs.tokens_per_block)
        return copies

    def _hold(self, sequence: BlockTables, request: LlmRequest) -> None:
        if request.beam_width == 1 and self._needs.grows:
            sequence.life_tokens = request.prompt_len + request.max_new_tokens
            sequence.total_blocks = self._needs.whole_life(request)
        self._live[request.request_id] = sequence
        self._table_changed(sequence)

    def _sequence(self, request_id: int) -> BlockTables:
        try:
            return self._live[request_id]
        except KeyError:
            raise _unknown(request_id) from None

    def _require(self, request_id: int, num_blocks: int) -> None:
        free = len(self._pool.free)
        if num_blocks > free:
            need = f"request {request_id} needs {num_blocks} more KV cache blocks"
            raise CapacityError(f"{need}, {free} of {self.num_blocks} are free")

    def _table_changed(self, sequence: BlockTables) -> None:
        length = len(sequence.tables[0])
        if not self._needs.grows:
            sequence.grows_at = sequence.num_slots
        elif length < self._needs.max_table_length:
            sequence.grows_at = length * self._needs.tokens_per_block
        else:  # shared blocks must not be overwritten when the window moves on
            sequence.grows_at = self._needs.max_slots if sequence.may_share else NEVER
        sequence.remaining_blocks = max(0, sequence.total_blocks - length)


def _unknown(request_id: int) -> ValueError:
    return ValueError(f"request {request_id} holds no KV cache blocks")
