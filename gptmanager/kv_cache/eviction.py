"""`EvictionQueue`: the order in which blocks without a holder are evicted.

The order is by priority, then by age. The queue knows neither tiers, nor why a block must not be
evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from gptmanager.kv_cache.prefix_tree import PrefixTree


class EvictionQueue:
    """Orders `blocks` by their priorities in `tree`, and blocks of equal priority by their age.

    In `blocks`, the blocks that the tree does not have are first. The others follow, least recently
    freed first. While all priorities are the default, this is the order of eviction. Otherwise a
    heap has (priority, rank in `blocks`, block) for each block that may be evicted. If the entry at
    the top is of a block that must not be evicted, the entry is dropped. When a block may be
    evicted again, or the priority of a block changes, `push` must be called for the block.
    """

    __slots__ = ("blocks", "_back", "_era", "_front", "_heap", "_ranks", "_tree")

    def __init__(self, tree: PrefixTree, blocks: Iterable[int] = ()) -> None:
        self.blocks: OrderedDict[int, None] = OrderedDict.fromkeys(blocks)
        self._tree = tree
        self._era = 0  # the tree's `priority_era` that the heap was built for
        self._heap: list[tuple[int, int, int]] = []
        self._ranks: dict[int, int] = {}
        self._front = self._back = 0

    def add(self, block: int) -> None:
        """Add a block without a holder: in front if the tree does not have it, else at the end."""
        blocks, in_front = self.blocks, block not in self._tree
        blocks[block] = None
        if in_front:
            blocks.move_to_end(block, last=False)
        if not self._has_heap:
            return
        if in_front:
            self._front -= 1
            self._ranks[block] = self._front
        else:
            self._back += 1
            self._ranks[block] = self._back
        self.push(block)

    def push(self, block: int) -> None:
        """Update the heap for a block that may now be evictable, or may have another priority."""
        if not self._has_heap or block not in self.blocks:
            return
        if len(self._heap) > 2 * len(self.blocks) + 64:
            self._build()
        else:
            rank = self._ranks[block]
            heappush(self._heap, (self._tree.priority(block), rank, block))

    def first(self, may_go: Callable[[int], bool]) -> int | None:
        """Return the next block to evict. Return None if `may_go` allows no block.

        The block stays in the queue.
        """
        if not self._tree.num_prioritized:
            return next(filter(may_go, self.blocks), None)
        if self._era != self._tree.priority_era:
            self._era = self._tree.priority_era
            self._build()
        heap, priority = self._heap, self._tree.priority
        while heap:
            level, rank, block = heap[0]
            is_current = block in self.blocks and self._ranks[block] == rank
            if is_current and priority(block) == level and may_go(block):
                return block
            heappop(heap)
        return None

    @property
    def _has_heap(self) -> bool:
        return self._tree.num_prioritized > 0 and self._era == self._tree.priority_era

    def _build(self) -> None:
        priority = self._tree.priority
        self._ranks = {block: rank for rank, block in enumerate(self.blocks)}
        self._heap = [(priority(block), rank, block) for block, rank in self._ranks.items()]
        heapify(self._heap)
        self._front, self._back = 0, len(self._heap)
