"""`PrefixTree`: finds cached blocks by the tokens that they hold.

This module decides which blocks hold a given prefix of a sequence. It does not know which blocks
are free. Before a block is written to, `forget` must remove the block from the tree.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Tokens = tuple[int, ...]

DEFAULT_PRIORITY = 35
NOT_CACHED = -1  # the priority of blocks that are not cached, below all others


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One block. Its tokens follow its ancestors' tokens. Only a leaf may be partially filled."""

    block: int  # NO_BLOCK for a root
    tokens: Tokens
    parent: Node | None
    root_key: Hashable = None  # set for a root
    children: dict[Tokens, Node] = field(default_factory=dict)
    num_stored: int = 0  # how many children have been stored so far, including removed ones
    ordered: list[Tokens] = field(default_factory=list)  # the keys of `children`, sorted
    priority: int = DEFAULT_PRIORITY


NO_BLOCK = -1
UNBOUNDED = 1 << 62  # more than any number of blocks


class Match(NamedTuple):
    """The cached part of a prefix: full `blocks`, then `num_partial` tokens of one more block.

    `partial` is the block with these `num_partial` tokens, or NO_BLOCK if `num_partial` is 0. `end`
    is the node of the last full block. If no full block matches, `end` is the root, or None
    without a root.
    """

    blocks: list[int]
    partial: int
    num_partial: int
    end: Node | None


