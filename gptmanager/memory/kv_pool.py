"""`KvPool`: the keys and values of every layer, in pages ("blocks") of `tokens_per_block`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gptmanager.kv_cache.block import BlockCopy


class KvPool:
    """Paged storage, addressed by block id; which sequence holds a block is not known here.

    `keys` `[layers, blocks, kv_heads, head_dim, tokens_per_block]`: transposed inside a block, so
    that the scores of one query against a block run along contiguous memory.
    `values` `[layers, blocks, kv_heads, tokens_per_block, head_dim]`.
    On the CPU pages are float32 whatever the model's dtype.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        tokens_per_block: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        shape = (num_layers, num_blocks, num_kv_heads)
        self.keys: Tensor = torch.empty(
            (*shape, head_dim, tokens_per_block), dtype=dtype, device=device
        )
        self.values: Tensor = torch.empty(
            (*shape, tokens_per_block, head_dim), dtype=dtype, device=device
        )

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Carry out copies of the beginnings of blocks, one after the other."""
        for source, destination, num_tokens in copies:
            keys, values = self.keys[..., :num_tokens], self.values[:, :, :, :num_tokens]
            keys[:, destination] = keys[:, source]
            values[:, destination] = values[:, source]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @staticmethod
    def bytes_per_block(
        num_layers: int,
        tokens_per_block: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> int:
        return 2 * num_layers * tokens_per_block * num_kv_heads * head_dim * dtype.itemsize
