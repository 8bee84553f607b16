"""`KvPool`: the keys and values of every layer, in pages ("blocks") of `tokens_per_block`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gptmanager.kv_cache.block import BlockCopy
from gptmanager.memory.host_memory import HostMemory

NewTensor = Callable[[tuple[int, ...], torch.dtype], Tensor]


class KvPool:
    """The keys and values of all blocks, by block id. Does not know which sequence holds a block.

    `keys` `[layers, blocks, kv_heads, head_dim, tokens_per_block]`: transposed inside a block, so
    that the scores of one query against a block are computed along contiguous memory. `values`
    `[layers, blocks, kv_heads, tokens_per_block, head_dim]`. With `dtype` float8_e4m3fn, elements
    are multiplied by a scale that the model has. `token_major`: keys have the memory layout of
    values, and `keys` is a transposed view, because CUDA kernels read whole tokens. `contiguous`:
    as with `token_major`, and the values of a block follow its keys, so that both are views of one
    tensor.

    `num_host_blocks` more blocks are in CPU memory, with ids from `num_blocks` on. They are copied
    to and from the device, and steps never use them.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        tokens_per_block: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_host_blocks: int = 0,
        token_major: bool = False,
        contiguous: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.tokens_per_block = tokens_per_block
        own = (num_layers, num_blocks, num_kv_heads)
        host = (num_layers, num_host_blocks, num_kv_heads)
        self._host_memory = HostMemory(torch.device(device))

        def pages(shape: tuple[int, int, int], is_keys: bool, empty: NewTensor) -> Tensor:
            if is_keys and not token_major:
                return empty((*shape, head_dim, tokens_per_block), dtype)
            tokens = empty((*shape, tokens_per_block, head_dim), dtype)
            return tokens.mT if is_keys else tokens

        def on_device(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self._whole: Tensor | None = None
        if contiguous:
            shape = (num_layers, num_blocks, 2, num_kv_heads, tokens_per_block, head_dim)
            self._whole = torch.empty(shape, dtype=dtype, device=device)
            self.keys, self.values = self._whole[:, :, 0].mT, self._whole[:, :, 1]
        else:
            self.keys = pages(own, is_keys=True, empty=on_device)
            self.values = pages(own, is_keys=False, empty=on_device)
        self._host_keys = pages(host, is_keys=True, empty=self._host_memory.empty)
        self._host_values = pages(host, is_keys=False, empty=self._host_memory.empty)

    def contiguous(self, layer: int) -> Tensor:
        """Return a layer's keys and values, `[blocks, 2, kv_heads, tokens_per_block, head_dim]`.

        The result is a view if the pool was created `contiguous`, otherwise a copy. In V1 a
        sequence has one block, so this is `[sequences, 2, kv_heads, max_seq_len, head_dim]`. The
        row of a sequence is the only entry of its line in `Batch.block_tables`.
        """
        if self._whole is not None:
            return self._whole[layer]
        return torch.stack((self.keys[layer].mT, self.values[layer]), dim=1)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copy the first tokens of blocks, one copy after the other."""
        for source, destination, num_tokens in copies:
            keys, values = self._block(destination)
            source_keys, source_values = self._block(source)
            keys[..., :num_tokens] = source_keys[..., :num_tokens]
            values[:, :, :num_tokens] = source_values[:, :, :num_tokens]

    def _block(self, block: int) -> tuple[Tensor, Tensor]:
        """Return the keys `[layers, kv_heads, head_dim, tokens]` and the values of a block."""
        if block < self.num_blocks:
            return self.keys[:, block], self.values[:, block]
        index = block - self.num_blocks
        return self._host_keys[:, index], self._host_values[:, index]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def host_nbytes(self) -> int:
        return self._host_keys.nbytes + self._host_values.nbytes

    @staticmethod
    def bytes_per_block(
        num_layers: int,
        tokens_per_block: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> int:
        return 2 * num_layers * tokens_per_block * num_kv_heads * head_dim * dtype.itemsize
