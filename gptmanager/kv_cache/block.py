"""Blocks of the KV cache: which are free, which tables hold the other blocks, and an audit.

This module decides which block is handed out next. It knows nothing of the needs of requests, nor
of the contents of blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gptmanager.errors import GptManagerError

NEVER = -1  # a number of slots or tokens that no sequence reaches


class LedgerError(GptManagerError, AssertionError):
    """Raised if a cache's counts and block tables contradict each other: a bug of the library."""


class BlockCopy(NamedTuple):
    """A copy of the first `num_tokens` positions of block `source` to block `destination`.

    Block ids from the pool's `num_blocks` on are in the host tier. Copies run in order, but the
    copies of one fork may run in parallel: none of their blocks is both a source and a destination.
    """

    source: int
    destination: int
    num_tokens: int


@dataclass(slots=True, eq=False)
class BlockTables:
    """The blocks of one request: a block table for each beam, all of the same length.

    `num_slots` counts stored positions, including the padding of the sink tokens. Past the
    attention window, `num_slots` still increases, but the tables do not grow. When `num_slots` is
    `grows_at`, the next token needs a new block. Past the window, the request must instead stop
    sharing its blocks, because the token overwrites a stored position. `peak_slots` is the largest
    `num_slots` at any rewind so far, 0 before the first rewind. `total_blocks` is the number of
    blocks that the request needs until it has `life_tokens` tokens, and `remaining_blocks` is the
    number of these blocks that it does not hold yet. With beams, `life_tokens` is NEVER, and the
    two numbers of blocks are meaningless. If `may_share`, other sequences may hold full blocks of
    this request. `num_cached` is the number of leading tokens that were found in the cache.
    """

    request_id: int
    num_slots: int
    tables: list[list[int]]
    peak_slots: int = 0
    grows_at: int = NEVER
    life_tokens: int = NEVER
    total_blocks: int = 0
    remaining_blocks: int = 0
    num_cached: int = 0
    may_share: bool = False


