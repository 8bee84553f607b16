"""`CachingBlockPool`: free blocks keep their content, which is moved to the host tier on eviction.

This module decides which cached content is lost when blocks are short. The cost of copies is left
to callers, which pass the smallest number of tokens that is worth a copy to the host tier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

from gptmanager.kv_cache.block import BlockCopy, BlockPool
from gptmanager.kv_cache.eviction import EvictionQueue
from gptmanager.kv_cache.prefix_tree import NO_BLOCK, PrefixTree
from gptmanager.kv_cache.state_snapshots import StateSnapshots


class HostCounts(NamedTuple):
    """Current numbers of host blocks, and total numbers of moves since the start.

    `offloaded_blocks` counts moves to the host tier, and `onboarded_blocks` counts moves back to
    the pool. A copy of the beginning of a host block also counts as onboarded, although the host
    block stays.
    """

    total_blocks: int = 0
    free_blocks: int = 0
    offloaded_blocks: int = 0
    onboarded_blocks: int = 0


@dataclass(slots=True, eq=False)
class HostTier:
    """The host blocks `first..first + num_blocks - 1`, for cached content evicted from the pool.

    `evictable` has the used blocks without pending reads, the least recently used first. `queue`
    decides which evictable block is evicted first. Content with fewer than `min_tokens` tokens, or
    with a priority below `min_priority`, is not stored in the host tier.
    """

    tree: InitVar[PrefixTree]
    first: int
    num_blocks: int
    min_tokens: int
    min_priority: int
    free: OrderedDict[int, None] = field(init=False)
    evictable: OrderedDict[int, None] = field(init=False)
    queue: EvictionQueue = field(init=False)
    offloaded: int = 0
    onboarded: int = 0

    def __post_init__(self, tree: PrefixTree) -> None:
        self.free = OrderedDict.fromkeys(range(self.first, self.first + self.num_blocks))
        self.queue = EvictionQueue(tree)
        self.evictable = self.queue.blocks

    def drop(self, block: int) -> None:
        """Free a block after its content was removed from the cache."""
        self.evictable.pop(block, None)
        self.free[block] = None

    def clear(self) -> None:
        for block in [*self.evictable]:
            self.drop(block)

    def problem(self, cached: set[int]) -> str | None:
        """Return the first contradiction, or None. `cached` has the host blocks in the tree."""
        if set(self.evictable) != cached:
            odd = sorted(cached ^ set(self.evictable))
            return f"host blocks {odd} are cached or evictable, but not both"
        if not cached.isdisjoint(self.free):
            return f"host blocks {sorted(cached & set(self.free))} are free, but also cached"
        if len(self.free) + len(cached) != self.num_blocks:
            used = f"{len(self.free)} free and {len(cached)} used host blocks"
            return f"{used} are not {self.num_blocks}"
        return None


class CachingBlockPool(BlockPool):
    """A pool in which free blocks keep their content until they are handed out.

    Blocks without cached content are handed out first, then blocks in the order of their priority,
    the lowest first. Blocks of equal priority are handed out in the order in which they were freed.
    Leaves of the tree are handed out before their parents, whatever their priorities. A block that
    is followed by held blocks in the tree is handed out only if no other block is free.

    When a block is handed out, its content moves to the host tier if the tier accepts it. If no
    host block is free, the content replaces the evictable leaf of the lowest priority. Among leaves
    of equal priority, the least recently used one is replaced. If this leaf has a higher priority
    than the content, the content is lost.

    `copies` has the copies that the device must make, in order, before any block is written. For a
    host block, `ref_counts` has the number of pending reads.
    """

    __slots__ = ("copies", "host", "queue", "snapshots", "tree")

    def __init__(
        self,
        num_blocks: int,
        tree: PrefixTree,
        host: HostTier | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        super().__init__(num_blocks)
        self.tree = tree
        self.snapshots = snapshots
        self.queue = EvictionQueue(tree, self.free)
        self.free = self.queue.blocks
        self.host = host
        self.copies: list[BlockCopy] = []
        if host is not None:
            self.ref_counts += [0] * host.num_blocks

    def take(self, count: int, references: int = 1) -> list[int]:
        blocks = []
        may_go = self.tree.is_leaf if self.host is None else self.tree.ends_primary
        for _ in range(count):
            block = self._first(self.queue, may_go)
            if block is None:  # the caller ensures that enough are free
                block = min(self.free, key=self.tree.priority)
            if self.host is not None:
                self._offload(block, self.host)
            self.claim(block, references)
            blocks.append(block)
        return blocks

    def claim(self, block: int, references: int = 1) -> None:
        """Take a free block for the caller to write to, and forget its cached content."""
        del self.free[block]
        self.forget(block)
        self.ref_counts[block] = references

    def share(self, blocks: Iterable[int], references: int = 1) -> None:
        """Add `references` holders to each block, which may be free."""
        ref_counts = self.ref_counts
        for block in blocks:
            if not ref_counts[block]:
                del self._unheld(block).blocks[block]
            ref_counts[block] += references

    def release(self, blocks: Iterable[int]) -> None:
        ref_counts = self.ref_counts
        for block in blocks:
            ref_counts[block] -= 1
            if not ref_counts[block]:
                self._unheld(block).add(block)

    def forget(self, block: int) -> None:
        """Forget the content of a block and of all blocks that follow it in the tree."""
        forgotten = sorted(self.tree.forget(block))
        if self.snapshots is not None:
            for gone in (block, *forgotten):
                self.snapshots.drop(gone)
        for gone in forgotten:
            if self.host is not None and gone >= self.num_blocks:
                self.host.drop(gone)
            elif gone in self.free:
                self.queue.add(gone)

    def onboard(self, block: int) -> int:
        """Move a host block's content and references to a pool block, and return the pool block.

        The caller holds the host block. At least one pool block must be free.
        """
        assert self.host is not None  # a host block exists
        new = self.take(1)[0]
        self.copies.append(BlockCopy(block, new, self.tree.num_tokens(block)))
        self.tree.move(block, new)
        self.ref_counts[new], self.ref_counts[block] = self.ref_counts[block], 0
        self.host.drop(block)
        self.host.onboarded += 1
        return new

    def copy_beginning(self, block: int, num_tokens: int, references: int = 1) -> int:
        """Return a block for the caller to write to, with `num_tokens` tokens copied from `block`.

        If `block` is free, the pool may hand out `block` itself, without a copy.
        """
        if self.host is None or block < self.num_blocks:
            new = self.take(1, references)[0]
            if new != block:
                self.copies.append(BlockCopy(block, new, num_tokens))
            return new
        self.share([block])  # keeps the host block from being evicted by `take`
        new = self.take(1, references)[0]
        self.copies.append(BlockCopy(block, new, num_tokens))
        self.release([block])
        self.host.onboarded += 1
        return new

    def clear(self) -> None:
        """Drop all cached content."""
        self.tree.clear()
        if self.host is not None:
            self.host.clear()
        if self.snapshots is not None:
            self.snapshots.clear()

    def take_copies(self) -> tuple[BlockCopy, ...]:
        copies, self.copies = tuple(self.copies), []
        return copies

    def _offload(self, block: int, host: HostTier) -> None:
        num_tokens, priority = self.tree.num_tokens(block), self.tree.priority(block)
        # NOT_CACHED is below `min_priority`, which is at least 0
        if num_tokens < host.min_tokens or priority < host.min_priority:
            return
        if not host.free:
            oldest = self._first(host.queue, self.tree.is_leaf)
            if oldest is None or self.tree.priority(oldest) > priority:
                return
            self.forget(oldest)
        destination = host.free.popitem(last=False)[0]
        self.copies.append(BlockCopy(block, destination, num_tokens))
        self.tree.move(block, destination)
        host.queue.add(destination)
        host.offloaded += 1

    def _first(self, queue: EvictionQueue, may_go: Callable[[int], bool]) -> int | None:
        for block in self.tree.take_touched():
            if block != NO_BLOCK:
                self._unheld(block).push(block)
        return queue.first(may_go)

    def _unheld(self, block: int) -> EvictionQueue:
        if self.host is None or block < self.num_blocks:
            return self.queue
        return self.host.queue
