"""`Lookups`: remembers which part of each waiting prompt is in the prefix tree.

Schedulers look up all waiting requests in each iteration, so the tree is searched again only if the
result may have changed. This module knows nothing of blocks in use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from gptmanager.kv_cache.needs import UNBOUNDED
from gptmanager.kv_cache.prefix_tree import NO_BLOCK, PrefixTree
from gptmanager.kv_cache.state_snapshots import StateSnapshots
from gptmanager.request.llm_request import LlmRequest

# If there are more lookups, the oldest is dropped, because a scheduler might not report that
# requests ended.
_MAX_LOOKUPS = 10_000


class Lookup:
    """The cached full blocks of a prompt, and its first missing full block.

    `node` is the node of the last cached block. If no block is cached, `node` is the root, or
    None if the tree has no root for the prompt. `num_stored` is `node.num_stored` at the time of
    the search. `missing` is a number that stands for the missing block in fast comparisons, or None
    if all full blocks are cached.
    """

    __slots__ = (
        "blocks", "key", "missing", "node", "num_moves", "num_stored", "prompt_len", "request",
        "version",
    )  # fmt: skip

    def __init__(
        self, request: LlmRequest, tree: PrefixTree, number: Callable[[Hashable], int]
    ) -> None:
        own_root_key = root_key(request)
        self.request = request
        self.version, self.num_moves = tree.version, tree.num_moves
        self.prompt_len = end = request.prompt_len
        self.blocks, self.node = tree.full_blocks(own_root_key, request.tokens, end)
        self.num_stored = 0 if self.node is None else self.node.num_stored
        start, size = len(self.blocks) * tree.tokens_per_block, tree.tokens_per_block
        self.key: Hashable = None  # the key of the missing block
        self.missing: int | None = None
        if start + size <= end:
            parent = self.blocks[-1] if self.blocks else NO_BLOCK
            self.key = own_root_key, parent, tuple(request.tokens[start : start + size])
            self.missing = number(self.key)

    def is_valid_for(self, request: LlmRequest, tree: PrefixTree) -> bool:
        """Return whether a new search for `request` would find the same blocks."""
        if self.request is not request or self.prompt_len != request.prompt_len:
            return False
        if self.version == tree.version:
            return True
        if self.num_moves != tree.num_moves:
            return False
        node = self.node
        if node is None:
            is_valid = not tree.has_root(root_key(request))
        else:
            is_valid = self.num_stored == node.num_stored and tree.holds(node)
        if is_valid:
            self.version = tree.version
        return is_valid


class Answer(NamedTuple):
    """The lookups of several requests, valid until the tree or one of the requests changes.

    For each request, `missing` has the number of its first missing block, or None if none is
    missing, and `num_found` has the number of cached blocks before it. A request that may
    become longer than `Lookups.max_tokens` has None and 0.
    """

    version: int
    requests: list[LlmRequest]
    prompt_lens: list[int]
    missing: list[int | None]
    num_found: list[int]


_NOTHING = Answer(-1, [], [], [], [])


class Lookups:
    """Lookups by request id. Requests that may become longer than `max_tokens` have no lookup.

    With `snapshots`, a new sequence can only begin after a block that has a snapshot.
    """

    __slots__ = (
        "max_tokens", "snapshots", "_last", "_lookups", "_numbers", "_tree", "_unused", "_users",
    )  # fmt: skip

    def __init__(
        self, tree: PrefixTree, max_tokens: int, snapshots: StateSnapshots | None = None
    ) -> None:
        self._tree = tree
        self.max_tokens = max_tokens
        self.snapshots = snapshots
        self._lookups: dict[int, Lookup] = {}
        self._numbers: dict[Hashable, int] = {}
        self._users: dict[Hashable, int] = {}  # number of lookups with this key
        self._unused = itertools.count()  # the numbers that no key has had
        self._last = _NOTHING

    def applies_to(self, request: LlmRequest) -> bool:
        return request.prompt_len + request.max_new_tokens <= self.max_tokens

    def forget(self, request_id: int) -> None:
        """Drop the lookup of a request that has started or ended."""
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None:
            self._release(lookup)
            self._last = _NOTHING  # the last answer may contain the request

    def find(self, request: LlmRequest) -> Lookup:
        """Return the lookup of a request. Search the tree only if no valid lookup is known."""
        known = self._lookups.get(request.request_id)
        if known is not None and known.is_valid_for(request, self._tree):
            return known
        lookup = self._lookups[request.request_id] = Lookup(request, self._tree, self._number)
        if len(self._lookups) > _MAX_LOOKUPS:
            self.forget(next(iter(self._lookups)))
        if known is not None:  # only now, so that a block that is still missing keeps its number
            self._release(known)
        return lookup

    def cached_blocks(self, request: LlmRequest) -> list[int]:
        """Return the full blocks of the prompt that a new sequence would share, in order."""
        blocks = self._readable(request)
        if self.snapshots is None:
            return blocks
        return blocks[: self.snapshots.count_reusable(blocks)]

    def missing_snapshot(self, request: LlmRequest) -> int | None:
        """Return the last cached block of the prompt if it lacks a snapshot, otherwise None.

        If the request started now, it would compute the state after this block.
        """
        if self.snapshots is None or not self.snapshots.cuts_contexts:
            return None
        blocks = self._readable(request)
        return blocks[-1] if blocks and blocks[-1] not in self.snapshots else None

    def all_cached(self, requests: Sequence[LlmRequest]) -> list[int]:
        """Return the number of `cached_blocks` of each request; 0 if it does not reuse blocks."""
        num_found = self.find_all(requests).num_found
        if not any(num_found):
            return num_found
        return [
            count and len(self.cached_blocks(request))
            for request, count in zip(requests, num_found, strict=True)
        ]

    def find_all(self, requests: Sequence[LlmRequest]) -> Answer:
        """Look up all requests in one call, which is fast if most of the lookups are known."""
        tree, last = self._tree, self._last
        lengths = [request.prompt_len for request in requests]
        bounded = self.max_tokens < UNBOUNDED
        if (
            last.version == tree.version
            and last.prompt_lens == lengths
            and last.requests == requests
            and not bounded
        ):  # a scheduling decision asks twice, and the next decision asks again
            return last
        version, find = tree.version, self._lookups.get
        missing: list[int | None] = []
        num_found: list[int] = []
        for request, length in zip(requests, lengths, strict=True):
            if bounded and not self.applies_to(request):
                missing.append(None)
                num_found.append(0)
                continue
            lookup = find(request.request_id)
            if (
                lookup is None
                or lookup.version != version
                or lookup.request is not request
                or lookup.prompt_len != length
            ):
                lookup = self.find(request)
            missing.append(lookup.missing)
            num_found.append(len(lookup.blocks))
        self._last = Answer(version, [*requests], lengths, missing, num_found)
        return self._last

    def _readable(self, request: LlmRequest) -> list[int]:
        """Return the cached full blocks before the prompt's last token, in order."""
        if not request.reads_cache:
            return []
        blocks = self.find(request).blocks
        return blocks and blocks[: (request.prompt_len - 1) // self._tree.tokens_per_block]

    def _number(self, key: Hashable) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = next(self._unused)
        self._users[key] = self._users.get(key, 0) + 1
        return number

    def _release(self, lookup: Lookup) -> None:
        if lookup.missing is None:
            return
        key = lookup.key
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key], self._numbers[key]


def root_key(request: LlmRequest) -> Hashable:
    return key_of(request.adapter_key, request.cache_salt)


def key_of(adapter_key: int | str | None, salt: Hashable) -> Hashable:
    # 1 and True are equal, but they are different salts
    return adapter_key, type(salt).__name__, salt
