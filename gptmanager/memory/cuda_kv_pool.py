"""`CudaKvPool`: a `KvPool` for CUDA kernels. A kernel on the device's stream copies blocks.

Blocks with ids from `num_blocks` on are in pinned host memory. The kernel reads and writes this
memory directly, so no thread waits. If the size of a head's vector is not a multiple of 16 bytes,
torch copies the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from gptmanager.cuda.attention.block_copy import PROGRAM, Copy, as_tensor, copy_blocks, rounds
from gptmanager.cuda.device.launch import Launcher
from gptmanager.errors import ConfigError
from gptmanager.kv_cache.block import BlockCopy
from gptmanager.memory.kv_pool import KvPool, PageShape

_VECTOR_BYTES = 16  # the kernel copies vectors of this size
_MAX_ROWS = 1 << 31


class CudaKvPool(KvPool):
    """Pages in token-major layout, which CUDA kernels read.

    A row is the vector of one token and one KV head. Raises ConfigError if a layer has 2^31 or more
    rows on the device, because the index of a row is an int32 in kernels.
    """

    def __init__(
        self,
        launcher: Launcher,
        shapes: Sequence[PageShape],
        num_blocks: int,
        tokens_per_block: int,
        **options: Any,
    ) -> None:
        num_kv_heads = max(shape.num_kv_heads for shape in shapes)
        num_rows = num_blocks * tokens_per_block * num_kv_heads
        if num_rows >= _MAX_ROWS:
            raise ConfigError(
                f"a KV cache of {num_blocks} blocks of {tokens_per_block} tokens and "
                f"{num_kv_heads} KV heads has {num_rows} rows per layer, and CUDA kernels support "
                f"fewer than {_MAX_ROWS}: set KvCacheConfig.max_tokens"
            )
        super().__init__(shapes, num_blocks, tokens_per_block, token_major=True, **options)
        self._launcher = launcher
        for name in PROGRAM.kernels:  # compiled now, so that no request waits for it
            launcher.kernel(PROGRAM, name)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Enqueue copies of the first tokens of blocks.

        The result is the same as if the copies ran one after another.
        """
        if any(it.values.shape[-1] * it.values.itemsize % _VECTOR_BYTES for it in self.stacks):
            super().copy(copies)
            return
        for together in rounds(copies):
            self._copy_together(together)

    def _copy_together(self, copies: list[Copy]) -> None:
        """Enqueue independent copies.

        All copies between the same memories, such as from the device to the host, share one launch
        per tensor.
        """
        by_ends: dict[tuple[bool, bool], list[Copy]] = {}
        size = self.num_blocks
        for source, destination, num_tokens in copies:
            ends = source >= size, destination >= size
            own = source - size if ends[0] else source
            to = destination - size if ends[1] else destination
            by_ends.setdefault(ends, []).append((own, to, num_tokens))
        for (from_host, to_host), own_copies in by_ends.items():
            numbers = as_tensor(own_copies, self.device)
            both = zip(self._pages(from_host), self._pages(to_host), strict=True)
            for from_pages, to_pages in both:
                copy_blocks(self._launcher, to_pages, from_pages, numbers)

    def _pages(self, on_host: bool) -> list[Tensor]:
        """Return the keys and values of the blocks on the host or on the device, by stack.

        Each tensor is `[layers, blocks, kv_heads, tokens_per_block, head_dim]`.
        """
        stacks = self.host_stacks if on_host else self.stacks
        return [tensor for stack in stacks for tensor in stack.tokens]
