"""`KvPool`: the keys and values of every layer, in blocks (pages) of `tokens_per_block` tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gptmanager.environment.machine.memory import prefer_huge_pages
from gptmanager.kv_cache.block import BlockCopy
from gptmanager.memory.host_memory import HostMemory
from gptmanager.memory.slot_states import SlotStates, StateShape

NewTensor = Callable[[tuple[int, ...], torch.dtype], Tensor]


class PageShape(NamedTuple):
    """The shape of the keys and values that a layer stores for a token.

    Without `has_values`, the keys are also used as the values, and are stored once.
    """

    num_kv_heads: int
    head_dim: int
    has_values: bool = True

    @property
    def elements(self) -> int:
        """The number of elements that a layer stores for a token."""
        return (1 + self.has_values) * self.num_kv_heads * self.head_dim


class PageStack(NamedTuple):
    """The pages of all layers of one shape.

    `keys` is `[layers, blocks, kv_heads, head_dim, tokens_per_block]`, and `values` is `[layers,
    blocks, kv_heads, tokens_per_block, head_dim]`. Without `has_values`, both are views of the same
    memory.
    """

    keys: Tensor
    values: Tensor
    has_values: bool = True

    @property
    def tokens(self) -> tuple[Tensor, ...]:
        """The token-major keys and the values. Without `has_values`, only the values."""
        return (self.keys.mT, self.values) if self.has_values else (self.values,)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tokens)


class KvPool:
    """The keys and values of all blocks, by block id. The pool does not know their sequences.

    `shapes` has the shape of each layer's pages. Layers of one shape are in one `PageStack`.
    `layers` has the keys and values of each layer. By default, keys are transposed inside a block,
    so that the scores of one query against a block are computed along contiguous memory. If `dtype`
    is float8_e4m3fn, readers multiply the elements by the model's scales.

    With `token_major`, keys have the memory layout of values, because CUDA kernels read whole
    tokens; the keys of a stack are then a transposed view. Keys that are also used as values always
    have this layout. With `contiguous`, blocks on the device have this layout, too, and the values
    of a block follow its keys, so that both are views of one tensor.

    Another `num_host_blocks` blocks are in CPU memory, with ids from `num_blocks` on. Host blocks
    are copied to and from the device, and steps never use them. `states` are the `SlotStates` of
    recurrent layers: each of `num_lines` lines has one state of each shape in `state_shapes`.
    """

    def __init__(
        self,
        shapes: Sequence[PageShape],
        num_blocks: int,
        tokens_per_block: int,
        *,
        num_host_blocks: int = 0,
        state_shapes: Sequence[StateShape] = (),
        num_lines: int = 0,
        token_major: bool = False,
        contiguous: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.tokens_per_block = tokens_per_block
        self.device = torch.device(device)
        self._host_memory = HostMemory(self.device)
        self.states = SlotStates(state_shapes, num_lines, self.device)

        def on_device(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            if self.device.type == "cpu":
                prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)
            return tensor

        def stack(shape: PageShape, blocks: int, empty: NewTensor, whole: bool) -> PageStack:
            heads, head_dim, has_values = shape
            first = shapes.count(shape), blocks
            if whole and has_values:
                both = empty((*first, 2, heads, tokens_per_block, head_dim), dtype)
                return PageStack(both[:, :, 0].mT, both[:, :, 1])
            tokens = empty((*first, heads, tokens_per_block, head_dim), dtype)
            if not has_values:
                return PageStack(tokens.mT, tokens, has_values)
            if token_major:
                return PageStack(empty(tuple(tokens.shape), dtype).mT, tokens)
            return PageStack(empty((*first, heads, head_dim, tokens_per_block), dtype), tokens)

        kinds = [*dict.fromkeys(shapes)]
        self._is_contiguous, self._shapes = contiguous, shapes
        self.stacks = [stack(it, num_blocks, on_device, contiguous) for it in kinds]
        host = self._host_memory.empty
        self.host_stacks = [stack(it, num_host_blocks, host, False) for it in kinds]
        numbers = [shapes[:layer].count(shape) for layer, shape in enumerate(shapes)]
        places = zip(map(kinds.index, shapes), numbers, strict=True)
        stacks = self.stacks
        self.layers = [(stacks[k].keys[at], stacks[k].values[at]) for k, at in places]

    def contiguous(self, layer: int) -> Tensor:
        """Return a layer's keys and values, `[blocks, 2, kv_heads, tokens_per_block, head_dim]`.

        If the pool was created `contiguous` and the layer `has_values`, the result is a view,
        otherwise a copy. With the model type V1, a sequence has one block, so the result is
        `[sequences, 2, kv_heads, max_seq_len, head_dim]`. The index of a sequence is the only
        entry of the sequence's row in `Batch.block_tables`.
        """
        keys, values = self.layers[layer]
        if not self._is_contiguous or not self._shapes[layer].has_values:
            return torch.stack((keys.mT, values), dim=1)
        blocks, *shape = values.shape
        strides = values.stride()
        both = (blocks, 2, *shape), (strides[0], values[0].numel(), *strides[1:])
        return keys.mT.as_strided(*both)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copy the first tokens of blocks to other blocks, in the order of `copies`."""
        for source, destination, num_tokens in copies:
            for own, other in zip(self._block(destination), self._block(source), strict=True):
                own.keys[..., :num_tokens] = other.keys[..., :num_tokens]
                own.values[:, :, :num_tokens] = other.values[:, :, :num_tokens]

    def _block(self, block: int) -> list[PageStack]:
        """Return a block's keys `[layers, kv_heads, head_dim, tokens]` and values, per stack."""
        on_device = block < self.num_blocks
        stacks = self.stacks if on_device else self.host_stacks
        index = block if on_device else block - self.num_blocks
        return [PageStack(it.keys[:, index], it.values[:, index]) for it in stacks]

    @property
    def memory(self) -> list[Tensor]:
        """All memory of pages and states as flat tensors, except pinned memory on the host."""
        stacks = self.stacks + (self.host_stacks if self.device.type == "cpu" else [])
        tensors = [it for stack in stacks for it in (stack.keys, stack.values)]
        storages = (it.untyped_storage() for it in [*tensors, *self.states.stacks] if it.nbytes)
        by_address = {storage.data_ptr(): storage for storage in storages}
        flat = torch.empty(0, dtype=torch.uint8, device=self.device)
        return [flat.new_empty(0).set_(storage) for storage in by_address.values()]

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks) + self.states.nbytes

    @property
    def host_nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.host_stacks)

    @property
    def keys(self) -> Tensor:
        """The keys of all layers. All layers must have the same shape."""
        [stack] = self.stacks
        return stack.keys

    @property
    def values(self) -> Tensor:
        """The values of all layers. All layers must have the same shape."""
        [stack] = self.stacks
        return stack.values

    @staticmethod
    def bytes_per_block(
        shapes: Iterable[PageShape], tokens_per_block: int, dtype: torch.dtype = torch.float32
    ) -> int:
        return sum(shape.elements for shape in shapes) * tokens_per_block * dtype.itemsize
