"""`KvSequences`: which sequence holds which block, from its first chunk to its end.

Decides by counting alone: it knows no tensor, no clock, no policy, and never waits. What it hands
out are block ids; the pool's memory and the order of access to it are the executor's.
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
from gptmanager.kv_cache.needs import BlockNeeds
from gptmanager.kv_cache.reuse import BlockReuse
from gptmanager.request.llm_request import LlmRequest, LlmRequestState

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT


class KvSequences:
    """The block tables of live sequences, by request id, and the pool of their blocks.

    What cannot be had raises and leaves no change; an id that holds nothing is a ValueError.
    """

    __slots__ = ("num_blocks", "tokens_per_block", "_live", "_needs", "_pool", "_reuse")

    def __init__(self, num_blocks: int, needs: BlockNeeds, reuse: BlockReuse | None) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = needs.tokens_per_block
        self._needs = needs
        self._begin(reuse)

    def _begin(self, reuse: BlockReuse | None) -> None:
        self._reuse = reuse
        self._pool = BlockPool(self.num_blocks) if reuse is None else reuse.pool
        self._live: dict[int, BlockTables] = {}

    def reset(self) -> None:
        """Begin anew: no sequence, all blocks free, nothing cached; whatever happened before."""
        self._begin(None if self._reuse is None else self._reuse.anew())

    # What sequences do ----------------------------------------------------------------------

    def add_sequence(self, request: LlmRequest) -> tuple[BlockCopy, ...]:
        """Take the blocks of the whole prompt, also when only its first chunk runs now.

        All beams share them but for a last, partial block, which each beam has for itself. With
        block reuse the context of `request` moves on to behind what is cached: in the first beam,
        so that the context must be computed there, and the others forked from it. The copies that
        are returned must be made, in order, before anything is written, after those of earlier
        calls; those that `add_token` left to be made are among them. Raises
        DuplicateRequestIdError, or CapacityError when there are not enough free blocks.
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

        Returns the blocks that this took, one a beam, mostly (). With a host tier `take_moves`
        has what must be copied before they are written. Raises CapacityError when there are not
        enough free blocks.
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
            raise ValueError(f"request {request_id}: a cross KV cache takes no further tokens")
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
        """Forget the last `num_tokens` positions; blocks that held nothing else become free.

        ValueError for beams, for more than is stored, and past the attention window for more than
        the last token: what the window lost to the others is needed again. Also for an end inside
        a block that other sequences share.
        """
        sequence = self._sequence(request_id)
        stored, window = sequence.num_slots - self._needs.bubble, self._needs.window
        if len(sequence.tables) > 1 or not self._needs.grows:
            raise ValueError(f"request {request_id}: beams and cross caches cannot be rewound")
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
        """Beam i goes on from what beam `parents[i]` holds; never allocates.

        Full blocks become shared, a partial last block stays private to each beam. Returns what
        the device must copy before the next position is stored, as `add_sequence` does. The block
        tables change in every beam but those that are their own parent. ValueError past the
        attention window.
        """
        sequence = self._sequence(request_id)
        tables, needs = sequence.tables, self._needs
        if len(parents) != len(tables) or not all(0 <= p < len(tables) for p in parents):
            raise ValueError(f"request {request_id} has {len(tables)} beams, not parents {parents}")
        if not needs.grows:
            return ()  # every beam has the same positions
        if sequence.num_slots > needs.max_slots:
            raise ValueError(f"request {request_id} is past its attention window: no fork of beams")
        num_full, num_tail = divmod(sequence.num_slots, self.tokens_per_block)
        sequence.tables, copies = self._pool.fork(tables, parents, num_full, num_tail)
        return self.take_moves() + copies

    def take_moves(self) -> tuple[BlockCopy, ...]:
        """The copies, in order, that no call has returned yet: none without a host tier."""
        return () if self._reuse is None else self._reuse.pool.take_copies()

    def store_context(self, request: LlmRequest) -> None:
        """The context of `request` is computed: its full blocks may be reused from now on.

        What is written later is computed after it, so a launched context counts as computed.
        """
        if self._reuse is not None:
            self._reuse.store_context(self._sequence(request.request_id), request)

    def remove(self, request_id: int, store: bool = True) -> None:
        """End the sequence. `store`: what it held may be reused, all but for its newest token.

        Its tokens are those of the request that was added, as far as they are confirmed. Blocks
        become free from the last one to the first, so that a prefix outlives its ends.
        """
        sequence = self._sequence(request_id)
        del self._live[request_id]
        if self._reuse is not None:
            self._reuse.end(sequence, store)
        for table in sequence.tables:
            self._pool.release(reversed(table))

    def withdraw(self, request_id: int) -> None:
        """What the sequence holds is not to be found, neither now nor when it has ended.

        Nor does any other that shares some of it leave anything.
        """
        if self._reuse is not None:
            self._reuse.withdraw(self._sequence(request_id), self._live.values())

    def clear_cached(self) -> None:
        """Forget what blocks hold, live sequences' included: the weights have been replaced."""
        if self._reuse is not None:
            self._reuse.clear()

    # What is held ---------------------------------------------------------------------------

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._live

    @property
    def num_free_blocks(self) -> int:
        return len(self._pool.free)

    def block_ids(self, request_id: int) -> list[list[int]]:
        """The block table of each beam, as the caller's own lists."""
        return [table.copy() for table in self._sequence(request_id).tables]

    def num_tokens(self, request_id: int) -> int:
        """Positions stored in each beam; past the attention window, ever stored."""
        return self._sequence(request_id).num_slots - self._needs.bubble

    def num_cached_tokens(self, request_id: int) -> int:
        """Tokens of the prompt that were found in the cache when the sequence was added."""
        return self._sequence(request_id).num_cached

    def audit(self) -> KvCacheReport:
        """Everything counted anew, each held block with its owners."""
        report = audit(
            self._pool,
            self._live.values(),
            tokens_per_block=self.tokens_per_block,
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
        """Raises LedgerError, naming block and owner, unless every count agrees with the tables."""
        problem = self.audit().problem
        if problem is not None:
            raise LedgerError(problem)

    # Inside ---------------------------------------------------------------------------------

    def _add_reusing(
        self, reuse: BlockReuse, request: LlmRequest, shared: int, private: int
    ) -> tuple[BlockCopy, ...]:
        tables, num_cached, copies = reuse.start(request, shared, private, self._require)
        sequence = BlockTables(request.request_id, request.prompt_len, tables)
        sequence.num_cached, sequence.may_share = num_cached, True
        self._hold(sequence, request)
        if request.state is _CONTEXT_INIT and request.context_current_position < num_cached:
            request.skip_cached_context(num_cached, self.tokens_per_block)
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
            sequence.grows_at = length * self.tokens_per_block
        else:  # what others may share must not be written over as the window moves on
            sequence.grows_at = self._needs.max_slots if sequence.may_share else NEVER
        sequence.remaining_blocks = max(0, sequence.total_blocks - length)


def _unknown(request_id: int) -> ValueError:
    return ValueError(f"request {request_id} holds no KV cache blocks")