class PrefixTree:
    """Blocks of `tokens_per_block` tokens, each a child of the block with the tokens before it.

    Each `root_key` has a root of its own, so only sequences with the same root key share blocks.
    `version` increases when blocks are stored, moved or removed. `num_moves` increases when a block
    is moved. Blocks with ids below `num_primary` are in the pool. All other blocks are in host
    memory, so their content must be moved or copied to the pool before a sequence can read it.
    Lookups skip blocks with ids from `end_findable` on, and all their descendants.

    `num_prioritized` is the number of blocks with a priority other than the default.
    `priority_era` increases whenever `num_prioritized` rises from 0. While `num_prioritized` is
    above 0, `take_touched` returns the blocks for which the order of eviction may have changed.
    """

    __slots__ = (
        "end_findable", "num_moves", "num_primary", "num_prioritized", "priority_era",
        "tokens_per_block", "version", "_nodes", "_roots", "_touched",
    )  # fmt: skip

    def __init__(
        self, tokens_per_block: int, num_primary: int = UNBOUNDED, end_findable: int = UNBOUNDED
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.num_primary = num_primary
        self.end_findable = end_findable
        self.version = self.num_moves = self.num_prioritized = self.priority_era = 0
        self._touched: dict[int, None] = {}
        self._nodes: dict[int, Node] = {}  # by block
        self._roots: dict[Hashable, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def is_leaf(self, block: int) -> bool:
        """Return whether no cached block follows `block`; True if `block` is not cached."""
        node = self._nodes.get(block)
        return node is None or not node.children

    def ends_primary(self, block: int) -> bool:
        """Return whether no child of `block` is in the pool; True if `block` is not cached."""
        node = self._nodes.get(block)
        if node is None or not node.children:
            return True
        first = self.num_primary
        return all(child.block >= first for child in node.children.values())

    def priority(self, block: int) -> int:
        """Return a block's priority, or NOT_CACHED. Blocks of a higher priority are kept longer."""
        node = self._nodes.get(block)
        return NOT_CACHED if node is None else node.priority

    def num_tokens(self, block: int) -> int:
        """Return how many tokens are cached in the block; 0 if it is not cached."""
        node = self._nodes.get(block)
        return 0 if node is None else len(node.tokens)

    def full_blocks(
        self, root_key: Hashable, tokens: Sequence[int], end: int, *, findable_only: bool = True
    ) -> tuple[list[int], Node | None]:
        """Return the cached full blocks at the start of `tokens[:end]`, and the last block's node.

        If no block is cached, the node is the root, or None without a root. If `findable_only`
        is False, blocks that lookups skip are also returned.
        """
        node, size = self._roots.get(root_key), self.tokens_per_block
        blocks: list[int] = []
        if node is None:
            return blocks, None
        end_block = self.end_findable if findable_only else UNBOUNDED
        for start in range(0, end - size + 1, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None or child.block >= end_block:
                break
            node = child
            blocks.append(child.block)
        return blocks, node

    def path(self, node: Node | None) -> list[Node]:
        """Return the nodes from the first block of a sequence to `node`, without the root."""
        nodes = []
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def has_root(self, root_key: Hashable) -> bool:
        return root_key in self._roots

    def holds(self, node: Node) -> bool:
        """Return whether a node that was found earlier is still in the tree."""
        if node.parent is None:
            return self._roots.get(node.root_key) is node
        return self._nodes.get(node.block) is node

    def match(
        self,
        root_key: Hashable,
        tokens: Sequence[int],
        end: int,
        may_be_partial: Callable[[int], bool] | None = None,
        *,
        whole_only: bool = False,
    ) -> Match:
        """Return the cached part of `tokens[:end]`.

        `may_be_partial` decides which blocks may be `Match.partial`; if it is None, no block may.
        With `whole_only`, a block may be `Match.partial` only if all tokens of the block match.
        """
        blocks, node = self.full_blocks(root_key, tokens, end)
        if may_be_partial is not None and node is not None and node.ordered:
            start = len(blocks) * self.tokens_per_block
            wanted = tuple(tokens[start : min(end, start + self.tokens_per_block)])
            found = _by_whole(node, wanted) if whole_only else _by_common_prefix(node, wanted)
            for child, num_tokens in found:
                if may_be_partial(child.block):
                    return Match(blocks, child.block, num_tokens, node)
        return Match(blocks, NO_BLOCK, 0, node)

    def store(
        self,
        root_key: Hashable,
        tokens: Sequence[int],
        end: int,
        blocks: Sequence[int],
        priority: int | None = None,
        *,
        whole_only: bool = False,
    ) -> list[int]:
        """Store that `blocks` hold `tokens[:end]`; return cached blocks that were replaced.

        Content that is cached already keeps its block. But if its block is in host memory, the
        block in `blocks` replaces the host block. A partial block is not stored if another block
        begins with the same tokens, because lookups find the other block. With `whole_only`,
        lookups would not find the other block, so the partial block is stored. All blocks get
        `priority`. If `priority` is None, new blocks get the default, and others keep theirs.
        """
        size = self.tokens_per_block
        replaced: list[int] = []
        if not end:
            return replaced
        node = self._roots.get(root_key)
        if node is None:
            node = self._roots[root_key] = Node(NO_BLOCK, (), None, root_key)
        for start, block in zip(range(0, end, size), blocks, strict=False):
            key = tuple(tokens[start : min(end, start + size)])
            child = node.children.get(key)
            if child is None:
                covered = not whole_only and len(key) < size and _is_covered(node, key)
                if covered or block in self._nodes:
                    return replaced
                child = Node(block, key, node)
                self._nodes[block] = node.children[key] = child
                node.num_stored += 1
                self.version += 1
                insort(node.ordered, key)
            elif child.block >= self.num_primary and block not in self._nodes:
                replaced.append(child.block)
                self.move(child.block, block)
            if priority is not None:
                self._prioritize(child, priority)
            node = child
        return replaced

    def move(self, block: int, destination: int) -> None:
        """Record that the content of `block` is now in `destination`, and only there."""
        node = self._nodes.pop(block)
        self._touch(node.parent)
        node.block = destination
        self._nodes[destination] = node
        self.version += 1
        self.num_moves += 1

    def forget(self, block: int) -> list[int]:
        """Remove a block and all blocks that follow it. Return the removed blocks."""
        forgotten: list[int] = []
        node = self._nodes.get(block)
        if node is None:
            return forgotten
        self.version += 1
        self._detach(node)
        below = [node]
        while below:
            node = below.pop()
            del self._nodes[node.block]
            self._prioritize(node, DEFAULT_PRIORITY)
            forgotten.append(node.block)
            below.extend(node.children.values())
        return forgotten

    def clear(self) -> None:
        """Remove all blocks."""
        self.version += 1
        self.num_prioritized = 0
        self._nodes.clear()
        self._roots.clear()

    def take_touched(self) -> Iterable[int]:
        """Return the blocks that changed their priority, or a child of which was moved or removed.

        Only changes since the last call count, and only those made while `num_prioritized` was
        above 0. NO_BLOCK may be among the blocks.
        """
        touched, self._touched = self._touched, {}
        return touched

    def _touch(self, node: Node | None) -> None:
        if self.num_prioritized and node is not None:
            self._touched[node.block] = None

    def _prioritize(self, node: Node, priority: int) -> None:
        if node.priority == priority:
            return
        if not self.num_prioritized:
            self.priority_era += 1
            self._touched.clear()
        self.num_prioritized += priority != DEFAULT_PRIORITY
        self.num_prioritized -= node.priority != DEFAULT_PRIORITY
        node.priority = priority
        self._touch(node)

    def _detach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None  # only a root has no parent, and a root holds no block
        self._touch(parent)
        del parent.children[node.tokens]
        del parent.ordered[bisect_left(parent.ordered, node.tokens)]
        if not parent.children and parent.parent is None:
            del self._roots[parent.root_key]

    # Consistency ------------------------------------------------------------------------------

    def secondary_blocks(self) -> set[int]:
        """Return the cached blocks that are in host memory."""
        return {block for block in self._nodes if block >= self.num_primary}

    def problem(self) -> str | None:
        """Return the first contradiction in the tree; None if it is consistent."""
        found: dict[int, Node] = {}
        below = list(self._roots.values())
        while below:
            node = below.pop()
            if node.ordered != sorted(node.children):
                return f"block {node.block} has children that are not in order"
            if node.children and node.parent and len(node.tokens) != self.tokens_per_block:
                return f"block {node.block} is cached with {len(node.tokens)} tokens and children"
            for key, child in node.children.items():
                if child.parent is not node or child.tokens != key or child.block in found:
                    return f"block {child.block} is cached twice"
                found[child.block] = child
            below.extend(node.children.values())
        if found != self._nodes:
            lost = sorted(found.keys() ^ self._nodes.keys())
            return f"blocks {lost} are in the index or in the tree, but not both"
        prioritized = sum(node.priority != DEFAULT_PRIORITY for node in found.values())
        if prioritized != self.num_prioritized:
            return f"num_prioritized = {self.num_prioritized}, but {prioritized} priorities are set"
        return None


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def _is_covered(node: Node, key: Tokens) -> bool:
    """Return whether a child of `node` begins with `key`.

    If a child does, the first child that is not before `key` in sorted order begins with `key`.
    """
    index = bisect_left(node.ordered, key)
    return index < len(node.ordered) and node.ordered[index][: len(key)] == key


def _by_whole(node: Node, wanted: Tokens) -> Iterator[tuple[Node, int]]:
    """Yield the children with tokens that are a prefix of `wanted`, the longest prefix first.

    Each child is paired with its number of tokens.
    """
    for num_tokens in range(len(wanted), 0, -1):
        child = node.children.get(wanted[:num_tokens])
        if child is not None:
            yield child, num_tokens


def _by_common_prefix(node: Node, wanted: Tokens) -> Iterator[tuple[Node, int]]:
    """Yield the children that share a prefix with `wanted`, the longest prefix first.

    Each child is paired with the length of the prefix. In sorted order, this length never increases
    with the distance of the child from the place of `wanted`.
    """
    ordered = node.ordered
    right = bisect_left(ordered, wanted)
    left = right - 1
    on_left = common_prefix(ordered[left], wanted) if left >= 0 else 0
    on_right = common_prefix(ordered[right], wanted) if right < len(ordered) else 0
    while on_left or on_right:
        if on_right >= on_left:
            yield node.children[ordered[right]], on_right
            right += 1
            on_right = common_prefix(ordered[right], wanted) if right < len(ordered) else 0
        else:
            yield node.children[ordered[left]], on_left
            left -= 1
            on_left = common_prefix(ordered[left], wanted) if left >= 0 else 0
