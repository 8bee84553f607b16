"""`HostTier`: contents that had to leave the device, kept in host memory until they return.

Decides which of them are kept and which make room, the least recently stored first. It holds
contents, never requests: a paused request is one whose blocks were stored and, perhaps, moved here.
Knows nothing of memory; the moves that it asks for are copies between block ids, in order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from gptmanager.kv_cache.block import BlockCopy
from gptmanager.kv_cache.prefix_tree import PrefixTree

Key = tuple[Hashable, tuple[int, ...]]


class HostTier:
    """The blocks `first_block .. first_block + num_blocks - 1`, each empty or full of tokens.

    A content is found by all tokens from the beginning of its sequence on, so that it does not
    matter where those before it lie. A block that returns to the device is empty here again: what
    is kept is never in both places.
    """

    __slots__ = (
        "first_block", "num_blocks", "num_offloaded", "num_onboarded", "_free", "_moves", "_stored",
    )  # fmt: skip

    def __init__(self, first_block: int, num_blocks: int) -> None:
        self.first_block = first_block
        self.num_blocks = num_blocks
        self.num_offloaded = self.num_onboarded = 0
        self._free = list(range(first_block, first_block + num_blocks))[::-1]
        self._stored: OrderedDict[Key, int] = OrderedDict()
        self._moves: list[BlockCopy] = []

    def __len__(self) -> int:
        return len(self._stored)

    def offload(self, tree: PrefixTree, block: int) -> None:
        """`block` of the device is going to be written to: keep what it holds, if it is full."""
        if block not in tree:
            return
        root_key, tokens = tree.place(block)
        if len(tokens) % tree.tokens_per_block:
            return
        key = root_key, tuple(tokens)
        if key in self._stored:
            self._stored.move_to_end(key)
            return
        if not self._free:
            if not self._stored:
                return  # all of it is on its way back
            self._free.append(self._stored.popitem(last=False)[1])
        place = self._stored[key] = self._free.pop()
        self._moves.append(BlockCopy(block, place, tree.tokens_per_block))
        self.num_offloaded += 1

    def find(
        self, root_key: Hashable, tokens: Sequence[int], start: int, end: int, size: int
    ) -> list[Key]:
        """The full blocks of `tokens[start:end]` that are here, from `start` on without a gap."""
        found = []
        for stop in range(start + size, end + 1, size):
            key = root_key, tuple(tokens[:stop])
            if key not in self._stored:
                break
            found.append(key)
        return found

    def claim(self, keys: Sequence[Key]) -> list[int]:
        """The blocks of `keys`, which leave: none makes room for others until it has returned."""
        return [self._stored.pop(key) for key in keys]

    def onboard(self, place: int, block: int, size: int) -> None:
        """A claimed block returns to `block` of the device."""
        self._moves.append(BlockCopy(place, block, size))
        self._free.append(place)
        self.num_onboarded += 1

    def take_moves(self) -> tuple[BlockCopy, ...]:
        """The copies since the last call, in the order in which they must run."""
        moves, self._moves = self._moves, []
        return tuple(moves)

    def clear(self) -> None:
        """All that is stored is stale."""
        self._free += self._stored.values()
        self._stored.clear()

    def problem(self) -> str | None:
        """The first contradiction; None when there is none. Between two requests' starts."""
        places = sorted([*self._free, *self._stored.values()])
        if places != list(range(self.first_block, self.first_block + self.num_blocks)):
            return f"host blocks {places} are not each free or stored once"
        return None
