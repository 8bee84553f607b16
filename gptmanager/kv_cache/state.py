"""The state of a KV cache as data, and how an empty cache is restored from it.

The data exclude values that can be computed: reference counts follow from the block tables, and
lookups from the prefix tree. A restored cache is always checked before it is used.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from gptmanager.kv_cache.block import BlockCopy, BlockTables, LedgerError
from gptmanager.kv_cache.block_reuse import BlockReuse
from gptmanager.kv_cache.manager import KvCacheManager
from gptmanager.kv_cache.offloading import HostTier
from gptmanager.kv_cache.prefix_lookups import key_of
from gptmanager.kv_cache.prefix_tree import NO_BLOCK, Node, PrefixTree
from gptmanager.kv_cache.state_snapshots import SnapshotPlan, StateSnapshots
from gptmanager.request.llm_request import RETENTION_PRIORITIES, LlmRequest

Salt = bool | int | str | None


class SequenceState(NamedTuple):
    """The state of a `BlockTables`."""

    request_id: int
    num_slots: int
    peak_slots: int
    tables: tuple[tuple[int, ...], ...]
    life_tokens: int
    total_blocks: int
    num_cached: int
    may_share: bool


_read_sequence = attrgetter(*SequenceState._fields)


class RootState(NamedTuple):
    """The key of a root, which all blocks below it share.

    `digest` is the digest of the request's prompt embeddings, if it has any.
    """

    adapter_key: int | str | None = None
    salt: Salt = None
    digest: str | None = None


class CachedBlockState(NamedTuple):
    """A cached block, which is a node of the prefix tree.

    `parent` is the parent's index i in `ReuseState.nodes`. If the parent is a root, `parent` is ~i
    (negative), where i is the root's index in `ReuseState.roots`.
    """

    parent: int
    block: int
    tokens: tuple[int, ...]
    priority: int


class HostState(NamedTuple):
    """The state of a `HostTier`. Its free blocks and its evictable blocks keep their order."""

    free: tuple[int, ...]
    evictable: tuple[int, ...]
    offloaded: int
    onboarded: int


class SnapshotsState(NamedTuple):
    """The state of a `StateSnapshots`.

    `used` has pairs of a block and its snapshot, the least recently used first. `plans` has a tuple
    for each live sequence: its request id, and the values of its `SnapshotPlan`.
    """

    free: tuple[int, ...]
    used: tuple[tuple[int, int], ...]
    plans: tuple[tuple[int, int, tuple[int, ...], int], ...]


class ReuseState(NamedTuple):
    """The state of a `BlockReuse`.

    `storing` has the ids of requests with content that may be stored. `copies` are the copies that
    no call has returned yet. `snapshots` is None if the model keeps no recurrent state.
    """

    roots: tuple[RootState, ...]
    nodes: tuple[CachedBlockState, ...]
    storing: tuple[int, ...]
    reused_blocks: int
    missed_blocks: int
    reused_tokens: int
    copies: tuple[BlockCopy, ...]
    host: HostState | None
    snapshots: SnapshotsState | None = None


class KvCacheState(NamedTuple):
    """The state of a `KvCacheManager`. `free` is in the order in which blocks are handed out."""

    sequences: tuple[SequenceState, ...]
    free: tuple[int, ...]
    reuse: ReuseState | None


def kv_cache_state(kv_cache: KvCacheManager) -> KvCacheState:
    reuse = kv_cache._reuse
    return KvCacheState(
        tuple(map(_sequence_state, kv_cache._live.values())),
        tuple(kv_cache._pool.free),
        None if reuse is None else _reuse_state(reuse),
    )


def restore_kv_cache(
    kv_cache: KvCacheManager, state: KvCacheState, requests: Mapping[int, LlmRequest]
) -> None:
    """Restore an empty cache to `state`. `requests` are the requests that hold blocks, by id.

    Raise LedgerError if the restored state is inconsistent.
    """
    pool, reuse = kv_cache._pool, kv_cache._reuse
    if (reuse is None) != (state.reuse is None):
        raise LedgerError("the state and the cache must both have block reuse, or neither")
    for sequence in state.sequences:
        if sequence.request_id not in requests or sequence.request_id in kv_cache:
            raise LedgerError(
                f"request {sequence.request_id} cannot hold blocks: it is unknown, or holds some "
                "already"
            )
        _restore_sequence(kv_cache, sequence)
    _check_blocks(state.free, 0, kv_cache.num_blocks)
    pool.free.clear()
    pool.free.update(dict.fromkeys(state.free))
    if reuse is not None and state.reuse is not None:
        _restore_reuse(reuse, state.reuse, requests)
    kv_cache.start_scheduling()
    kv_cache.check()


def _sequence_state(held: BlockTables) -> SequenceState:
    return SequenceState(*_read_sequence(held))._replace(tables=tuple(map(tuple, held.tables)))


def _restore_sequence(kv_cache: KvCacheManager, state: SequenceState) -> None:
    held = BlockTables(**{**state._asdict(), "tables": [list(table) for table in state.tables]})
    if not held.tables:
        raise LedgerError(f"request {state.request_id} has no block table")
    for table in held.tables:
        _check_blocks(table, 0, kv_cache.num_blocks)
        for block in table:
            kv_cache._pool.ref_counts[block] += 1
    kv_cache._live[state.request_id] = held
    kv_cache._table_changed(held)


def _reuse_state(reuse: BlockReuse) -> ReuseState:
    roots, nodes = _tree_state(reuse.tree)
    return ReuseState(
        roots,
        nodes,
        tuple(reuse._storing),
        reuse._reused_blocks,
        reuse._missed_blocks,
        reuse._reused_tokens,
        tuple(reuse.pool.copies),
        None if reuse.pool.host is None else _host_state(reuse.pool.host),
        None if reuse.snapshots is None else _snapshots_state(reuse.snapshots),
    )


def _restore_reuse(
    reuse: BlockReuse, state: ReuseState, requests: Mapping[int, LlmRequest]
) -> None:
    pool = reuse.pool
    end = len(pool.ref_counts)
    _restore_tree(reuse.tree, state, end)
    for request_id in state.storing:
        if request_id not in requests:
            raise LedgerError(f"request {request_id} cannot store blocks: it is unknown")
        reuse._storing[request_id] = requests[request_id]
    reuse._reused_blocks, reuse._missed_blocks = state.reused_blocks, state.missed_blocks
    reuse._reused_tokens = state.reused_tokens
    for copy in state.copies:
        _check_blocks((copy.source, copy.destination), 0, end)
    pool.copies = list(state.copies)
    if (pool.host is None) != (state.host is None):
        raise LedgerError("the state and the cache must both have a host tier, or neither")
    if pool.host is not None and state.host is not None:
        _restore_host(pool.host, state.host)
    if (reuse.snapshots is None) != (state.snapshots is None):
        raise LedgerError("the state and the cache must both have snapshots, or neither")
    if reuse.snapshots is not None and state.snapshots is not None:
        _restore_snapshots(reuse.snapshots, state.snapshots, state.storing)


def _host_state(host: HostTier) -> HostState:
    return HostState(tuple(host.free), tuple(host.evictable), host.offloaded, host.onboarded)


def _restore_host(host: HostTier, state: HostState) -> None:
    _check_blocks((*state.free, *state.evictable), host.first, host.first + host.num_blocks)
    host.free.clear()
    host.free.update(dict.fromkeys(state.free))
    host.evictable.update(dict.fromkeys(state.evictable))
    host.offloaded, host.onboarded = state.offloaded, state.onboarded


def _snapshots_state(snapshots: StateSnapshots) -> SnapshotsState:
    plans = snapshots.plans.items()
    return SnapshotsState(
        tuple(snapshots.free),
        tuple(snapshots.used.items()),
        tuple((id_, plan.source, plan.stops, plan.latest) for id_, plan in plans),
    )


def _restore_snapshots(
    snapshots: StateSnapshots, state: SnapshotsState, storing: Iterable[int]
) -> None:
    """Restore snapshots. The check that follows finds wrong numbers of snapshots and blocks."""
    snapshots.free[:] = state.free
    snapshots.used.update(state.used)
    for request_id, source, stops, latest in state.plans:
        snapshots.plans[request_id] = SnapshotPlan(source, stops, latest)
    for request_id in storing:
        if request_id not in snapshots.plans:
            raise LedgerError(f"request {request_id} has no plan for snapshots")


def _tree_state(tree: PrefixTree) -> tuple[tuple[RootState, ...], tuple[CachedBlockState, ...]]:
    """Return the roots, and the nodes level by level, so that each node follows its parent."""
    roots = []
    nodes: list[CachedBlockState] = []
    level: list[tuple[int, Node]] = []
    for number, (key, root) in enumerate(tree._roots.items()):
        roots.append(_root_state(key))
        level += [(~number, child) for child in root.children.values()]
    while level:
        below: list[tuple[int, Node]] = []
        for parent, node in level:
            if node.children:
                number = len(nodes)
                below += [(number, child) for child in node.children.values()]
            nodes.append(CachedBlockState(parent, node.block, node.tokens, node.priority))
        level = below
    return tuple(roots), tuple(nodes)


def _restore_tree(tree: PrefixTree, state: ReuseState, end: int) -> None:
    """Restore a tree; block numbers must be less than `end`."""
    roots = [Node(NO_BLOCK, (), None, _root_key(root)) for root in state.roots]
    tree._roots.update((root.root_key, root) for root in roots)
    nodes: list[Node] = []
    lowest, highest = RETENTION_PRIORITIES
    _check_blocks([node.block for node in state.nodes], 0, end)
    for index, (parent_index, block, tokens, priority) in enumerate(state.nodes):
        if not -len(roots) <= parent_index < index:
            raise LedgerError(f"cached block {block} has no parent")
        parent = roots[~parent_index] if parent_index < 0 else nodes[parent_index]
        fits = 1 <= len(tokens) <= tree.tokens_per_block and tokens not in parent.children
        if not fits or not lowest <= priority <= highest:
            raise LedgerError(f"block {block} cannot be cached with its tokens or priority")
        node = Node(block, tokens, parent)
        tree._nodes[block] = parent.children[tokens] = node
        tree._prioritize(node, priority)
        parent.num_stored += 1
        nodes.append(node)
    for node in (*roots, *nodes):
        node.ordered = sorted(node.children)


def _root_state(key: Any) -> RootState:
    """Return the state of the root with this key, a result of `prefix_lookups.key_of`."""
    adapter_key, _, salt = key
    return RootState(adapter_key, *(salt if isinstance(salt, tuple) else (salt, None)))


def _root_key(root: RootState) -> Hashable:
    salt = root.salt if root.digest is None else (root.salt, root.digest)
    return key_of(root.adapter_key, salt)


def _check_blocks(blocks: Iterable[int], first: int, end: int) -> None:
    """Raise LedgerError unless all blocks are within `first..end - 1` and distinct."""
    blocks = list(blocks)
    if blocks and not first <= min(blocks) <= max(blocks) < end:
        raise LedgerError(
            f"blocks {min(blocks)} to {max(blocks)} are not within {first}..{end - 1}"
        )
    if len(set(blocks)) != len(blocks):
        raise LedgerError("a block occurs twice in a list of distinct blocks")
