"""A module for a `ChildProcess` whose answers leave a block at the end of the heap."""

from __future__ import annotations

from collections.abc import Callable

_BLOCK_BYTES = 1 << 16  # below the size from which malloc maps each block alone


def answerer() -> Callable[[int], int]:
    kept: list[bytes] = []

    def answer(num_blocks: int) -> int:
        blocks = [b"x" * _BLOCK_BYTES for _ in range(num_blocks)]
        kept.append(blocks[-1])
        return len(blocks)

    return answer
