"""`StateSnapshots`: which cached blocks have a copy of the recurrent state after their last token.

Layers with a recurrent state keep one state for each sequence, and the keys and values in a block
do not contain it. So a sequence can only begin after a cached block with a *snapshot*, a copy of
the state after the block's last token. This module only keeps accounts: the executor owns the
memory of states and snapshots, and makes the copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gptmanager.kv_cache.block import BlockTables
from gptmanager.kv_cache.prefix_tree import NO_BLOCK, PrefixTree

NO_SNAPSHOT = -1


class StateCopy(NamedTuple):
    """A copy between the state of the sequence in `slot` and a snapshot."""

    slot: int
    snapshot: int


@dataclass(slots=True)
class SnapshotPlan:
    """The snapshots of one sequence.

    `source`: the snapshot that its state begins with, or NO_SNAPSHOT. `stops`: positions at which
    a chunk of its context must end, so that the state there gets a snapshot. `latest`: the block of
    its last snapshot while this block is not cached, otherwise NO_BLOCK. The next snapshot of the
    sequence replaces this one.
    """

    source: int
    stops: tuple[int, ...]
    latest: int = NO_BLOCK


class StateSnapshots:
    """The snapshots `0..num_snapshots - 1`: each is free, or belongs to one full block.

    `used` maps blocks to their snapshots, the least recently used first. Each of these blocks is
    cached in `tree`, or is the `latest` of one sequence. `plans` has the plans of live sequences,
    by request id. A block that loses its content must be dropped. If `cuts_contexts`, chunks of a
    context may end early, at the `stops` of its plan.
    """

    __slots__ = ("cuts_contexts", "free", "num_snapshots", "plans", "used", "_tree")

    def __init__(self, num_snapshots: int, cuts_contexts: bool, tree: PrefixTree) -> None:
        self.num_snapshots = num_snapshots
        self.cuts_contexts = cuts_contexts
        self.free = list(range(num_snapshots))[::-1]
        self.used: OrderedDict[int, int] = OrderedDict()
        self.plans: dict[int, SnapshotPlan] = {}
        self._tree = tree

    def __contains__(self, block: int) -> bool:
        return block in self.used

    def count_reusable(self, blocks: Sequence[int]) -> int:
        """Return how many of the leading cached `blocks` a sequence can begin after."""
        count, used = len(blocks), self.used
        while count and blocks[count - 1] not in used:
            count -= 1
        return count

    def begin(self, request_id: int, prompt_len: int, cached: Sequence[int]) -> None:
        """Plan the snapshots of a new sequence. `cached` are the cached blocks of its prompt.

        The sequence begins after the first `count_reusable(cached)` of them. If other requests can
        find the rest of them, too, a snapshot after the last one helps these requests. Another
        snapshot at the last block boundary of the prompt helps those with the same prompt, and
        those that continue it.
        """
        size = self._tree.tokens_per_block
        num_found, source = self.count_reusable(cached), NO_SNAPSHOT
        if num_found:
            source = self.used[cached[num_found - 1]]
            self.used.move_to_end(cached[num_found - 1])
        stops: tuple[int, ...] = ()
        if self.cuts_contexts:
            ends = {len(cached) * size, (prompt_len - 1) // size * size}
            stops = tuple(end for end in sorted(ends) if end > num_found * size)
        self.plans[request_id] = SnapshotPlan(source, stops)

    def put(self, request_id: int, block: int) -> int:
        """Give `block` of a sequence a snapshot, and return it.

        It is the sequence's last one if the last one's block is not cached, or else a free one, or
        else the least recently used one.
        """
        plan = self.plans[request_id]
        snapshot = None
        if plan.latest not in self._tree:
            snapshot = self.used.pop(plan.latest, None)
        if snapshot is None:
            snapshot = self.free.pop() if self.free else self.used.popitem(last=False)[1]
        self.used[block] = snapshot
        plan.latest = NO_BLOCK if block in self._tree else block
        return snapshot

    def touch(self, block: int) -> None:
        """Make the snapshot of `block` the most recently used one."""
        self.used.move_to_end(block)

    def drop(self, block: int) -> None:
        """Free the snapshot of `block`, if it has one."""
        snapshot = self.used.pop(block, None)
        if snapshot is not None:
            self.free.append(snapshot)

    def end(self, request_id: int, blocks: Sequence[int], cached: Sequence[int]) -> None:
        """End a sequence, or its storing. Its `blocks` hold the same tokens as the `cached` blocks.

        The snapshot of a block that is not cached moves to the cached block with the same content,
        or is dropped.
        """
        plan = self.plans.pop(request_id, None)
        if plan is None or plan.latest not in self.used or plan.latest in self._tree:
            return
        index = blocks.index(plan.latest)
        if index < len(cached) and cached[index] not in self.used:
            self.used[cached[index]] = self.used.pop(plan.latest)
        else:
            self.drop(plan.latest)

    def clear(self) -> None:
        """Drop all snapshots."""
        self.free += self.used.values()
        self.used.clear()

    def problem(self, storing: Mapping[int, BlockTables]) -> str | None:
        """Return the first contradiction, or None. `storing` are the sequences that will be cached.

        They are by request id.
        """
        numbers = [*self.free, *self.used.values()]
        if sorted(numbers) != list(range(self.num_snapshots)):
            return f"{self.num_snapshots} snapshots are not each free, or of one block: {numbers}"
        latest: set[int] = set()
        for request_id, plan in self.plans.items():
            block, sequence = plan.latest, storing.get(request_id)
            if block not in self.used or block in self._tree:
                continue
            if sequence is None or block not in sequence.tables[0] or block in latest:
                return f"the snapshot of block {block} is not only of request {request_id}"
            latest.add(block)
        size = self._tree.tokens_per_block
        for block, snapshot in self.used.items():
            if block in self._tree:
                if self._tree.num_tokens(block) != size:
                    return f"snapshot {snapshot} is of block {block}, which is not full"
            elif block not in latest:
                return f"snapshot {snapshot} is of block {block}, which is not cached"
        return None
