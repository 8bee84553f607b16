"""`AttentionWindow`: which positions of a sequence are kept, and in which blocks.

This module only computes positions and indices of blocks. It does not know the owner of a block, or
how attention is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """A window of the last `size` positions, and a sink of the first `sink` positions.

    A token at position p attends to positions p - size + 1 to p, and to the sink. A sequence keeps
    at most `num_blocks` blocks. The sink's blocks stay; later positions use the other blocks as a
    ring buffer. The ring has one block more than `size` positions need, because the window seldom
    begins at a block boundary. The sink gets whole blocks.
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
        """The greatest length, in tokens, at which a sequence still keeps all its positions."""
        return self.num_blocks * self.tokens_per_block

    def index(self, block: int) -> int:
        """Return the block table index for position p, if `block` is p // `tokens_per_block`."""
        first = self.num_sink_blocks
        return block if block < first else first + (block - first) % self.num_ring_blocks

    def pieces(self, position: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (position, end) of the parts into which a context chunk must be divided.

        All keys of a part can be written before the part's queries run, because they overwrite no
        key that one of these queries attends to.
        """
        while position < end:
            oldest = max(0, position + 1 - self.size) // self.tokens_per_block
            stop = max(oldest, self.num_sink_blocks) + self.num_ring_blocks
            piece_end = min(end, stop * self.tokens_per_block)
            yield position, piece_end
            position = piece_end