class BlockPool:
    """The blocks `0..num_blocks-1`, with reference counts.

    `ref_counts[block]` is the number of block tables that hold the block; a block that all beams of
    a sequence share counts once for each beam. `free` has the blocks without a reference, in the
    order in which they are handed out: the least recently freed block first.
    """

    __slots__ = ("free", "num_blocks", "ref_counts")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        # a dict, because a free block with reusable content may be removed from the middle
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    def take(self, count: int, references: int = 1) -> list[int]:
        """Take `count` free blocks, and give each of them `references` references.

        At least `count` blocks must be free.
        """
        popitem = self.free.popitem
        blocks = [popitem(last=False)[0] for _ in range(count)]
        ref_counts = self.ref_counts
        for block in blocks:
            ref_counts[block] = references
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one reference from each of `blocks`, in order. Unreferenced blocks become free."""
        ref_counts = self.ref_counts
        for block in blocks:
            ref_counts[block] -= 1
            if not ref_counts[block]:
                self.free[block] = None

    def fork(
        self, tables: list[list[int]], parents: Sequence[int], num_full: int, num_tail: int
    ) -> tuple[list[list[int]], tuple[BlockCopy, ...]]:
        """Let beam i continue beam `parents[i]`. Return the new tables and the copies to make.

        The first `num_full` blocks become shared. The block after them, if it holds `num_tail` > 0
        positions, stays private to each beam.
        """
        moved = [beam for beam, parent in enumerate(parents) if beam != parent]
        for beam in moved:
            for block in tables[parents[beam]][:num_full]:
                self.ref_counts[block] += 1
        for beam in moved:
            self.release(reversed(tables[beam][:num_full]))
        forked = [tables[parent][:num_full] for parent in parents]
        copies = []
        if num_tail:
            for beam, old in enumerate(_inherited_tails(parents)):
                source, block = tables[parents[beam]][num_full], tables[old][num_full]
                forked[beam].append(block)
                if block != source:
                    copies.append(BlockCopy(source, block, num_tail))
        return forked, tuple(copies)


def _inherited_tails(parents: Sequence[int]) -> list[int]:
    """Return, for each beam, the old beam that its partial block is taken from.

    One child of each parent takes over the parent's block. A beam that continues itself keeps its
    block. The other beams get the blocks of beams without a child. So there are as few copies as
    possible, and no copy reads a block that another copy writes.
    """
    heirs: dict[int, int] = {}
    for beam, parent in enumerate(parents):
        if beam == parent or parent not in heirs:
            heirs[parent] = beam
    orphaned = iter([beam for beam in range(len(parents)) if beam not in heirs])
    return [
        parent if heirs[parent] == beam else next(orphaned) for beam, parent in enumerate(parents)
    ]


class WhatIf:
    """Counts how many blocks would be free if some sequences were removed from `pool`.

    `share` records that a future sequence will also hold some blocks that are held now.
    """

    __slots__ = ("num_free", "_pool", "_released", "_removed")

    def __init__(self, pool: BlockPool) -> None:
        self.num_free = len(pool.free)
        self._pool = pool
        self._released: dict[int, int] = {}
        self._removed: set[int] = set()

    def remove(self, sequence: BlockTables) -> None:
        """Remove a sequence; a second call for the same sequence changes nothing."""
        if sequence.request_id in self._removed:
            return
        self._removed.add(sequence.request_id)
        ref_counts, released = self._pool.ref_counts, self._released
        for table in sequence.tables:
            for block in table:
                gone = released[block] = released.get(block, 0) + 1
                if gone == ref_counts[block]:
                    self.num_free += 1

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._released[block] = self._released.get(block, 0) - 1

    def is_held(self, block: int) -> bool:
        return self._pool.ref_counts[block] > self._released.get(block, 0)


@dataclass(frozen=True, slots=True)
class KvCacheReport:
    """The state of all blocks at one moment.

    `owners` maps each held block to the ids of the requests that hold it. `cached` counts the
    blocks, held or free, with content that lookups can find. `problem` is the first contradiction
    between counts and block tables, or None if they are consistent. A host block is either free or
    used; a used host block has cached content.
    """

    total: int
    free: int
    used: int
    owners: Mapping[int, tuple[int, ...]]
    problem: str | None = None
    cached: int = 0
    host_total: int = 0
    host_free: int = 0
    host_used: int = 0

    @property
    def ok(self) -> bool:
        return self.problem is None


def audit(
    pool: BlockPool,
    sequences: Iterable[BlockTables],
    *,
    tokens_per_block: int,
    max_slots: int,
    private_tails: bool,
) -> KvCacheReport:
    """Recount all blocks, and return the report.

    `max_slots` is the number of slots at which the tables of a sequence stop growing. With
    `private_tails`, a partly filled last block may be in one table only.
    """
    holders: dict[int, list[int]] = {}
    problem = None
    for sequence in sequences:
        num_slots = min(sequence.num_slots, max_slots)
        length = -(-num_slots // tokens_per_block)
        problem = problem or _table_problem(sequence, length)
        if private_tails and problem is None and num_slots % tokens_per_block:
            problem = _tail_problem(sequence, pool)
        for table in sequence.tables:
            for block in table:
                holders.setdefault(block, []).append(sequence.request_id)
    owners = {block: tuple(dict.fromkeys(ids)) for block, ids in sorted(holders.items())}
    total, free = pool.num_blocks, len(pool.free)
    used = total - pool.ref_counts[:total].count(0)
    problem = problem or _pool_problem(pool, holders)
    if problem is None and free + used != total:
        problem = f"{free} free and {used} used blocks are not {total}"
    return KvCacheReport(total, free, used, owners, problem)


def _table_problem(sequence: BlockTables, length: int) -> str | None:
    for beam, table in enumerate(sequence.tables):
        where = f"beam {beam} of request {sequence.request_id}"
        if len(table) != length:
            last = f"its last is block {table[-1]}" if table else "it has none"
            stored = f"{sequence.num_slots} positions"
            return f"{where} holds {len(table)} blocks for {stored}, not {length}; {last}"
        if len(set(table)) != length:
            twice = next(block for block in table if table.count(block) > 1)
            return f"block {twice} is twice in the table of {where}"
    return None


def _tail_problem(sequence: BlockTables, pool: BlockPool) -> str | None:
    for beam, table in enumerate(sequence.tables):
        references = pool.ref_counts[table[-1]]
        if references > 1:
            return (
                f"block {table[-1]}, which beam {beam} of request {sequence.request_id} is "
                f"writing to, is in {references} tables"
            )
    return None


def _pool_problem(pool: BlockPool, holders: Mapping[int, list[int]]) -> str | None:
    for block, references in enumerate(pool.ref_counts[: pool.num_blocks]):
        ids = holders.get(block, [])
        owners = f"requests {sorted(set(ids))}" if ids else "no request"
        if references != len(ids):
            held = f"{len(ids)} tables hold it, of {owners}"
            return f"block {block} counts {references} references, but {held}"
        if (references == 0) != (block in pool.free):
            state = "is free" if block in pool.free else "is not free"
            return f"block {block} {state}, but is held by {owners}"
    return None
