"""`AttentionWindow`: which positions of a sequence are kept, and in which of its blocks.

Pure arithmetic of positions. Knows nothing of who holds a block, nor of how attention is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """A token at position p sees p - size + 1 to p, and the first `sink` positions.

    A sequence keeps `num_blocks` blocks at most. Those of the sink stay, each later position lies
    in the ring of the others: one more than the window fills, since it seldom begins on a block.
    Blocks are whole, so the sink needs no padding.
    """

    size: int
    sink: int
    tokens_per_block: int

    @property
    def num_sink_blocks(self) -> int:
        return -(-self.sink // self.tokens_per_block)

    @property
    def num_ring_blocks(self) -> int:
        return -(-self.size // self.tokens_per_block) + 1

    @property
    def num_blocks(self) -> int:
        return self.num_sink_blocks + self.num_ring_blocks

    @property
    def num_tokens(self) -> int:
        """Return the length up to which the blocks hold a sequence whole."""
        return self.num_blocks * self.tokens_per_block

    def index(self, block: int) -> int:
        """Which of the blocks held, in the order they were taken, stands for the sequence's."""
        first = self.num_sink_blocks
        return block if block < first else first + (block - first) % self.num_ring_blocks

    def pieces(self, position: int, end: int) -> Iterator[tuple[int, int]]:
        """(position, end) of pieces whose keys may be written before their queries look back.

        None of them writes over what a query of its own still sees.
        """
        while position < end:
            oldest = max(0, position + 1 - self.size) // self.tokens_per_block
            stop = max(oldest, self.num_sink_blocks) + self.num_ring_blocks
            piece_end = min(end, stop * self.tokens_per_block)
            yield position, piece_end
            position = piece_end
