"""Copies the first tokens of KV cache blocks, within a pool or between GPU and CPU memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gptmanager.cuda.device.launch import Argument, Launcher, Program, check_tensors, ints

_THREADS = 128
PROGRAM = Program("attention/block_copy.cu", ("copy_blocks",))

Copy = tuple[int, int, int]  # source, destination, number of tokens; see `kv_cache.block.BlockCopy`


def rounds(copies: Iterable[Copy]) -> list[list[Copy]]:
    """Split `copies` into rounds in which no copy writes a block that another copy uses.

    The copies of a round may run at the same time. If the rounds run one after another, the result
    is the same as if the copies had run in order.
    """
    result: list[list[Copy]] = [[]]
    read: set[int] = set()
    written: set[int] = set()
    for source, destination, num_tokens in copies:
        if source in written or destination in written or destination in read:
            result.append([])
            read, written = set(), set()
        result[-1].append((source, destination, num_tokens))
        read.add(source)
        written.add(destination)
    return [own for own in result if own]


def copy_blocks(launcher: Launcher, destination: Tensor, source: Tensor, copies: Tensor) -> None:
    """Copy the first n tokens of block a of `source` to block b of `destination`, in every layer.

    `destination` and `source` `[L, P, K, B, D]` (layers, blocks, KV heads, tokens of a block, head
    dimension) have the same dtype, and may be the same pool. `copies` int32 `[N, 3]` has a, b and n
    of each copy; no copy may write a block that another copy uses (see `rounds`). The size of D
    elements must be a multiple of 16 bytes. Raises ValueError if this size, or the shape, dtype or
    layout of a tensor, is wrong.
    """
    num_layers, num_blocks, num_kv_heads, tokens_per_block, head_dim = source.shape
    if head_dim * source.itemsize % 16:
        raise ValueError(f"a token of {head_dim} {source.dtype} must be a multiple of 16 bytes")
    shape = (num_layers, None, num_kv_heads, tokens_per_block, head_dim)
    for pool in (destination, source):  # one of them may be CPU memory
        check_tensors(pool=(pool, shape, source.dtype))
    check_tensors(copies=(copies, (None, 3), torch.int32))
    if len(copies) == 0:
        return
    vectors = head_dim * source.itemsize // 16
    sizes = (destination.shape[1], num_blocks, num_kv_heads, tokens_per_block, vectors)
    arguments: tuple[Argument, ...] = (destination, source, copies, *ints(*sizes))
    grid = (len(copies), num_layers * num_kv_heads)
    launcher.kernel(PROGRAM, "copy_blocks")(grid, (_THREADS,), arguments)


def as_tensor(copies: Sequence[Copy], device: torch.device | str) -> Tensor:
    """Return `copies` as a tensor for `copy_blocks`; its transfer to a GPU is asynchronous."""
    is_cpu = torch.device(device).type == "cpu"
    numbers = torch.tensor(copies, dtype=torch.int32, pin_memory=not is_cpu).reshape(-1, 3)
    return numbers.to(device, non_blocking=True)
