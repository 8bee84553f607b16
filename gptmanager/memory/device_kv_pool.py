"""`DeviceKvPool`: a `KvPool` on a device. A kernel on the device's stream copies its blocks.

Blocks from `num_blocks` on are in pinned memory, which the kernel reads and writes directly: no
thread waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from gptmanager.cuda.attention.block_copy import PROGRAM, Copy, as_tensor, copy_blocks, rounds
from gptmanager.cuda.device.launch import Launcher
from gptmanager.errors import ConfigError
from gptmanager.kv_cache.block import BlockCopy
from gptmanager.memory.kv_pool import KvPool

_VECTOR_BYTES = 16  # what the kernel copies at once
_MAX_ROWS = 1 << 31


class DeviceKvPool(KvPool):
    """Pages as CUDA kernels read them: token-major.

    `ConfigError` where a layer has 2^31 rows (tokens of a KV head) or more: kernels count in ints.
    """

    def __init__(self, launcher: Launcher, *sizes: int, **options: Any) -> None:
        _, num_blocks, tokens_per_block, num_kv_heads, _ = sizes
        num_rows = num_blocks * tokens_per_block * num_kv_heads
        if num_rows >= _MAX_ROWS:
            raise ConfigError(
                f"a KV cache of {num_blocks} blocks of {tokens_per_block} tokens and "
                f"{num_kv_heads} KV heads has {num_rows} rows of a layer, and CUDA kernels take "
                f"fewer than {_MAX_ROWS}: set KvCacheConfig.max_tokens"
            )
        super().__init__(*sizes, token_major=True, **options)
        self._launcher = launcher
        for name in PROGRAM.kernels:  # compiled now, and not while requests wait
            launcher.kernel(PROGRAM, name)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Enqueue copies of the beginnings of blocks, as if one after the other."""
        head_dim = self.values.shape[-1]
        if head_dim * self.values.itemsize % _VECTOR_BYTES:
            super().copy(copies)
            return
        for together in rounds(copies):
            self._copy_together(together)

    def _copy_together(self, copies: list[Copy]) -> None:
        """Copies that do not depend on each other, by where they come from and go to."""
        by_ends: dict[tuple[bool, bool], list[Copy]] = {}
        size = self.num_blocks
        for source, destination, num_tokens in copies:
            ends = source >= size, destination >= size
            own = source - size if ends[0] else source
            to = destination - size if ends[1] else destination
            by_ends.setdefault(ends, []).append((own, to, num_tokens))
        for (from_host, to_host), own_copies in by_ends.items():
            numbers = as_tensor(own_copies, self.values.device)
            both = zip(self._pages(from_host), self._pages(to_host), strict=True)
            for from_pages, to_pages in both:
                copy_blocks(self._launcher, to_pages, from_pages, numbers)

    def _pages(self, on_host: bool) -> tuple[Tensor, Tensor]:
        """Keys and values `[layers, blocks, kv_heads, tokens_per_block, head_dim]`."""
        if on_host:
            return self._host_keys.mT, self._host_values
        return self.keys.mT, self.values
