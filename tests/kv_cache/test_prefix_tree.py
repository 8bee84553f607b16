"""The prefix tree: examples by hand, and a machine against a plain dict of whole prefixes."""

from __future__ import annotations

import pytest
from fuzz import FUZZ
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tree_paths import path_to

from gptmanager.kv_cache.prefix_tree import NO_BLOCK, PrefixTree, common_prefix


def any_block(block: int) -> bool:
    return True


def tree_of(*stored: tuple[list[int], list[int]], size: int = 3) -> PrefixTree:
    tree = PrefixTree(size)
    for tokens, blocks in stored:
        tree.store(None, tokens, len(tokens), blocks)
    return tree


def test_a_block_is_found_by_all_tokens_up_to_its_end():
    tree = tree_of(([1, 2, 3, 4, 5, 6, 7], [10, 11, 12]), ([9, 9, 9, 4, 5, 6], [20, 21]))
    assert tree.full_blocks(None, [1, 2, 3, 4, 5, 6, 7, 8], 8)[0] == [10, 11]
    assert tree.full_blocks(None, [9, 9, 9, 4, 5, 6], 5)[0] == [20]
    assert tree.full_blocks(None, [4, 5, 6], 3)[0] == []
    assert tree.full_blocks("salt", [1, 2, 3], 3) == ([], None)
    assert path_to(tree, 21) == (None, [9, 9, 9, 4, 5, 6])
    assert (len(tree), 12 in tree, 13 in tree) == (5, True, False)


@pytest.mark.parametrize(
    ("tokens", "end", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], 6, ([10], 11, 2)),  # 4 5 | 6
        ([1, 2, 3, 4, 5, 6], 5, ([10], 11, 2)),
        ([1, 2, 3, 4, 5, 6], 4, ([10], 11, 1)),
        ([1, 2, 3, 4, 5, 6], 3, ([10], NO_BLOCK, 0)),
        ([1, 2, 3, 4, 5, 6], 2, ([], 10, 2)),
        ([1, 2, 9, 4, 5, 6], 6, ([], 10, 2)),
        ([1, 7, 9], 3, ([], 20, 2)),
        ([2], 1, ([], NO_BLOCK, 0)),
    ],
)
def test_the_longest_common_beginning_of_one_more_block_matches(tokens, end, expected):
    tree = tree_of(([1, 2, 3, 4, 5], [10, 11]), ([1, 7, 3], [20]))
    assert tree.match(None, tokens, end, any_block)[:3] == expected


def test_the_next_longest_block_matches_if_the_longest_may_not():
    tree = tree_of(([1, 2, 3], [10]), ([1, 2, 4], [11]), ([1, 5, 5], [12]), ([7], [13]))
    allowed = {10, 11, 12, 13}
    found = []
    while (match := tree.match(None, [1, 2, 3], 2, allowed.__contains__)).num_partial:
        found.append(match.num_partial)
        allowed.remove(match.partial)
    assert (found, allowed) == ([2, 2, 1], {13})
    assert tree.match(None, [1, 2, 3], 2).partial == NO_BLOCK


def test_the_least_of_many_blocks_is_found_if_no_other_may_be_the_partial_one():
    tree = tree_of(([1, 1, 1], [10]), ([1, 2, 1], [11]), ([1, 2, 3], [12]))
    match = tree.match(None, [1, 2, 9], 3, [10].__contains__)
    assert (match.partial, match.num_partial) == (10, 1)


def test_store_keeps_cached_blocks_and_adds_the_rest_after_them():
    tree = tree_of(([1, 2, 3, 4, 5, 6], [10, 11]), ([1, 2, 3, 7, 8, 9], [20, 21]))
    assert tree.full_blocks(None, [1, 2, 3, 7, 8, 9], 6)[0] == [10, 21]
    assert 20 not in tree
    tree.store(None, [1, 2, 3, 7], 4, [30, 31])  # block 21 begins with it
    assert len(tree) == 3
    tree.store(None, [1, 2, 3, 8], 4, [30, 31])
    assert tree.match(None, [1, 2, 3, 8], 4, any_block)[:3] == ([10], 31, 1)


def test_forgetting_a_block_forgets_its_descendants():
    tree = tree_of(([1, 2, 3, 4, 5, 6, 7], [10, 11, 12]), ([1, 2, 3, 9], [10, 13]))
    assert [tree.is_leaf(block) for block in (10, 11, 12, 13, 99)] == [False, False, True, True, 1]
    tree.forget(11)
    assert (len(tree), 12 in tree, tree.is_leaf(10)) == (2, False, False)
    tree.forget(11)
    tree.forget(10)
    assert len(tree) == 0 and tree.full_blocks(None, [1, 2, 3], 3) == ([], None)
    tree.store(None, [1, 2, 3], 3, [10])
    tree.clear()
    assert len(tree) == 0 and 10 not in tree and tree.problem() is None


