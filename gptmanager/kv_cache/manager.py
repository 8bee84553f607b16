"""`KvCacheManager`: which sequence holds which block, and whether there are blocks for more.

Decides by counting alone: it knows no tensor, no clock, no policy, and never waits. What it hands
out are block ids; the pool's memory and the order of access to it are the executor's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gptmanager.errors import CapacityError, ConfigError, DuplicateRequestIdError
from gptmanager.kv_cache.block import (
    NEVER,
    BlockCopy,
    BlockPool,
    BlockTables,
    KvCacheReport,
    LedgerError,
    WhatIf,
    audit,
)
from gptmanager.kv_cache.needs import BlockNeeds, CrossBlockNeeds
from gptmanager.request import LlmRequest


class KvCacheManager:
    """Counts blocks of `tokens_per_block` positions; ids are request ids.

    *Sequences.* `add_sequence` takes the blocks of the whole prompt, `add_token` one more position
    for each beam, `rewind` takes positions back, `fork` reorders beams, `remove` ends it. What
    cannot be had raises and leaves no change; an unknown id is a ValueError.

    *For capacity schedulers.* Who promises completion compares the remaining blocks
    (`get_remaining_blocks_to_completion`, `sum_remaining_blocks_to_completion`) with the free
    ones, or the needed resource, which includes what is held, with `get_max_resource_count`;
    never across. Who may pause calls `start_scheduling`, adds up `get_needed_blocks_one_step` of
    what it takes, asks `scheduling_has_free_blocks(sum)`, and `scheduling_remove_sequence` for a
    victim; none of these touches the real accounts. A request whose needed resource exceeds
    `get_max_resource_count` could not run even alone.

    *Attention window.* A sequence of more than `max_attention_window` tokens is cyclic: a new
    token lies where the oldest one lay, and nothing grows. Beams share their prompt's blocks
    there too, so who executes must not let beams pass the window; `fork` refuses them.

    *Sink tokens.* The first `sink_token_length` tokens stay for ever. They are padded to whole
    blocks at the front, so that position = token + padding and the others begin on a block.

    *Cross.* `cross=True` counts a cross attention cache: a request needs `encoder_len` positions
    from its first context chunk on, shared by all beams, and never more.
    """

    __slots__ = ("num_blocks", "tokens_per_block", "_needs", "_pool", "_sequences", "_what_if")

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int = 64,
        *,
        max_attention_window: int | None = None,
        sink_token_length: int = 0,
        enable_block_reuse: bool = False,
        enable_partial_reuse: bool = True,
        cross: bool = False,
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, got {num_blocks}")
        if enable_block_reuse:
            raise ConfigError("enable_block_reuse=True is not supported yet")
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self._needs = (CrossBlockNeeds if cross else BlockNeeds)(
            tokens_per_block, max_attention_window, sink_token_length
        )
        self._pool = BlockPool(num_blocks)
        self._sequences: dict[int, BlockTables] = {}
        self.start_scheduling()

    # What sequences do ----------------------------------------------------------------------

    def add_sequence(self, request: LlmRequest) -> None:
        """Take the blocks of the whole prompt, also when only its first chunk runs now.

        All beams share them but for a last, partial block, which each beam has for itself. Raises
        DuplicateRequestIdError, or CapacityError when there are not enough free blocks.
        """
        request_id, beam_width = request.request_id, request.beam_width
        if request_id in self._sequences:
            raise DuplicateRequestIdError(f"request {request_id} already holds KV cache blocks")
        shared, private = self._needs.context(request)
        self._require(request_id, shared + private)
        common = self._pool.take(shared, beam_width)
        tables = [common, *(common.copy() for _ in range(beam_width - 1))]
        if private:
            for table, block in zip(tables, self._pool.take(private), strict=True):
                table.append(block)
        sequence = BlockTables(request_id, self._needs.context_slots(request), tables)
        if beam_width == 1 and self._needs.grows:
            sequence.life_tokens = request.prompt_len + request.max_new_tokens
            sequence.total_blocks = self._needs.whole_life(request)
        self._sequences[request_id] = sequence
        self._table_changed(sequence)

    def add_token(self, request_id: int) -> tuple[int, ...]:
        """Store one more position in each beam; the blocks that this took, one a beam, mostly ().

        Raises CapacityError when there are not enough free blocks.
        """
        try:
            sequence = self._sequences[request_id]
        except KeyError:
            raise _unknown(request_id) from None
        num_slots = sequence.num_slots
        if num_slots != sequence.grows_at:
            sequence.num_slots = num_slots + 1
            return ()
        if not self._needs.grows:
            raise ValueError(f"request {request_id}: a cross KV cache takes no further tokens")
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
        the last token: what the window lost to the others is needed again.
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
        sequence.num_slots, sequence.peak_slots = left, peak
        table = sequence.tables[0]
        keep = self._needs.table_length(sequence.num_slots)
        self._pool.release(reversed(table[keep:]))
        del table[keep:]
        self._table_changed(sequence)

    def fork(self, request_id: int, parents: Sequence[int]) -> tuple[BlockCopy, ...]:
        """Beam i goes on from what beam `parents[i]` holds; never allocates.

        Full blocks become shared, a partial last block stays private to each beam. Returns what
        the device must copy before the next position is stored. The block tables change in every
        beam but those that are their own parent. ValueError past the attention window.
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
        return copies

    def store_context(self, request: LlmRequest) -> None:
        """The context of `request` is computed: its full blocks may be reused. No effect yet."""

    def remove(self, request_id: int, store: bool = True) -> None:
        """End the sequence. `store`: what it held may be reused, which has no effect yet.

        Blocks become free from the last one to the first, so that a prefix outlives its ends.
        """
        sequence = self._sequence(request_id)
        del self._sequences[request_id]
        for table in sequence.tables:
            self._pool.release(reversed(table))

    # What is held ---------------------------------------------------------------------------

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._sequences

    @property
    def num_free_blocks(self) -> int:
        return len(self._pool.free)

    def block_ids(self, request_id: int) -> list[list[int]]:
        """The block table of each beam, as the caller's own lists."""
        return [table.copy() for table in self._sequence(request_id).tables]

    def num_tokens(self, request_id: int) -> int:
        """Positions stored in each beam; past the attention window, ever stored."""
        return self._sequence(request_id).num_slots - self._needs.bubble

    def audit(self) -> KvCacheReport:
        """Everything counted anew, each held block with its owners."""
        return audit(
            self._pool,
            self._sequences.values(),
            tokens_per_block=self.tokens_per_block,
            max_slots=self._needs.max_slots,
            private_tails=self._needs.grows,
        )

    def check(self) -> None:
        """Raises LedgerError, naming block and owner, unless every count agrees with the tables."""
        problem = self.audit().problem
        if problem is not None:
            raise LedgerError(problem)

    # What requests need ---------------------------------------------------------------------

    def get_max_resource_count(self) -> int:
        """Blocks of the pool, free or not."""
        return self.num_blocks

    def get_num_free_blocks(self) -> int:
        return len(self._pool.free)

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """Blocks that the request fills in its whole life, INCLUDING what it holds already."""
        return self._needs.whole_life(request)

    def get_remaining_blocks_to_completion(self, request: LlmRequest) -> int:
        """Blocks that the request must still take to come to its end: whole life minus held."""
        held = self._sequences.get(request.request_id)
        if held is None:
            return self._needs.remaining(request, 0)
        if held.life_tokens == request.prompt_len + request.max_new_tokens:
            return held.remaining_blocks
        return self._needs.remaining(request, len(held.tables[0]))

    def sum_remaining_blocks_to_completion(self, requests: Iterable[LlmRequest]) -> int:
        """The sum of `get_remaining_blocks_to_completion` over `requests`, in one go."""
        find = self._sequences.get
        total = 0
        for request in requests:
            held = find(request.request_id)
            if held and held.life_tokens == request.prompt_len + request.max_new_tokens:
                total += held.remaining_blocks
            else:
                total += self.get_remaining_blocks_to_completion(request)
        return total

    def get_needed_blocks_one_step(
        self, request: LlmRequest, two_step_lookahead: bool = False
    ) -> int:
        """Blocks that the request takes if it runs now: one step, or two with the lookahead."""
        return self._needs.one_step(request, two_step_lookahead)

    # What if --------------------------------------------------------------------------------

    def start_scheduling(self) -> None:
        """Begin a what-if from the present accounts; the one before it is forgotten."""
        self._what_if = WhatIf(self._pool)

    def scheduling_remove_sequence(self, request_id: int) -> None:
        """As if it were removed: what only it held is free. Who holds nothing frees nothing."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._what_if.remove(sequence)

    def scheduling_has_free_blocks(self, num_required: int = 1) -> bool:
        return num_required <= self._what_if.num_free

    # Inside ---------------------------------------------------------------------------------

    def _sequence(self, request_id: int) -> BlockTables:
        try:
            return self._sequences[request_id]
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
        else:
            sequence.grows_at = NEVER
        sequence.remaining_blocks = max(0, sequence.total_blocks - length)


def _unknown(request_id: int) -> ValueError:
    return ValueError(f"request {request_id} holds no KV cache blocks")
