"""`BlockReuse`: which blocks of a prompt are found in the cache, and which are stored in it.

This module decides which blocks a new sequence shares, takes over or copies, and which blocks of an
ended sequence stay cached. If a request has several beams, only its prompt is cached. Sequences
that may pass their attention window do not reuse blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from gptmanager.kv_cache.block import BlockCopy, BlockTables
from gptmanager.kv_cache.offloading import CachingBlockPool, HostTier
from gptmanager.kv_cache.prefix_lookups import Lookups, root_key
from gptmanager.kv_cache.prefix_tree import NO_BLOCK, UNBOUNDED, Match, PrefixTree
from gptmanager.kv_cache.state_snapshots import NO_SNAPSHOT, StateSnapshots
from gptmanager.request.llm_request import LlmRequest, LlmRequestState

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT


class ReuseCounts(NamedTuple):
    """Counts of block reuse.

    Totals since the start: `reused_blocks` counts blocks of prompts that were found in the cache,
    `reused_tokens` counts the tokens found in them, and `missed_blocks` counts blocks of prompts
    that were not found. `offloaded_blocks` counts moves of a block from the pool to the host tier
    (CPU memory), and `onboarded_blocks` counts moves and copies back.

    Current numbers: `cached_blocks` blocks of the pool and `cached_host_blocks` blocks of the host
    tier have cached content. The host tier has `host_blocks` blocks in total. Blocks have
    `used_snapshots` of the `snapshots` of recurrent states.
    """

    reused_blocks: int = 0
    missed_blocks: int = 0
    reused_tokens: int = 0
    cached_blocks: int = 0
    offloaded_blocks: int = 0
    onboarded_blocks: int = 0
    cached_host_blocks: int = 0
    host_blocks: int = 0
    used_snapshots: int = 0
    snapshots: int = 0


class ReuseOptions(NamedTuple):
    """The options of block reuse.

    With `partial`, the beginning of any cached block may be reused. Without `partial`, a cached
    block that is not full may only be reused with all its tokens. In both cases the new sequence
    writes the rest of the block, so it gets a block of its own: the cached block itself if no
    sequence holds it and no cached block follows it, otherwise a copy. If `copies` is False, blocks
    of the pool are not copied.

    `num_host_blocks` is the number of blocks in the host tier. Content evicted from the pool moves
    to the host tier if it has at least `min_offload_tokens` tokens and a priority of at least
    `min_offload_priority`. With `onboards`, lookups find content in the host tier: full blocks move
    back to the pool, and the beginning of a block is copied, even if `copies` is False. Without
    `onboards`, lookups do not find content in the host tier.

    `num_snapshots` is above 0 if the model keeps a recurrent state for each sequence: the number of
    copies of states. Then only full blocks are reused, up to one with a copy of the state after it.
    `cuts_contexts` is explained at `StateSnapshots`.
    """

    partial: bool
    copies: bool
    num_host_blocks: int
    onboards: bool
    min_offload_tokens: int
    min_offload_priority: int
    num_snapshots: int = 0
    cuts_contexts: bool = True


class BlockReuse:
    """A cache of blocks that are found by their tokens and by the request's adapter and salt.

    The last token of a prompt is always computed, even if it is cached. Requests that may become
    longer than `max_tokens` tokens do not reuse blocks.
    """

    __slots__ = (
        "lookups", "pool", "snapshots", "tree", "_missed_blocks", "_options", "_reused_blocks",
        "_reused_tokens", "_storing",
    )  # fmt: skip

    def __init__(
        self, num_blocks: int, tokens_per_block: int, max_tokens: int, options: ReuseOptions
    ) -> None:
        end_findable = UNBOUNDED if options.onboards else num_blocks
        tree = self.tree = PrefixTree(tokens_per_block, num_blocks, end_findable)
        host = None
        if options.num_host_blocks:
            least = options.min_offload_tokens, options.min_offload_priority
            host = HostTier(tree, num_blocks, options.num_host_blocks, *least)
        self.snapshots: StateSnapshots | None = None
        if options.num_snapshots:
            self.snapshots = StateSnapshots(options.num_snapshots, options.cuts_contexts, tree)
        self.pool = CachingBlockPool(num_blocks, tree, host, self.snapshots)
        self._options = options
        self._storing: dict[int, LlmRequest] = {}  # live requests, by id, that may store content
        self.lookups = Lookups(tree, max_tokens, self.snapshots)
        self._reused_blocks = self._missed_blocks = self._reused_tokens = 0

    def anew(self) -> BlockReuse:
        """Return an empty `BlockReuse` with the same options, which continues the counts."""
        host, size = self.pool.host, self.tree.tokens_per_block
        fresh = BlockReuse(self.pool.num_blocks, size, self.lookups.max_tokens, self._options)
        fresh._reused_blocks, fresh._missed_blocks = self._reused_blocks, self._missed_blocks
        fresh._reused_tokens = self._reused_tokens
        if host is not None and fresh.pool.host is not None:
            fresh.pool.host.offloaded, fresh.pool.host.onboarded = host.offloaded, host.onboarded
        return fresh

    @property
    def counts(self) -> ReuseCounts:
        host, snapshots = self.pool.host, self.snapshots
        found = self._reused_blocks, self._missed_blocks, self._reused_tokens
        counts = ReuseCounts(*found, cached_blocks=len(self.tree))
        if snapshots is not None:
            used = len(snapshots.used)
            counts = counts._replace(used_snapshots=used, snapshots=snapshots.num_snapshots)
        if host is None:
            return counts
        on_host = host.num_blocks - len(host.free)
        return counts._replace(
            cached_blocks=len(self.tree) - on_host,
            offloaded_blocks=host.offloaded,
            onboarded_blocks=host.onboarded,
            cached_host_blocks=on_host,
            host_blocks=host.num_blocks,
        )

    # Changes of sequences ---------------------------------------------------------------------

    def start(
        self,
        request: LlmRequest,
        num_shared: int,
        num_private: int,
        require: Callable[[int, int], None],
    ) -> tuple[list[list[int]], int, tuple[BlockCopy, ...]]:
        """Take the blocks for a new sequence from the cache and the pool.

        Return the block tables (one for each beam), the number of prompt tokens that were found in
        the cache, and the copies to make before the sequence runs.

        Each table has `num_shared` blocks that all beams share and, if `num_private` is not 0, one
        private block at the end. If a part of the private block is cached, only the first beam's
        private block begins with this part: the context is computed in the first beam, and the
        other beams are forked from it. The returned copies include all pending copies of the pool,
        also those that save the content of blocks taken earlier. `require(request_id, count)` must
        raise unless `count` blocks are free.
        """
        match = self.tree.match(
            root_key(request),
            request.tokens,
            request.prompt_len - 1 if request.reads_cache else 0,
            self._may_be_partial if self.snapshots is None else None,
            whole_only=not self._options.partial,
        )
        pool, found, beams = self.pool, match.blocks, request.beam_width
        if self.snapshots is not None:
            found = found[: self.snapshots.count_reusable(found)]
        num_blocks, ref_counts = pool.num_blocks, pool.ref_counts
        held = sum(1 for block in found if block < num_blocks and ref_counts[block])
        require(request.request_id, num_shared + num_private - held)
        pool.share(found, beams)
        tails: list[int] = []
        begun: list[int] = []
        if match.partial != NO_BLOCK:  # first, because the steps below may move its content
            is_shared = len(found) < num_shared
            block = self._begin(match, beams if is_shared else 1)
            (begun if is_shared else tails).append(block)
        common = [block if block < num_blocks else pool.onboard(block) for block in found]
        common += begun
        common += pool.take(num_shared - len(common), beams)
        tails += pool.take(num_private - len(tails))
        self._storing[request.request_id] = request
        if self.snapshots is not None:
            self.snapshots.begin(request.request_id, request.prompt_len, match.blocks)
        self.lookups.forget(request.request_id)
        num_found = len(found) + (match.partial != NO_BLOCK)
        num_cached = len(found) * self.tree.tokens_per_block + match.num_partial
        self._reused_blocks += num_found
        self._missed_blocks += num_shared + (num_private > 0) - num_found
        self._reused_tokens += num_cached
        tables = [common + tails[beam : beam + 1] for beam in range(beams)]
        return tables, num_cached, pool.take_copies()

    def store_context(self, sequence: BlockTables, request: LlmRequest) -> None:
        """Make the full blocks of a computed context available for reuse."""
        if sequence.request_id in self._storing:
            end = request.prompt_len - request.prompt_len % self.tree.tokens_per_block
            self._store(request, end, sequence.tables[0])

    def end(self, sequence: BlockTables, store: bool) -> None:
        """End a sequence. With `store`, its tokens, except the newest one, stay cached for reuse.

        With several beams, only the prompt is kept, because the beams have it in common.
        """
        request = self._storing.pop(sequence.request_id, None)
        if request is None or not store:
            self._end_snapshots(sequence)
            return
        end = min(sequence.num_slots, len(request.tokens) - 1)
        if len(sequence.tables) > 1:
            end = min(end, request.prompt_len)
        if (
            request.state is _CONTEXT_INIT
            and sequence.num_cached < request.context_current_position < request.prompt_len
        ):  # the sequence ends between two chunks, so the rest of its context is not computed
            end = min(end, request.context_current_position)
        if self.snapshots is not None:
            end -= end % self.tree.tokens_per_block
        self._store(request, end, sequence.tables[0])
        self._end_snapshots(sequence, request, end)

    def make_writable(self, sequence: BlockTables, num_slots: int) -> None:
        """Prepare a rewind to `num_slots` positions, after which the last block is written again.

        Remove this block from the cache if it is not full. Raise ValueError if another sequence
        also holds it.
        """
        index, used = divmod(num_slots, self.tree.tokens_per_block)
        if used and len(sequence.tables) == 1 and index < len(sequence.tables[0]):
            self._make_private(sequence, [sequence.tables[0][index]], "be rewound into it")

    def end_sharing(self, sequence: BlockTables) -> None:
        """Stop sharing the blocks of a sequence that passes its window and overwrites them."""
        self._make_private(sequence, sequence.tables[0], "pass its attention window")
        self._storing.pop(sequence.request_id, None)
        self._end_snapshots(sequence)
        sequence.may_share = False

    def withdraw(self, sequence: BlockTables, sequences: Iterable[BlockTables]) -> None:
        """Remove the blocks of a sequence, and all cached blocks that follow them, from the cache.

        `sequences` are all live sequences. A sequence that holds any block of the withdrawn
        sequence is not stored when it ends. Its snapshots are dropped, also those of cached blocks
        that it computed again and does not hold.
        """
        held = {block for table in sequence.tables for block in table}
        for block in held:
            self.pool.forget(block)
        for other in sequences:
            if all(held.isdisjoint(table) for table in other.tables):
                continue
            request = self._storing.pop(other.request_id, None)
            self._end_snapshots(other)
            if self.snapshots is not None and request is not None:
                tokens = request.tokens
                for block in self.tree.full_blocks(root_key(request), tokens, len(tokens))[0]:
                    self.snapshots.drop(block)

    def next_stop(self, request_id: int, position: int) -> int | None:
        """Return the next position after `position` at which a context chunk must end, or None."""
        if self.snapshots is None or request_id not in self._storing:
            return None
        stops = self.snapshots.plans[request_id].stops
        return next((stop for stop in stops if stop > position), None)

    def save_state(self, sequence: BlockTables, end: int) -> int:
        """Return the snapshot for the state after `end` tokens, or NO_SNAPSHOT.

        `end` is a block boundary, and the step that computes the token before it is being launched.
        """
        request = self._storing.get(sequence.request_id)
        if self.snapshots is None or request is None:
            return NO_SNAPSHOT
        table, index = sequence.tables[0], end // self.tree.tokens_per_block - 1
        block = table[index]
        if end in self.snapshots.plans[sequence.request_id].stops:
            self._store(request, end, table)
            cached, _ = self.tree.full_blocks(root_key(request), request.tokens, end)
            block = cached[index]
        if block in self.snapshots:
            self.snapshots.touch(block)
            return NO_SNAPSHOT
        return self.snapshots.put(sequence.request_id, block)

    def clear(self) -> None:
        """Remove all cached content. Live sequences are not stored for reuse when they end."""
        self.pool.clear()
        self._storing.clear()

    def _store(self, request: LlmRequest, end: int, blocks: Sequence[int]) -> None:
        host = self.pool.host
        replaced_blocks = self.tree.store(
            root_key(request),
            request.tokens,
            end,
            blocks,
            request.retention_priority,
            whole_only=not self._options.partial,
        )
        for replaced in replaced_blocks:
            assert host is not None  # only host blocks are replaced
            host.drop(replaced)

    def _end_snapshots(
        self, sequence: BlockTables, request: LlmRequest | None = None, end: int = 0
    ) -> None:
        """End the snapshots of a sequence, of which the first `end` tokens have been stored."""
        if self.snapshots is None:
            return
        cached: list[int] = []
        if request is not None:
            cached, _ = self.tree.full_blocks(root_key(request), request.tokens, end)
        self.snapshots.end(sequence.request_id, sequence.tables[0], cached)

    def _make_private(self, sequence: BlockTables, blocks: list[int], purpose: str) -> None:
        """Remove `blocks` of a sequence from the cache.

        If another sequence also holds one of them, raise ValueError. `purpose` completes the error
        message "... it cannot ...".
        """
        for block in blocks:
            if self.pool.ref_counts[block] > 1:
                raise ValueError(
                    f"request {sequence.request_id} shares block {block} with others: it cannot "
                    f"{purpose}"
                )
        for block in blocks:
            self.pool.forget(block)

    def _begin(self, match: Match, references: int) -> int:
        """Return a block that begins with the partial match, for the sequence to write the rest.

        `references` is the number of block tables that will hold the block.
        """
        if self._can_take_over(match.partial):
            self.pool.claim(match.partial, references)
            return match.partial
        return self.pool.copy_beginning(match.partial, match.num_partial, references)

    def _may_be_partial(self, block: int) -> bool:
        if block >= self.pool.num_blocks:
            return self._options.onboards
        return self._options.copies or self._can_take_over(block)

    def _can_take_over(self, block: int) -> bool:
        pool = self.pool
        return block < pool.num_blocks and not pool.ref_counts[block] and self.tree.is_leaf(block)

    @contextmanager
    def holding(self, requests: Iterable[LlmRequest]) -> Iterator[None]:
        """Prevent, in the `with` block, eviction of cached blocks that `requests` would share."""
        lookups = self.lookups
        held = [
            node
            for request in requests
            if lookups.applies_to(request) and (num_blocks := len(lookups.cached_blocks(request)))
            for node in self.tree.path(lookups.find(request).node)[:num_blocks]
        ]
        self.pool.share(node.block for node in held)
        try:
            yield
        finally:  # `node.block` is read again, because the content may have moved to another block
            self.pool.release(node.block for node in reversed(held))

    # Consistency --------------------------------------------------------------------------------

    def problem(self, sequences: Iterable[BlockTables]) -> str | None:
        """Return the first contradiction in the tree, host tier or block tables, or None."""
        problem = self.tree.problem()
        host = self.pool.host
        if problem is None and host is not None:
            problem = host.problem(self.tree.secondary_blocks())
        if problem is None and self.snapshots is not None:
            live = {sequence.request_id: sequence for sequence in sequences}
            problem = self.snapshots.problem(
                {id_: live[id_] for id_ in self._storing if id_ in live}
            )
        for sequence in sequences if problem is None else ():
            request = self._storing.get(sequence.request_id)
            if request is None:
                continue
            path, _ = self.tree.full_blocks(
                root_key(request), request.tokens, request.prompt_len, findable_only=False
            )
            for table in sequence.tables:
                for index, block in enumerate(table):
                    if block in self.tree and path[index : index + 1] != [block]:
                        return (
                            f"block {block} is cached with other tokens than request "
                            f"{sequence.request_id} holds it for"
                        )
        return problem