def test_a_found_node_stays_valid_while_its_block_is_cached():
    tree = tree_of(([1, 2, 3], [10]))
    tokens = [1, 2, 3, 4, 5, 6, 7]
    blocks, node = tree.full_blocks(None, tokens, 7)
    assert blocks == [10] and tree.holds(node)
    tree.store(None, tokens, 7, [10, 11, 12])
    assert tree.holds(node)
    blocks, end = tree.full_blocks(None, tokens, 7)
    assert blocks == [10, 11]
    tree.forget(11)
    assert (tree.holds(node), tree.holds(end)) == (True, False)
    tree.forget(10)
    tree.store(None, [1, 2, 3], 3, [10])
    assert not tree.holds(node)
    root = tree.full_blocks(None, [9], 1)[1]
    assert tree.holds(root)
    tree.clear()
    assert not tree.holds(root)


TOKENS = st.lists(st.integers(0, 2), max_size=9)
ROOTS = st.sampled_from([None, "salt"])


class PrefixTreeMachine(RuleBasedStateMachine):
    """The model: what each cached block holds, from the first token of the sequence on."""

    @initialize(size=st.integers(1, 4))
    def build(self, size):
        self.size = size
        self.tree = PrefixTree(size)
        self.model = {}

    def holders(self, root, prefix):
        return [block for block, content in self.model.items() if content == (root, prefix)]

    @rule(root=ROOTS, tokens=TOKENS, blocks=st.permutations(range(14)))
    def store(self, root, tokens, blocks):
        blocks = [block for block in blocks if block not in self.model]
        size = self.size
        blocks = blocks[: -(-len(tokens) // size)]
        self.tree.store(root, tokens, len(tokens), blocks)
        for index, block in enumerate(blocks):
            prefix = tuple(tokens[: (index + 1) * size])
            if self.holders(root, prefix):
                continue
            longer = [
                other
                for key, other in self.model.values()
                if key == root and other[: len(prefix)] == prefix
            ]
            if len(prefix) % size and longer:
                break
            self.model[block] = (root, prefix)

    @rule(block=st.integers(0, 13))
    def forget(self, block):
        self.tree.forget(block)
        if block in self.model:
            root, prefix = self.model.pop(block)
            for other, (key, content) in list(self.model.items()):
                is_behind = len(prefix) % self.size == 0 and content[: len(prefix)] == prefix
                if key == root and is_behind:
                    del self.model[other]

    @rule(root=ROOTS, tokens=TOKENS, end=st.integers(0, 9), banned=st.sets(st.integers(0, 13)))
    def match(self, root, tokens, end, banned):
        size, end = self.size, min(end, len(tokens))
        full = []
        while (len(full) + 1) * size <= end:
            found = self.holders(root, tuple(tokens[: (len(full) + 1) * size]))
            if not found:
                break
            full += found
        start = len(full) * size
        wanted = tokens[start : min(end, start + size)]
        partial = {}
        for block, (key, content) in self.model.items():
            behind = content[start:]
            here = key == root and list(content[:start]) == tokens[:start]
            if here and 0 < len(behind) <= size and block not in banned:
                partial[block] = common_prefix(behind, wanted)
        best = max(partial.values(), default=0)
        match = self.tree.match(root, tokens, end, lambda block: block not in banned)
        assert (match.blocks, match.num_partial) == (full, best)
        assert partial[match.partial] == best if best else match.partial == NO_BLOCK

        whole = {b: n for b, n in partial.items() if n == len(self.model[b][1]) - start}
        best = max(whole.values(), default=0)
        match = self.tree.match(
            root, tokens, end, lambda block: block not in banned, whole_only=True
        )
        assert (match.blocks, match.num_partial) == (full, best)
        assert whole[match.partial] == best if best else match.partial == NO_BLOCK

    @invariant()
    def the_tree_is_the_model(self):
        if not hasattr(self, "tree"):
            return
        assert self.tree.problem() is None
        assert len(self.tree) == len(self.model)
        for block, (root, prefix) in self.model.items():
            assert path_to(self.tree, block) == (root, list(prefix))
            behind = [
                other
                for key, other in self.model.values()
                if key == root and len(other) > len(prefix) and other[: len(prefix)] == prefix
            ]
            is_full = len(prefix) % self.size == 0
            assert self.tree.is_leaf(block) == (not behind or not is_full)


PrefixTreeMachine.TestCase.settings = settings(
    max_examples=50 * FUZZ, stateful_step_count=30, deadline=None, derandomize=True
)
TestPrefixTreeMachine = PrefixTreeMachine.TestCase
