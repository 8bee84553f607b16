"""What stands above a block of a prefix tree, for tests."""

from __future__ import annotations

from collections.abc import Hashable

from gptmanager.kv_cache.prefix_tree import PrefixTree


def path_to(tree: PrefixTree, block: int) -> tuple[Hashable, list[int]]:
    """The root key and all tokens from the beginning to the end of a cached block."""
    path = tree.path(tree._nodes[block])
    return path[0].parent.root_key, [token for node in path for token in node.tokens]
